"""trainer.json of a checkpoint: how far the run is, and all of its state that is no tensor.

    {"format": "comera-trainer", "version": 2, "progress": {...}, "identity": {...}, "controller": {...},
     "parameters": [names, in the optimizer's order], "scalars": {parameter: {key: value}},
     "other_shapes": {"parameter:key": shape}, "rng": [state of each process], "kernels": "..."}

Version 1 has the sizes of the other files in "files" and no kernels; checkpoints of version 2 have checksums beside.
Types and ranges of all values are checked before anything is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

from comera.errors import CheckpointError
from comera.files import SUMS, damage
from comera.trainer.config import upgrade_names

TRAINER = "trainer.json"
FORMAT = {"format": "comera-trainer", "version": 2}
_VERSIONS = (1, 2)


@dataclass
class Progress:
    """How far a run has come; the next batch follows from `step` alone.

    step: optimizer steps done. tokens, examples: seen by all processes. time: seconds of training.
    held_out_loss, metrics: of the last evaluation, at step `held_out_step`. best_held_out_loss: the lowest so far.
    step_time: median seconds of a step. peak_memory: bytes. stopped: "steps", "time" or "interrupted" at the end.
    start_from: step and parameters of the other run's checkpoint that this run started from. mode: how the last steps
    ran. peak_lrs, weight_decays: of each parameter group, as they were when the run began: both may follow from the
    first cores. Checkpoints of before have none. energy: joules of training by source (`comera.trainer.energy`); empty
    where it is unknown. parts: seconds by part of the run, as `TrainState.part` names them.
    """

    step: int = 0
    tokens: int = 0
    time: float = 0.0
    held_out_loss: float | None = None
    held_out_step: int = -1
    best_held_out_loss: float | None = None
    step_time: float = 0.0
    peak_memory: int = 0
    stopped: str | None = None
    examples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    start_from: dict[str, int] | None = None
    mode: str = "eager"
    peak_lrs: list[float] = field(default_factory=list)
    weight_decays: list[float] = field(default_factory=list)
    energy: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerState:
    """What trainer.json holds. kernels, sizes: None where the version has none."""

    progress: Progress
    identity: dict[str, Any]
    controller: dict[str, Any]
    parameters: list[str]
    scalars: dict[str, dict[str, Any]]
    rng: list[dict[str, Any]]
    other_shapes: dict[str, list[int]]
    kernels: str | None
    sizes: dict[str, int] | None


def read_trainer(folder: Path) -> TrainerState:
    """Read and check the trainer.json of a checkpoint, which must be as its checksum says.

    Raises CheckpointError for one that is missing, damaged, foreign, or has a value of another type or range.
    """
    try:
        stored = json.loads((folder / TRAINER).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise broken(folder, f"a readable {TRAINER}", str(error)) from error
    known = isinstance(stored, dict) and stored.get("format") == FORMAT["format"]
    if not known or stored.get("version") not in _VERSIONS:
        raise broken(folder, f"{TRAINER} with {FORMAT}", str(stored)[:80])
    first = stored["version"] == 1
    if (not first or (folder / SUMS).exists()) and (found := damage(folder, [TRAINER])):
        raise broken(folder, "the files that were saved", found)
    stored = {"other_shapes": {}} | stored
    needed = {**_FIELDS, **(_FIRST if first else _SECOND)}
    if lacking := sorted(needed.keys() - stored.keys()):
        raise broken(folder, f"{TRAINER} with {', '.join(sorted(needed))}", f"none of {lacking}")
    for name, fits in needed.items():
        if not fits(stored[name]):
            raise broken(folder, f"{TRAINER} with its kind of {name}", f"{stored[name]!r:.200}")
    return TrainerState(
        progress=_read_progress(folder, stored["progress"]),
        identity=upgrade_names(stored["identity"]),
        kernels=None if first else stored["kernels"],
        sizes=stored["files"] if first else None,
        **{name: stored[name] for name in ("controller", "parameters", "scalars", "rng", "other_shapes")},
    )


def broken(folder: Path, expected: str, came: str) -> CheckpointError:
    """The error for a checkpoint that cannot be loaded."""
    return CheckpointError(
        f"checkpoint {folder}: expected {expected}, got {came}; nothing was loaded: "
        "use the model and optimizer that wrote it, or an older checkpoint (to resume from one, move this one away)"
    )


def _read_progress(folder: Path, stored: Mapping[str, Any]) -> Progress:
    unknown = stored.keys() - {each.name for each in fields(Progress)}
    wrong = sorted(unknown) or [name for name, value in stored.items() if not _PROGRESS[name](value)]
    if wrong:
        raise broken(folder, "the progress of a run", f"{', '.join(f'{name}: {stored[name]!r:.80}' for name in wrong)}")
    progress = Progress(**stored)
    if progress.held_out_step > progress.step:
        raise broken(folder, "the progress of a run", f"step {progress.step}, evaluated at {progress.held_out_step}")
    return progress


Check = Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < inf


def _is_loss(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and -inf < value < inf)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(fits: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _object_of(fits: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


_is_object = _object_of(lambda value: True)

_FIELDS: dict[str, Check] = {
    **dict.fromkeys(("progress", "identity", "controller"), _is_object),
    "parameters": _list_of(_is_text),
    "scalars": _object_of(_is_object),
    "other_shapes": _object_of(_list_of(_is_count)),
    "rng": _list_of(_is_object),
}
_FIRST: dict[str, Check] = {"files": _object_of(_is_count)}
_SECOND: dict[str, Check] = {"kernels": _is_text}
_PROGRESS: dict[str, Check] = {
    **dict.fromkeys(("step", "tokens", "examples", "peak_memory"), _is_count),
    **dict.fromkeys(("time", "step_time"), _is_amount),
    **dict.fromkeys(("held_out_loss", "best_held_out_loss"), _is_loss),
    "held_out_step": lambda value: value == -1 or _is_count(value),
    "stopped": lambda value: value in (None, "steps", "time", "interrupted"),
    "metrics": _object_of(lambda value: type(value) in (int, float)),
    "start_from": lambda value: value is None or _object_of(_is_count)(value),
    "mode": _is_text,
    "peak_lrs": _list_of(_is_amount),
    "weight_decays": _list_of(_is_amount),
    **dict.fromkeys(("energy", "parts"), _object_of(_is_amount)),
}
