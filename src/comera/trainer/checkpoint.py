"""Checkpoints in the run folder. A run that is killed at any moment resumes from the last one, to the bit on a CPU.

    checkpoints/step-00000120/  model.safetensors, comera.json   the model, as `save_pretrained` writes it
                                optimizer.safetensors            the optimizer's tensors, "parameter name:key"; both
                                                                 in shards where they are large
                                trainer.json                     everything else
                                XXH128SUMS                       checksums of these files, compared on loading

A checkpoint is written under a temporary name, flushed to the disk and renamed, so every visible one is complete. It is
renamed again before it is deleted. What a kill leaves behind is named .step-*, and `clean` removes it.
"""

import json
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.errors import CheckpointError, ConfigError, RankError, TrainingError
from comera.files import damage, flush, replace_folder, write_sums
from comera.kernels.select import kernels_in_use
from comera.pretrained import load_pretrained, save_pretrained
from comera.pretrained.stored import StoredTensors, write_tensors
from comera.rank.controller import RankController
from comera.rank.state import RankState
from comera.trainer.random_state import check_rng_state, set_rng_state
from comera.trainer.trainer_json import FORMAT, TRAINER, Progress, TrainerState, broken, read_trainer

_NAME = re.compile(r"step-\d{8,}")
_STATE_FILE = "optimizer.safetensors"


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    folder = Path(run) / "checkpoints"
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def run_in(folder: Path) -> Path:
    """The only run inside a folder, such as one of stages; the folder itself if it is a run or has none inside.

    Raises CheckpointError if there are several.
    """
    inside = sorted(metrics.parent for metrics in folder.glob("*/metrics.jsonl"))
    if (folder / "metrics.jsonl").exists() or not inside:
        return folder
    if len(inside) > 1:
        names = ", ".join(run.name for run in inside)
        raise CheckpointError(f"expected one run, got {folder} with several ({names}): give one, such as {inside[-1]}")
    return inside[0]


def find_checkpoint(run: Path, which: Literal["last", "best"] = "last") -> Path:
    """The last checkpoint of a run folder, or the one whose evaluation was best.

    Raises CheckpointError if there is none, or for "best" none that was evaluated.
    """
    found = checkpoints(run)
    if not found:
        raise CheckpointError(
            f"expected checkpoints in {Path(run) / 'checkpoints'}, found none: "
            "give the folder of a run that has saved one"
        )
    if which == "last":
        return found[-1]
    best = _best(_progress_of(found))
    if best is None:
        raise CheckpointError(f"no checkpoint in {run} was evaluated on held-out data: take the last one")
    return best


def last_good(run: Path) -> str:
    """What there is to go back to, in words."""
    found = checkpoints(run)
    return f"the last good checkpoint is {found[-1]}" if found else "no checkpoint had been saved yet"


def not_written(what: str, run: Path, error: Exception) -> TrainingError:
    """The error for a file of a run that could not be written."""
    reason = error.strerror if isinstance(error, OSError) else error
    return TrainingError(
        f"expected to write {what} in {run}, got: {reason}; {last_good(run)}: make room for it, then resume the run"
    )


def clean(run: Path) -> None:
    """Remove what killed saves left behind; for the process that writes, before it starts."""
    for leftover in (Path(run) / "checkpoints").glob(".step-*"):
        _remove(leftover)


def save_checkpoint(
    run: Path,
    model: nn.Module,
    optimizer: Optimizer,
    controller: RankController | None,
    progress: Progress,
    *,
    identity: Mapping[str, Any],
    rng: Sequence[Mapping[str, Any]],
) -> Path:
    """Write the checkpoint of `progress.step` and delete all others but the best; returns its folder.

    identity: JSON-ready values; the run may resume only with equal ones. rng: `rng_state()` of every process.
    """
    final = Path(run) / "checkpoints" / f"step-{progress.step:08d}"
    temporary = final.with_name(f".{final.name}.new")
    _remove(temporary)
    temporary.mkdir(parents=True)
    tensors, scalars = _optimizer_state(model, optimizer)
    trainer = {
        **FORMAT,
        "progress": asdict(progress),
        "identity": dict(identity),
        "controller": controller.state_dict() if controller else {},
        "parameters": _trained(model, optimizer),
        "scalars": scalars,
        "other_shapes": _other_shapes(model, tensors),
        "rng": list(rng),
        "kernels": _kernels(model),
    }
    save_pretrained(model, temporary)
    write_tensors(temporary, _STATE_FILE, tensors)
    (temporary / TRAINER).write_text(json.dumps(trainer), "utf-8")
    write_sums(temporary)
    for path in [*temporary.iterdir(), temporary]:
        flush(path)
    replace_folder(temporary, final)
    known = _progress_of(checkpoints(run))
    for path in known:
        if path not in (final, _best(known)):
            _drop(path)
    return final


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    controller: RankController | None,
    *,
    identity: Mapping[str, Any],
    process: int = 0,
    one_sequence: bool = False,
) -> Progress:
    """Restore model (with its ranks), optimizer, controller and this process's random state from a checkpoint.

    one_sequence: as of a Task: other processes may have written it, if a step had as many batches.
    Raises CheckpointError if it is damaged, foreign, or of another model or optimizer, and ConfigError if it was
    written with another `identity`; nothing is changed then. Warns if other kernels or another number of processes
    wrote it: their results differ by rounding.
    """
    folder = Path(folder)
    trainer = read_trainer(folder)
    _check_identity(folder, trainer.identity, identity, one_sequence=one_sequence)
    before, now = trainer.identity.get("processes"), identity.get("processes")
    groups = len(optimizer.param_groups)
    for kind, each in (("rate", trainer.progress.peak_lrs), ("weight decay", trainer.progress.weight_decays)):
        if each and len(each) != groups:
            raise broken(folder, f"a {kind} for each of the optimizer's {groups} groups of parameters", f"{len(each)}")
    source = process if before == now else process % (before or 1)
    if source >= len(trainer.rng):
        raise broken(folder, f"the random state of process {source}", f"that of {len(trainer.rng)} processes")
    try:
        check_rng_state(trainer.rng[source])
    except ValueError as error:
        raise broken(folder, f"the random state of process {source}", str(error)) from error
    _load_state(folder, trainer, model, optimizer, controller)
    set_rng_state(trainer.rng[source])
    if source != process:  # a process that was not there draws numbers of its own, which follow from the checkpoint
        set_seed(int(torch.randint(2**31, ())) + process)
    if before != now and not process:
        warnings.warn(
            f"{folder} was written with processes: {before}, now there are {now}. The run goes on with the same "
            "batches in a step, but not to the bit: sums are rounded in another order, and dropout draws other numbers",
            stacklevel=2,
        )
    if trainer.kernels not in (None, kernels := _kernels(model)):
        warnings.warn(
            f"{folder} was written with other kernels ({trainer.kernels}) than compute here ({kernels}): the run goes "
            "on, but not to the bit; for that, resume where it was started, with the same version and COMERA_KERNELS",
            stacklevel=2,
        )
    return trainer.progress


def check_resumed(run: Path, identity: Mapping[str, Any], *, one_sequence: bool = False) -> None:
    """Raise ConfigError where a run has checkpoints that were written with another `identity`, as `load_checkpoint`."""
    if found := checkpoints(run):
        _check_identity(found[-1], read_trainer(found[-1]).identity, identity, one_sequence=one_sequence)


def take_over(source: Path, model: nn.Module, optimizer: Optimizer, controller: RankController | None) -> Progress:
    """Restore model (with its ranks), optimizer and controller from another run; returns that run's progress.

    source: the run's folder, for its last checkpoint, or the folder of a checkpoint. That run's configuration and
    random state do not matter. Raises ConfigError for a new target where the late stage has begun, and CheckpointError
    as `load_checkpoint` does, with nothing changed.
    """
    source = Path(source)
    folder = source if (source / TRAINER).is_file() else find_checkpoint(source)
    trainer = read_trainer(folder)
    if controller and controller.late.target_size is not None and (trainer.controller or {}).get("target_size"):
        raise ConfigError(
            f"train.late.target_size is {controller.late.target_size!r}, but the run in {source} is in its late stage "
            f"already, with a target of {trainer.controller['target_size']:,} parameters: omit the new target to keep "
            "that one, or start from a run in its early stage"
        )
    _load_state(folder, trainer, model, optimizer, controller)
    return trainer.progress


def _load_state(
    folder: Path, trainer: TrainerState, model: nn.Module, optimizer: Optimizer, controller: RankController | None
) -> None:
    """Load a checkpoint's model, optimizer and controller after validating everything."""
    if trainer.sizes is None and (found := damage(folder, [path.name for path in folder.glob("*.safetensors*")])):
        raise broken(folder, "the files that were saved", found)
    for name, size in (trainer.sizes or {}).items():
        came = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if came != size:
            raise broken(folder, f"{name} of {size:,} bytes", f"{came:,} bytes")
    if bool(controller) != bool(trainer.controller):
        raise broken(folder, f"{'a' if controller else 'no'} rank controller's state", str(trainer.controller))
    if differ := sorted({*trainer.parameters}.symmetric_difference(_trained(model, optimizer))):
        raise broken(folder, "this optimizer's parameters", f"others: {', '.join(differ[:4])}")
    tensors = _read_tensors(folder, trainer)
    try:
        if controller:
            RankState.of(trainer.controller)  # before anything changes
    except RankError as error:
        raise broken(folder, "a rank controller's state", str(error)) from error
    load_pretrained(model, folder)
    if controller:
        controller.load_state_dict(trainer.controller)
    _set_optimizer_state(model, optimizer, tensors, trainer.scalars)


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The tensors of the state by "parameter name:key", and all else by parameter name and key."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{names[parameter]}:{key}"] = value
            else:
                scalars.setdefault(names[parameter], {})[key] = value
    return tensors, scalars


def _trained(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the optimizer's parameters, in its order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _set_optimizer_state(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor], scalars: Mapping[str, Mapping[str, Any]]
) -> None:
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in scalars.items()}
    there = dict(model.named_parameters())
    for entry, value in tensors.items():  # each is read on its way to where it stays
        name, _, key = entry.rpartition(":")
        state.setdefault(name, {})[key] = value.to(there[name].device if value.ndim else "cpu", copy=True)
    by_index = {i: state[name] for i, name in enumerate(_trained(model, optimizer)) if name in state}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": by_index})


def _other_shapes(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Shapes of state tensors that differ from their parameter's, such as moments of projected gradients."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return {
        entry: list(value.shape)
        for entry, value in tensors.items()
        if value.ndim and value.shape != shapes[entry.rpartition(":")[0]]
    }


def _read_tensors(folder: Path, trainer: TrainerState) -> StoredTensors:
    """The optimizer's tensors, not read yet, checked against the model beside them and the scalars of trainer.json."""
    try:
        tensors = StoredTensors.open(folder, _STATE_FILE)
        shapes = StoredTensors.open(folder).shapes
    except (OSError, CheckpointError) as error:
        raise broken(folder, "whole safetensors files", str(error)) from error
    held = {entry.rpartition(":")[::2] for entry in tensors}
    scalars = {(name, key) for name, values in trainer.scalars.items() for key in values}
    if strange := sorted(held & scalars | {entry for entry in held | scalars if entry[0] not in trainer.parameters}):
        raise broken(folder, "one state of each parameter and key", f"{':'.join(strange[0])!r}, unknown or twice")
    for entry, came in tensors.shapes.items():
        shape = tuple(trainer.other_shapes.get(entry, shapes.get(entry.rpartition(":")[0], ())))
        if came and came != shape:
            raise broken(folder, f"state of shape {shape}", f"{entry!r} of shape {came}")
    return tensors


def _check_identity(
    folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any], *, one_sequence: bool = False
) -> None:
    now = json.loads(json.dumps(now))
    changed = [key for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)]
    batches, others = (each.get("processes", 1) * each.get("accumulation", 1) for each in (saved, now))
    if one_sequence and batches == others:
        changed = [key for key in changed if key not in ("processes", "accumulation")]
    if changed:
        rows = "; ".join(f"{key}: expected {saved.get(key)!r}, got {now.get(key)!r}" for key in changed)
        share, rest = divmod(batches, now.get("processes", 1))
        same = "take a number of processes that divides" if rest else f"set train.accumulation to {share}, for"
        same = f"; {same} the {batches} batches of a step" if one_sequence and batches != others else ""
        raise ConfigError(
            f"a resumed run must go on as it was begun ({rows}; checkpoint {folder}): "
            f"resume with the configuration in the run folder, or start a new run in another folder{same}"
        )


def _progress_of(found: Sequence[Path]) -> dict[Path, Progress]:
    """The progress of each readable checkpoint; unreadable ones are skipped, so they are never deleted."""
    known = {}
    for path in found:
        with suppress(CheckpointError):
            known[path] = read_trainer(path).progress
    return known


def _best(known: Mapping[Path, Progress]) -> Path | None:
    """The checkpoint with the lowest loss, of those made right after an evaluation; the earliest of equals."""
    losses = {
        path: progress.held_out_loss
        for path, progress in known.items()
        if progress.held_out_loss is not None and progress.held_out_step == progress.step
    }
    return min(losses, key=losses.__getitem__, default=None)


def _drop(folder: Path) -> None:
    """Delete a checkpoint; at no moment does a part of it look like a complete one."""
    doomed = folder.with_name(f".{folder.name}.old")
    _remove(doomed)
    folder.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    """Delete a folder, or a file that somebody has put in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _kernels(model: nn.Module) -> str:
    return kernels_in_use(next(model.parameters()).device)
