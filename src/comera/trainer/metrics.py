"""Outputs of a run for its report: metrics.jsonl, and its summary."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from comera.errors import CheckpointError
from comera.files import replace_file


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    steps, tokens, examples: trained. time: seconds of training. step_time: median seconds of a step, without the first
    ones. epoch_time: seconds of training per epoch (None without epochs). peak_memory, size_bytes: bytes.
    parameters: stored, `tensorized` of them in tensor trains. ratio, tensorized_ratio: dense parameters per stored one
    (None where nothing is stored). held_out_loss: of the last evaluation; metrics: its other values by name.
    stopped: "steps" (or epochs), "time" or "interrupted". mode: how the last steps ran, "eager", "compile", "graph" or
    "eager (why)". energy: joules of training by source, empty where it is unknown (`comera.trainer.energy`). co2: grams
    of CO2 equivalent. parts: seconds of batches (within `time`), evaluation and pruning (beside it). memory: bytes of
    weights and optimizer state at the end. counted: what `tokens` counts.
    """

    method: str
    recipe: str
    steps: int
    time: float
    tokens: int
    step_time: float
    peak_memory: int
    held_out_loss: float | None
    best_held_out_loss: float | None
    parameters: int
    size_bytes: int
    tensorized: int
    tensorized_ratio: float | None
    ratio: float | None
    stopped: str
    metrics: dict[str, float] = field(default_factory=dict)
    epoch_time: float | None = None
    examples: int = 0
    mode: str = "eager"
    energy: dict[str, float] = field(default_factory=dict)
    co2: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    counted: str = ""

    @property
    def finished(self) -> bool:
        """Whether the run reached its bound."""
        return self.stopped != "interrupted"

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        replace_file(path, to_json(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Summary | None:
        """The summary in a file, None without the file; raises CheckpointError if it holds something else."""
        try:
            if not path.exists():
                return None
            summary = cls(**json.loads(path.read_text("utf-8")))
            for f in fields(cls):
                _check(f.name, str(f.type), getattr(summary, f.name))
            return summary
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"expected the summary of a run in {path}, got something else ({error}): move it away to resume the run"
            ) from error


class MetricsLog:
    """Appends records to `folder`/metrics.jsonl, one JSON object per line, each flushed as it is written.

    step: records of later steps, from a run that was killed after its last checkpoint, are removed first; -1 for all.
    Raises CheckpointError for a file of other records.
    """

    def __init__(self, folder: Path, *, step: int = -1) -> None:
        path = folder / "metrics.jsonl"
        if path.exists():
            replace_file(path, "".join(_lines_until(path, step)))
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a record; values are scalars, or mappings and sequences of them."""
        self._file.write(to_json({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Flush all records to the disk: a checkpoint promises the records up to its step."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON; values that are not finite become null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, allow_nan=False, indent=indent)


def _check(name: str, kind: str, value: Any) -> None:
    """Raise ValueError for a value that is not of `kind`, an annotation, and for a number beyond any float32."""
    expected = {"str": str, "int": int, "dict[str, float]": dict}.get(kind, int | float)
    if not (isinstance(value, expected) or (value is None and kind.endswith("None"))):
        raise ValueError(f"{name} is {value!r}")
    for number in value.values() if isinstance(value, dict) else [value]:
        if isinstance(number, int | float) and not abs(number) < 1e39:
            raise ValueError(f"{name} is {str(number)[:40]}")


def _lines_until(path: Path, step: int) -> Iterator[str]:
    """Lines of complete records up to and including `step`; nothing after the first truncated one."""
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(keepends=True), 1):
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not line.endswith("\n"):
            return
        found = record.get("step") if isinstance(record, dict) else None
        if not isinstance(found, int):
            raise CheckpointError(
                f"{path}, line {number}: expected a record with a step, got {line.strip()[:60]!r}: remove this line to "
                "resume the run"
            )
        if found <= step:
            yield line
