"""Scores new rows with a trained DLRM: a file in the format of its training data, through its compressed tables.

    file -> blocks of text -> rows -> ids by the dictionaries of the training data -> logits -> line, logit, probability

Memory does not grow with the file. An unreadable row gets no score; every score comes with its line number, so none is
mistaken for another's.
B batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TextIO

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.errors import CheckpointError, ConfigError, DataError
from comera.files import replace_file
from comera.recipes.data.cache import Progress, cache_folder
from comera.recipes.dlrm.criteo.batches import RowEncoder
from comera.recipes.dlrm.criteo.config import CATEGORIES, INTEGERS
from comera.recipes.dlrm.criteo.rows import (
    END_MISSING,
    START,
    CriteoRows,
    RowFormat,
    find_files,
    open_table,
    read_blocks,
)
from comera.recipes.trained import Trained
from comera.trainer.step import autocast, set_precision_

HEADER = "line,logit,probability\n"
LABELED = {INTEGERS + CATEGORIES: True, INTEGERS + CATEGORIES - 1: False}  # by number of tabs in a row


@dataclass
class Scores:
    """What was scored: good rows and skipped bad ones; seconds; sums over the rows of probabilities and, if they have
    labels, of labels and of log losses in nats."""

    path: Path
    rows: int = 0
    bad: int = 0
    seconds: float = 0.0
    labeled: bool = False
    probabilities: float = 0.0
    labels: float = 0.0
    losses: float = 0.0

    def add(self, logits_B: Tensor, labels_B: Tensor) -> None:
        """Count rows by their logits and, if they have any, their labels."""
        self.rows += len(logits_B)
        self.probabilities += float(logits_B.sigmoid().sum())
        if self.labeled:
            self.labels += float(labels_B.sum())
            self.losses += float(F.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="sum"))

    def __str__(self) -> str:
        skipped = f", {self.bad:,} bad rows skipped" if self.bad else ""
        parts = [f"{self.path}: {self.rows:,} rows scored{skipped}, {self.rows / self.seconds:,.0f} rows/s"]
        if self.rows:
            parts.append(f"mean probability {self.probabilities / self.rows:.4f}")
        if self.rows and self.labeled:
            parts.append(f"clicks {self.labels / self.rows:.4f}, log loss {self.losses / self.rows:.4f}")
        return "; ".join(parts)


def score(
    trained: Trained,
    file: Path,
    out: Path,
    *,
    batch_size: int = 4096,
    max_bad_rows: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Scores:
    """Write the logit of each row of `file` to `out`, a CSV file that appears once it is complete.

    file: rows in Criteo's format, with or without a label in front; for a run on a table (.csv, .tsv), a table with the
    same columns, in any order, with or without labels; plain or gzipped. max_bad_rows: bad rows to skip
    before giving up. overwrite: replace existing scores in `out`. The model is in evaluation mode, in the precision of
    its training. Raises ConfigError for a run of another recipe, and if `out` exists (with `overwrite`: and holds
    anything but scores). Raises DataError, with file and line, for too many bad rows or a file that is cut short, and
    if the prepared data with the run's dictionaries is gone (hashed categories need none)."""
    if trained.recipe != "dlrm":
        raise ConfigError(
            f"expected a run of dlrm, whose input is a file of rows, got one of {trained.recipe}, "
            f"{trained.checkpoint}: write its model with `comera export`, and call that with its inputs"
        )
    for name, value, least in (("batch_size", batch_size, 1), ("max_bad_rows", max_bad_rows, 0)):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    if out.exists():
        if not overwrite:
            raise ConfigError(f"expected a new file, got {out}, which exists: give another, or set overwrite")
        if not _holds_scores(out):  # maybe even the file of rows
            raise ConfigError(f"expected scores to overwrite, got {out} with something else: give another file")
    if file.is_dir() or not file.exists():
        what = f"the folder {file}: name a file in it" if file.is_dir() else f"{file}, where there is nothing"
        raise DataError(f"expected a file of rows, got {what}")
    files, made = find_files(str(file)), trained.config.data
    rows_of = open_table(file, made, labeled=None) if made.numbers else None
    encoder = RowEncoder(cache_folder(made.cache) / trained.identity["data.prepared"], hashed_sizes=made.hashed_sizes)
    scores, start = Scores(out), perf_counter()

    def write(beside: Path) -> None:
        with open(beside, "w", encoding="ascii", newline="\n") as target, Progress(quiet) as progress:
            target.write(HEADER)
            progress.start("scoring", file.stat().st_size)
            for read in _score(trained, encoder, files, rows_of, target, scores, batch_size, max_bad_rows):
                progress.to(read)

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, write)
    except OSError as error:
        raise ConfigError(f"expected a writable file, got {out} ({error}): give another") from error
    scores.seconds = perf_counter() - start
    return scores


@torch.no_grad()
def _score(
    trained: Trained,
    encoder: RowEncoder,
    files: list[Path],
    rows_of: RowFormat | None,
    target: TextIO,
    scores: Scores,
    size: int,
    limit: int,
) -> Iterator[int]:
    """Write and count the scores of all rows; yields the bytes of the file read so far, after each block."""
    model, precision = trained.model, trained.config.train.precision
    set_precision_(model, precision)
    for block in read_blocks(files, rows_of.start if rows_of else START):
        file, line = files[block.begin.file], block.begin.line
        if block.cut_short:
            raise DataError(f"{file}, line {line + 1}: {END_MISSING}: fetch it again")
        rows_of = rows_of or CriteoRows(_has_labels(block.text))
        scores.labeled = labeled = rows_of.labeled
        rows = rows_of.parse(block.text)
        scores.bad += len(rows.bad)
        if scores.bad > limit:
            bad = rows.bad[limit - scores.bad]  # the first one too many
            raise DataError(
                f"{file}, line {line + bad.place + 1}: {bad.mistake}; that is one bad row more than max_bad_rows "
                f"({limit:,}) allows: repair the file, or raise the limit to skip such rows"
            )
        lines = line + 1 + rows.places
        for first in range(0, len(lines), size):
            part = slice(first, first + size)
            batch = encoder.encode_rows(rows, part, labeled)
            with autocast(batch.dense.device, precision):
                logits_B = model(batch.dense, batch.ids).double()
            if not bool(logits_B.isfinite().all()):
                raise CheckpointError(
                    f"expected finite logits from {trained.checkpoint}, got others: take an older checkpoint"
                )
            scores.add(logits_B, batch.labels.double())
            columns = lines[part].tolist(), logits_B.tolist(), logits_B.sigmoid().tolist()
            # nine digits distinguish every float32 from its neighbors
            target.writelines(f"{line},{logit:.9g},{share:.9g}\n" for line, logit, share in zip(*columns, strict=True))
        yield block.read


def _holds_scores(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(HEADER)) == HEADER.encode()


def _has_labels(text: bytes) -> bool:
    """Whether rows begin with a label, judging by the first row with a valid number of fields."""
    separators = (line.count(b"\t") for line in text.split(b"\n"))
    return next((LABELED[count] for count in separators if count in LABELED), True)
