"""Predicts the labels of new rows with a trained classifier, in memory that does not grow with the file.

    file -> rows -> texts -> tokens by the run's tokenizer -> probabilities -> a line for each row that can be read
B batch, L labels."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from tokenizers import Tokenizer

from comera.errors import CheckpointError, ConfigError, DataError
from comera.files import replace_file
from comera.recipes.classify.data import COLUMNS, PUBLISHED, ClassifyDataConfig
from comera.recipes.classify.rows import UNREADABLE, USUAL_LABELS, USUAL_TEXTS, Columns, Skipped, only_column, text_of
from comera.recipes.classify.task import Reads, scores
from comera.recipes.data.prepared import ExampleBatch
from comera.recipes.data.tables import PARQUET, ROW_SUFFIXES, Row, open_rows, row_suffix
from comera.recipes.data.tokenizer import FILE, SETTINGS, TextTokenizer, stored_tokenizer
from comera.recipes.trained import Trained
from comera.trainer.step import autocast, set_precision_

RECIPES = ("classify", "mnli")
To = Literal["jsonl", "csv"]
_Named: TypeAlias = tuple[str | None, str | None, str | None]
_EMPTY, _OTHER_LABEL = "empty text", "a label that the run does not have"


class _Example(NamedTuple):
    """line: that a row ends in. label: its place among the run's labels, None without a known one."""

    line: int
    texts: tuple[str, ...]
    label: int | None


@dataclass
class Predictions:
    """What was predicted: rows; those with a label, and of these the right ones; what was not, by reason. guessed: the
    column of the text, if neither the call nor the run names one that the file has."""

    file: Path
    checkpoint: Path
    rows: int = 0
    labeled: int = 0
    right: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    unknown: Skipped = field(default_factory=Skipped)
    guessed: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.file}: {self.rows:,} rows predicted by {self.checkpoint}"]
        if self.labeled:
            lines[0] += f"; accuracy {self.right / self.labeled:.4f} on the {self.labeled:,} with a label"
        if self.guessed is not None:
            lines.append(f"read {self.guessed!r} as the text, a guess: name the column with --text")
        for what, counted in (("skipped", self.skipped), ("not in the accuracy:", self.unknown)):
            for reason, count in counted.counts.items():
                lines.append(f"{what} {count:,} rows: {reason} (the first: {counted.first[reason]})")
        return "\n".join(lines)


def predict(
    trained: Trained,
    file: Path,
    show: Callable[[str], object],
    *,
    to: To = "jsonl",
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    batch_size: int = 64,
) -> Predictions:
    """Predict the label of each row of a file.

    Args:
        trained: a run of classify or mnli.
        file: rows as in training, with or without labels, or a .parquet file.
        show: is handed the output, lines with their ends: of a row the line that it ends in (of a .parquet file its
            number), the label, and the probability of each label.
        to: form of the output.
        text, pair, label: columns of the file; default: those of the training rows.
        batch_size: rows that are read and computed together.

    Returns:
        Counts of rows, and of those that could not be read; the accuracy where rows have labels.

    Raises:
        ConfigError: a run of another recipe, or a value out of range.
        DataError: a file without rows that can be read, or without the columns.
        CheckpointError: probabilities that are not finite.
    """
    if trained.recipe not in RECIPES:
        does = {"dlrm": "`comera score` scores its rows", "lm": "`comera generate` continues texts with it"}
        raise ConfigError(
            f"expected a run of {' or '.join(RECIPES)}, which predicts labels, got one of {trained.recipe}, "
            f"{trained.checkpoint}: {does.get(trained.recipe, 'export its model with `comera export`')}"
        )
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
    if not (file.is_file() and (row_suffix(file) or file.suffix.lower() == PARQUET)):
        what = "is another file" if file.is_file() else "is no file"
        raise DataError(f"expected a file of rows ({' '.join((*ROW_SUFFIXES, PARQUET))}), got {file}, which {what}")
    about: Any = trained.model.config
    names = [str(about.id2label[k]) for k in range(about.num_labels)]
    done, data = Predictions(file, trained.checkpoint), trained.config.data
    given = (text, pair, label)
    wanted = [name for name in (*given, *data.named) if name is not None]
    found, rows = open_rows(file, wanted, lambda error: done.skipped.add(UNREADABLE, str(error)))
    known = _known(trained.checkpoint.parents[1], data)
    columns, labels = _columns(found, str(file), data, given, known)
    done.guessed = next((name for name in columns.texts if name not in {text, pair, *chain(*known)}), None)
    files = stored_tokenizer(trained.checkpoint.parents[1])
    tokenizer = TextTokenizer(Tokenizer.from_str(files[FILE]), json.loads(files[SETTINGS]))
    cutting = tokenizer.cutting(data.max_length)
    cutting.enable_padding(pad_id=tokenizer.pad)
    show(_header(to, names))
    examples = _examples(rows, columns, labels, names, done)
    while batch := list(islice(examples, batch_size)):
        read, batch_inputs = _encode(cutting, batch, done)
        if batch_inputs is not None:
            show(_lines(to, read, _probabilities(trained, batch_inputs), names, done))
    if not done.rows:
        raise DataError(f"{file}: expected a row to predict, got none that can be read: {done.skipped.counts}")
    return done


def predict_file(trained: Trained, file: Path, out: Path, *, overwrite: bool = False, **options: Any) -> Predictions:
    """`predict` into a file, which appears once it is complete.

    overwrite: replace `out`. Raises ConfigError where it exists and this is not set, is the file of rows, or cannot be
    written, and what `predict` raises.
    """
    if out.exists() and not out.is_file():
        raise ConfigError(f"expected a regular file or a new one, got {out}, a folder, pipe or device: give another")
    if out.exists() and (not overwrite or (file.exists() and out.samefile(file))):
        raise ConfigError(f"expected a new file, got {out}, which exists: give another, or set overwrite for an output")
    done: list[Predictions] = []

    def write(beside: Path) -> None:
        with open(beside, "w", encoding="utf-8", newline="\n") as target:
            done.append(predict(trained, file, target.write, **options))

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, write)
    except OSError as error:
        raise ConfigError(f"expected a writable file, got {out} ({error}): give another") from error
    return done[0]


def _known(run: Path, data: ClassifyDataConfig) -> list[_Named]:
    """The columns that training may have read: text, pair and label."""
    known: list[_Named] = [data.named, *(PUBLISHED.values() if data.form == "mnli" else ())]
    if (run / COLUMNS).is_file():  # not of runs of earlier versions
        about = json.loads((run / COLUMNS).read_text("utf-8"))
        text, pair = (*about["texts"], None)[:2]
        known.insert(0, (text, pair, about["label"]))
    return known


def _columns(
    found: list[str], where: str, data: ClassifyDataConfig, given: _Named, known: list[_Named]
) -> tuple[Columns, str | None]:
    """The columns of a file: as given, else as the run read them, else as training guesses them; and again that of the
    label, None where it was not given and is not there."""
    mnli = data.form == "mnli"
    named = next((each for each in known if {*filter(None, each[:2])} <= {*found}), data.named)
    text, pair, label = (other if own is None else own for own, other in zip(given, named, strict=True))
    if missing := [name for name in (text, pair, given[2]) if name is not None and name not in found]:
        raise DataError(
            f"{where}: expected the columns {', '.join(missing)}, got {', '.join(found)}: name those of this file with "
            "--text, --pair and --label"
        )
    left = [name for name in found if name not in (text, pair)]
    if label is None:
        likely = [name for name in left if name.lower() in USUAL_LABELS]
        label = likely[0] if len(likely) == 1 else None
    if text is None:
        text = only_column([name for name in left if name != label], USUAL_TEXTS, "--text", "the text", where)
    texts = (text,) if pair is None else (text, pair)
    roles = ("text",) if pair is None else ("first text", "second text")
    missing_labels: tuple[object, ...] = (None, "", "-", -1, "-1") if mnli else (None, "")
    return Columns(texts, label or "", roles, missing=missing_labels, numbered=mnli), label


def _examples(
    rows: Iterable[Row], columns: Columns, labels: str | None, names: list[str], done: Predictions
) -> Iterator[_Example]:
    """labels: the column that holds them, None without one, as a name may be empty."""
    number = {name: k for k, name in enumerate(names)}
    for line, values in rows:
        where = f"{done.file}, line {line}"
        try:
            texts = tuple(
                text_of(values.get(column), role, where, columns)
                for column, role in zip(columns.texts, columns.roles, strict=True)
            )
        except DataError as error:
            done.skipped.add(UNREADABLE, str(error))
            continue
        if not all(text.strip() for text in texts):
            done.skipped.add(_EMPTY, where)
            continue
        value = None if labels is None else values.get(labels)
        label = None if value in columns.missing else number.get(str(value))
        if label is None and columns.numbered and isinstance(value, int) and 0 <= value < len(names):
            label = value
        if label is None and value not in columns.missing:
            done.unknown.add(_OTHER_LABEL, f"{where}: {str(value)[:60]!r}")
        yield _Example(line, texts, label)


def _encode(
    tokenizer: Tokenizer, batch: list[_Example], done: Predictions
) -> tuple[list[_Example], ExampleBatch | None]:
    """The examples that have tokens, and their batch; None without any. tokenizer: which cuts and pads."""
    texts: list[Any] = [each.texts if len(each.texts) > 1 else each.texts[0] for each in batch]
    read, encoded = [], []
    for example, encoding in zip(batch, tokenizer.encode_batch(texts), strict=True):
        if {*range(len(example.texts))} <= {*encoding.sequence_ids}:
            read.append(example)
            encoded.append(encoding)
        else:  # text, but only characters that the tokenizer drops
            done.skipped.add(_EMPTY, f"{done.file}, line {example.line}")
    if not read:
        return read, None
    fields = ([getattr(each, name) for each in encoded] for name in ("ids", "type_ids", "attention_mask"))
    ids_BT, segments_BT, mask_BT = map(torch.tensor, fields)
    return read, ExampleBatch(ids_BT, segments_BT, mask_BT.bool(), torch.zeros(len(read), dtype=torch.int64))


@torch.no_grad()
def _probabilities(trained: Trained, batch: ExampleBatch) -> list[list[float]]:
    """(B, L)."""
    model, precision = trained.model, trained.config.train.precision
    set_precision_(model, precision)
    with autocast(batch.input_ids.device, precision):
        logits_BL = scores(model, batch, Reads.of(model)).float()
    if not bool(logits_BL.isfinite().all()):
        raise CheckpointError(f"expected finite logits from {trained.checkpoint}, got others: take an older checkpoint")
    probabilities: list[list[float]] = logits_BL.softmax(-1).tolist()
    return probabilities


def _header(to: To, names: list[str]) -> str:
    return _row(["line", "label", *(f"probability_{name}" for name in names)]) if to == "csv" else ""


def _lines(
    to: To, read: list[_Example], probabilities_BL: list[list[float]], names: list[str], done: Predictions
) -> str:
    """The output of a batch, which is counted."""
    lines = []
    for example, probabilities in zip(read, probabilities_BL, strict=True):
        answer = max(range(len(names)), key=probabilities.__getitem__)
        done.rows += 1
        done.labeled += example.label is not None
        done.right += example.label == answer
        shares = [float(f"{share:.6g}") for share in probabilities]
        if to == "csv":
            lines.append(_row([example.line, names[answer], *shares]))
        else:
            about = dict(zip(names, shares, strict=True))
            line = {"line": example.line, "label": names[answer], "probabilities": about}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def _row(fields: list[object]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(fields)
    return out.getvalue()
