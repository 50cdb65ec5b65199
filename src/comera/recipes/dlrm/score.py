"""Scores for rows that come after training: a file in Criteo's form, through the tables of a trained DLRM.

    file -> blocks of text -> rows -> ids by the dictionaries of the training data -> logits -> line, logit, probability

Memory does not grow with the file. A row that cannot be read gets no score; as each score stands beside the number of
its line, none is taken for another's.  B batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TextIO

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from comera.errors import CheckpointError, ConfigError, DataError
from comera.files import replace_file
from comera.recipes.cache import cache_folder
from comera.recipes.dlrm.criteo_batches import RowEncoder
from comera.recipes.dlrm.criteo_files import END_MISSING, find_files, read_blocks
from comera.recipes.dlrm.criteo_parse import CATEGORIES, INTEGERS, Array, explain, parse
from comera.recipes.trained import Trained
from comera.trainer.step import autocast

HEADER = "line,logit,probability\n"
SEPARATORS = {INTEGERS + CATEGORIES: True, INTEGERS + CATEGORIES - 1: False}  # of a row, and whether it has a label


@dataclass
class Scores:
    """What was scored: rows, and those left out as bad; seconds; sums over the rows of probabilities and, where they
    have labels, of these and of the log losses in nats."""

    path: Path
    rows: int = 0
    bad: int = 0
    seconds: float = 0.0
    labelled: bool = False
    probabilities: float = 0.0
    labels: float = 0.0
    losses: float = 0.0

    def __str__(self) -> str:
        left_out = f", {self.bad:,} bad rows left out" if self.bad else ""
        parts = [f"{self.path}: {self.rows:,} rows scored{left_out}, {self.rows / self.seconds:,.0f} rows/s"]
        if self.rows:
            parts.append(f"mean probability {self.probabilities / self.rows:.4f}")
        if self.rows and self.labelled:
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
    """Write the logit of each row of `file` to `out`, a CSV file that is there when it is complete.

    file: rows in Criteo's form, with a label in front or without, plain or compressed by gzip. max_bad_rows: rows to
    leave out before it is an error. overwrite: replace the scores in `out`. The logits are those of the model in
    evaluation, in the precision of its training.
    Raises ConfigError for a run of another recipe or an `out` that is taken, with `overwrite` by anything but scores,
    and DataError, with file and line, for too many bad rows or a file that is cut short, and where the prepared data
    with the run's dictionaries are gone (hashed categories need none).
    """
    if trained.recipe != "dlrm":
        raise ConfigError(
            f"expected a run of dlrm, whose input is a file of rows, got one of {trained.recipe}, "
            f"{trained.checkpoint}: write its model with `comera export`, and call that with its inputs"
        )
    for name, value, least in (("batch_size", batch_size, 1), ("max_bad_rows", max_bad_rows, 0)):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    if out.exists() and not overwrite:
        raise ConfigError(f"expected a file that is not there yet, got {out}: give another, or set overwrite")
    if out.exists() and not _holds_scores(out):  # the file of rows, even
        raise ConfigError(f"expected scores to overwrite, got {out} with something else: give another file")
    if file.is_dir() or not file.exists():
        what = f"the folder {file}: name a file in it" if file.is_dir() else f"{file}, where there is nothing"
        raise DataError(f"expected a file of rows, got {what}")
    files, made = find_files(str(file)), trained.config.data
    encoder = RowEncoder(cache_folder(made.cache) / trained.identity["data.prepared"], hashed_sizes=made.hashed_sizes)
    scores, start = Scores(out), perf_counter()

    def write(beside: Path) -> None:
        with open(beside, "w", encoding="ascii", newline="\n") as target, _progress(quiet) as progress:
            target.write(HEADER)
            task = progress.add_task("scoring", total=file.stat().st_size)
            for read in _score(trained, encoder, files, target, scores, batch_size, max_bad_rows):
                progress.update(task, completed=read)

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, write)
    except OSError as error:
        raise ConfigError(f"expected a file that can be written, got {out} ({error}): give another") from error
    scores.seconds = perf_counter() - start
    return scores


@torch.no_grad()
def _score(
    trained: Trained,
    encoder: RowEncoder,
    files: list[Path],
    target: TextIO,
    scores: Scores,
    size: int,
    max_bad_rows: int,
) -> Iterator[int]:
    """Write and count the scores of all rows; yields after each block how many bytes of the file have been read."""
    model, precision = trained.model, trained.config.train.precision
    labelled: bool | None = None
    for block in read_blocks(files):
        file, line = files[block.begin.file], block.begin.line
        if block.cut_short:
            raise DataError(f"{file}, line {line + 1}: {END_MISSING}: fetch it again")
        if labelled is None:
            labelled = scores.labelled = _labelled(block.text)
        rows = parse(block.text, labelled)
        scores.bad += len(rows.bad_lines)
        if scores.bad > max_bad_rows:
            bad = int(rows.bad_lines[max_bad_rows - scores.bad])  # the first one too many
            wrong = explain(block.text.split(bytes([10]))[bad], labelled)
            raise DataError(
                f"{file}, line {line + bad + 1}: {wrong}; that is one bad row more than max_bad_rows "
                f"({max_bad_rows:,}) allows: repair the file, or raise it to leave such rows out"
            )
        lines = line + 1 + np.delete(np.arange(rows.lines), rows.bad_lines)
        for first in range(0, len(lines), size):
            part = slice(first, first + size)
            batch = encoder.encode_rows(rows, part, labelled)
            with autocast(batch.dense.device, precision):
                logits_B = model(batch.dense, batch.ids).double()
            if not bool(logits_B.isfinite().all()):
                raise CheckpointError(
                    f"expected finite logits from {trained.checkpoint}, got others: take an older one"
                )
            _write(target, lines[part], logits_B)
            _count(scores, logits_B, batch.labels.double())
        yield block.read


def _holds_scores(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(HEADER)) == HEADER.encode()


def _labelled(text: bytes) -> bool:
    """Whether rows begin with a label: as the first one does that has the right number of fields for either."""
    separators = (line.count(b"\t") for line in text.split(b"\n"))
    return next((SEPARATORS[count] for count in separators if count in SEPARATORS), True)


def _write(target: TextIO, lines: Array, logits_B: Tensor) -> None:
    """Nine digits tell every float32 from its neighbours."""
    columns = lines.tolist(), logits_B.tolist(), logits_B.sigmoid().tolist()
    target.write("".join(f"{line},{logit:.9g},{share:.9g}\n" for line, logit, share in zip(*columns, strict=True)))


def _count(scores: Scores, logits_B: Tensor, labels_B: Tensor) -> None:
    scores.rows += len(logits_B)
    scores.probabilities += float(logits_B.sigmoid().sum())
    if scores.labelled:
        scores.labels += float(labels_B.sum())
        scores.losses += float(F.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="sum"))


def _progress(quiet: bool) -> Progress:
    """A bar on stderr, where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    live = sys.stderr.isatty() and not quiet
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not live)
