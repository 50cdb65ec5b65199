"""Reads a run folder, finished or not, into typed values: configuration, metrics, layers, summary."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml

from comera.convert import LayerRow
from comera.errors import CheckpointError, DataError
from comera.report.confusion import Confusion
from comera.trainer.metrics import Summary
from comera.trainer.provenance import PROVENANCE
from comera.tt.spec import Spec


@dataclass(frozen=True)
class Point:
    """A record of metrics.jsonl: made at a step, after `time` seconds of training."""

    step: int
    time: float


@dataclass(frozen=True)
class TrainPoint(Point):
    """One logged training step. tokens: seen so far; step_time: seconds.

    size: unpruned parameters of the tensor trains, 0 for a dense run; stage: of rank adaptation, "" if there is none.
    grad_norm: before clipping; lr: by group; peak_memory: bytes, 0 if unknown; energy: joules so far, by source.
    """

    loss: float
    tokens: int
    step_time: float
    size: int = 0
    stage: str = ""
    grad_norm: float = math.nan
    lr: Mapping[str, float] = field(default_factory=dict)
    peak_memory: int = 0
    energy: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalPoint(Point):
    """One evaluation on held-out data. metrics: all but the loss; energy: joules so far, by source."""

    loss: float
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    energy: Mapping[str, float] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """The loss, or a metric; NaN for one that was not measured."""
        return self.loss if name == "loss" else self.metrics.get(name, math.nan)


@dataclass(frozen=True)
class SizePoint(Point):
    """Parameters stored. active: those of the tensor trains that are unpruned; ranks: unpruned inner ranks of each."""

    total: int
    tensorized: int
    ratio: float
    tensorized_ratio: float
    active: int
    ranks: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class PrunePoint(Point):
    """One pruning: parameters stored before and after."""

    before: int
    after: int


@dataclass(frozen=True)
class StagePoint(Point):
    """The start of the late stage, from `size` tensorized parameters to `target_size` at a loss of `target_loss`."""

    target_size: int
    target_loss: float
    size: int


@dataclass(frozen=True)
class RoundPoint(Point):
    """Rounding to the target: tensorized parameters before and after; the largest relative error of a weight."""

    before: int
    after: int
    error: float


# What a run can log: losses fit into float32, and nobody counts further. Figures of more do not draw.
_LARGEST_NUMBER, _LARGEST_COUNT = 1e39, 10**15

T = TypeVar("T")
P = TypeVar("P", bound=Point)
_KINDS = {kind.__name__.removesuffix("Point").lower(): kind for kind in Point.__subclasses__()}


def _points_of(kind: type[P]) -> cached_property[tuple[P, ...]]:
    """An attribute of RunData: its points of one kind, in order."""
    return cached_property(lambda run: tuple(point for point in run.points if isinstance(point, kind)))


@dataclass(frozen=True)
class RunData:
    """The contents of a run folder. layers: of the conversion, empty for a dense run; summary: None before the end.

    memory: estimated bytes of a training step by method and part; test: metrics on test data; references: values to
    hold the held-out metrics against, by metric and label; all empty for recipes without them. confusion: of a
    classifier. provenance: an entry for each time that the run was started or resumed. problems: what could not be
    read, and why.

    See `read_run`.
    """

    folder: Path
    config_text: str
    config: Mapping[str, Any]
    points: tuple[Point, ...]
    layers: tuple[LayerRow, ...]
    summary: Summary | None
    memory: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    test: Mapping[str, float] = field(default_factory=dict)
    references: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    confusion: Confusion | None = None
    provenance: tuple[Mapping[str, Any], ...] = ()
    problems: tuple[str, ...] = ()

    train = _points_of(TrainPoint)
    evals = _points_of(EvalPoint)
    sizes = _points_of(SizePoint)
    prunes = _points_of(PrunePoint)
    stages = _points_of(StagePoint)  # at most one: the start of the late stage
    rounds = _points_of(RoundPoint)

    @property
    def method(self) -> str:
        """Name of the method, from the summary, the configuration or the metrics."""
        shown = "comera" if any(size.ranks for size in self.sizes) else "dense"
        return self.summary.method if self.summary else str(self.config.get("method") or shown)

    @property
    def recipe(self) -> str:
        """Name of the recipe, from the summary or the configuration; else of the folder."""
        return self.summary.recipe if self.summary else str(self.config.get("recipe") or self.folder.name)

    @property
    def unit(self) -> str:
        """What `tokens` counts: as the run says, else samples if the recipe has one token per sample."""
        if self.summary is not None and self.summary.counted not in ("", "tokens"):
            return self.summary.counted
        single = self.summary is not None and 0 < self.summary.tokens == self.summary.examples
        return "samples" if single else "tokens"

    @property
    def specs(self) -> dict[str, Spec]:
        """The initial modes and ranks of each tensor train, by its name."""
        return {f"{layer.name}.tt": layer.spec for layer in self.layers if layer.spec is not None}

    @property
    def judged_by(self) -> str:
        """The metric by which the run is judged: one with references, else its first, else the loss."""
        metrics = list(self.evals[-1].metrics) if self.evals else []
        return next((name for name in self.references if name in metrics), metrics[0] if metrics else "loss")

    @property
    def energy(self) -> Mapping[str, float]:
        """Joules of training so far by source; empty where they are unknown."""
        return self.summary.energy if self.summary else self.train[-1].energy if self.train else {}

    @property
    def continues(self) -> bool:
        """Whether the run took over another run's model: its time counts from there."""
        noted = any(entry.get("start_from") for entry in self.provenance)
        return noted or any(stage.step == 0 for stage in self.stages)

    @property
    def element_bytes(self) -> float:
        """Mean bytes per parameter, from the summary; else 4, as for float32."""
        return self.summary.size_bytes / self.summary.parameters if self.summary and self.summary.parameters else 4.0


def read_run(folder: str | Path, *, damaged: bool = False) -> RunData:
    """Read config.yaml, metrics.jsonl and the JSON files of a run, those that exist.

    Skips a torn last line of the metrics, which a killed run leaves. damaged: read what can be read, and note the rest
    in `problems`. Raises DataError for a folder that is missing or not a run, and unless `damaged` for a malformed one.

    Example:
        >>> from comera.report import read_run
        >>> run = read_run("runs/compare/comera")  # after `comera compare lm --out runs/compare`
        >>> run.method, len(run.train), run.evals[-1].loss < run.evals[0].loss
        ('comera', 60, True)
        >>> run.sizes[-1].ratio
        7.5
    """
    folder = Path(folder)
    config, metrics = folder / "config.yaml", folder / "metrics.jsonl"
    if not folder.is_dir():
        raise DataError(f"expected a run folder at {folder}, found {'a file' if folder.exists() else 'nothing'} there")
    if not config.is_file() and not metrics.is_file():
        raise DataError(
            f"{folder} is not a run folder: it has neither config.yaml nor metrics.jsonl; "
            "give the folder that `comera train` wrote"
        )
    problems: list[str] | None = [] if damaged else None

    def tried(read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except (DataError, CheckpointError, OSError, UnicodeDecodeError) as error:
            if problems is None:
                raise error if isinstance(error, OSError) else DataError(str(error)) from error
            problems.append(str(error))
            return otherwise

    config_text = tried(lambda: config.read_text("utf-8") if config.is_file() else "", "")
    return RunData(
        folder,
        config_text,
        config=tried(lambda: _read_config(config, config_text), {}),
        points=tried(lambda: _read_points(metrics, problems), ()),
        layers=tried(lambda: _read_layers(folder / "layers.json"), ()),
        summary=tried(lambda: Summary.read(folder / "summary.json"), None),
        memory=tried(lambda: _read_mapping(folder / "memory.json", _floats), {}),
        test=tried(lambda: _read_mapping(folder / "test.json", _float), {}),
        references=tried(lambda: _read_mapping(folder / "references.json", _floats), {}),
        confusion=tried(lambda: _read_confusion(folder / "confusion.json"), None),
        provenance=tried(lambda: _read_provenance(folder / PROVENANCE), ()),
        problems=tuple(problems or ()),
    )


def _read_config(path: Path, text: str) -> Mapping[str, Any]:
    try:
        settings = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise DataError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path}: expected a mapping of settings, got {_shown(settings)}")
    return settings


def _read_provenance(path: Path) -> tuple[Mapping[str, Any], ...]:
    try:
        entries = json.loads(path.read_text("utf-8")) if path.is_file() else []
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{path}: expected a list of objects, got {_shown(entries)}")
    return tuple(entries)


def _read_mapping(path: Path, cast: Callable[[Any], T]) -> dict[str, T]:
    """A JSON object of such values; empty if there is no file."""
    try:
        values = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: expected an object, got {_shown(values)}")
    try:
        return {str(name): cast(value) for name, value in values.items()}
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"{path}: a value that cannot be: {error}") from error


def _read_confusion(path: Path) -> Confusion | None:
    try:
        return Confusion.of(json.loads(path.read_text("utf-8"))) if path.is_file() else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path}: expected the counts of a confusion matrix ({error!r})") from error


def _floats(values: Any) -> dict[str, float]:
    return {str(name): _float(value) for name, value in values.items()}


def _read_layers(path: Path) -> tuple[LayerRow, ...]:
    if not path.is_file():
        return ()
    try:
        return tuple(LayerRow.from_dict(row) for row in json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: expected a list of layers as `comera train` writes it ({error!r})") from error


def _read_points(path: Path, problems: list[str] | None) -> tuple[Point, ...]:
    """The records of metrics.jsonl. problems: where to note lines that cannot be read, None to raise DataError."""
    points: list[Point] = []
    lines, unreadable = path.read_bytes().split(b"\n") if path.is_file() else [], 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                if number == len(lines):  # no newline behind it: the writer was killed inside this line
                    break
                raise DataError(f"{path}, line {number} is not JSON: {error}") from error
            if (point := _point(row, f"{path}, line {number}")) is not None:
                points.append(point)
        except DataError as error:
            if problems is None:
                raise
            if not unreadable:
                problems.append(str(error))
            unreadable += 1
    if problems and unreadable > 1:
        problems.append(f"{path}: {unreadable - 1:,} further lines cannot be read")
    return tuple(points)


def _point(row: Any, where: str) -> Point | None:
    """A record of a known kind; None for other kinds, which later versions may log."""
    if not isinstance(row, dict) or "kind" not in row:
        raise DataError(f"{where}: expected a record with a 'kind', got {_shown(row)}")
    kind = _KINDS.get(row["kind"])
    if kind is None:
        return None
    casts: dict[str, Callable[[Any], Any]] = {
        "int": _count,
        "float": _float,
        "str": lambda value: str(value or ""),
        "Mapping[str, tuple[int, ...]]": _ranks,
        "Mapping[str, float]": _floats,
    }
    known = [f for f in fields(kind) if f.name in row or (f.default is MISSING and f.default_factory is MISSING)]
    try:
        return kind(**{f.name: casts[str(f.type)](row[f.name]) for f in known})
    except KeyError as error:
        raise DataError(f"{where}: expected the field {error} in a {row['kind']!r} record, got {sorted(row)}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"{where}: a {row['kind']!r} record has a value that cannot be: {error}") from error


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"


def _float(value: Any) -> float:
    number = math.nan if value is None else float(value)
    if abs(number) > _LARGEST_NUMBER:
        raise ValueError(f"expected a number up to {_LARGEST_NUMBER:g}, got {number:g}")
    return number


def _count(value: Any) -> int:
    number = int(value)
    if not 0 <= number <= _LARGEST_COUNT:
        raise ValueError(f"expected a count up to {_LARGEST_COUNT:g}, got {str(value)[:40]}")
    return number


def _ranks(value: Any) -> dict[str, tuple[int, ...]]:
    return {str(name): tuple(_count(rank) for rank in ranks) for name, ranks in value.items()}
