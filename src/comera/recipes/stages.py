"""Trains the stages of a recipe as separate runs, one after the other.

    comera  out/early          early stage of `train.epochs`
            out/late-0.8, ...  one late stage per target, each starting from the end of the early stage
    dense   out                dense baseline: as long as the early stage and one late stage together
    others  out                other baselines, as long as the dense one

Batches depend on the seed and on their place in one sequence, in which each late stage continues after the early one:
the dense baseline sees exactly the batches of the early stage and of a late one.
If late stages follow, the early stage holds its learning rates after the warm-up, and they decay in each late stage:
pruned ranks recover at full rates only, and rates that have decayed twice waste the steps in between (docs/log.md)."""

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml

from comera.baselines import Method
from comera.errors import ConfigError, check_fields
from comera.files import replace_file
from comera.trainer.config import TrainConfig
from comera.trainer.lock import hold
from comera.trainer.loop import fit
from comera.trainer.metrics import Summary
from comera.trainer.processes import open_accelerator
from comera.trainer.task import Task


class StagedConfig(Protocol):
    """What the stages read of a recipe's configuration, a dataclass: settings of the early stage in `train`, target
    sizes as fractions of the size at its end, passes over the training data in each late stage, folder of all runs."""

    @property
    def method(self) -> Method: ...
    @property
    def late_targets(self) -> tuple[float, ...]: ...
    @property
    def late_epochs(self) -> float: ...
    @property
    def train(self) -> TrainConfig: ...
    @property
    def folder(self) -> Path: ...


T = TypeVar("T", bound=Task)


def check_stages(config: StagedConfig) -> None:
    """Make `late_targets` a tuple (YAML has only lists); raise ConfigError for invalid targets or lengths."""
    object.__setattr__(config, "late_targets", tuple(config.late_targets))
    for target in config.late_targets:
        if isinstance(target, bool) or not 0 < target < 1:
            raise ConfigError(f"late_targets must be fractions of the early size, > 0 and < 1, got {target!r}")
    if len({f"{target:g}" for target in config.late_targets}) < len(config.late_targets):
        raise ConfigError(f"late_targets must differ, since each names a folder, got {config.late_targets}")
    check_fields(config, "", {"late_epochs": (0 < config.late_epochs < inf, "a number > 0")})
    late = config.train.late
    if late.target_size is not None or late.starts:
        raise ConfigError("train.late must have no target_size and no start here: set late_targets and train.epochs")


def runs(config: StagedConfig) -> dict[str, Path]:
    """Run folders by name, in order: "early", "late 0.8", ...; for other methods than comera the only run."""
    if config.method != "comera":
        return {config.method: config.folder}
    late = {f"late {target:g}": config.folder / f"late-{target:g}" for target in config.late_targets}
    return {"early": config.folder / "early", **late}


def refuse_existing(config: StagedConfig) -> None:
    """Raise ConfigError if one of the runs exists already; for runs that are not resumed."""
    existing = [str(folder) for folder in runs(config).values() if (folder / "metrics.jsonl").exists()]
    if existing:
        raise ConfigError(
            f"expected a folder without a run, got {config.folder} with {', '.join(existing)}: "
            "resume those runs, give another folder, or move this one away"
        )


def is_main(train: TrainConfig) -> bool:
    """Whether this process is the one that writes and logs."""
    return bool(open_accelerator(train.device).is_main_process)


def resolved(config: Any) -> dict[str, Any]:
    """All fields of a recipe's configuration, with the actual folder of its runs."""
    return asdict(replace(config, out=str(config.folder)))


def log(main: bool, recipe: str, text: str) -> None:
    """Print a line about a recipe's progress to stderr, from the main process only."""
    if main:
        print(f"{recipe}: {text}", file=sys.stderr)


def fit_stages(
    config: StagedConfig,
    make_task: Callable[[int], T],
    *,
    resume: bool,
    finish: Callable[[Summary, T, Path], Summary] = lambda summary, task, folder: summary,
) -> Summary:
    """Train the runs of `config`; returns the summary of the last run that was started. make_task: makes the task of a
    run, from the number of steps that other runs trained before it. resume: keep finished runs and continue an
    interrupted one. finish: called after each run. An interruption ends the current run and skips the rest. Raises what
    `fit` raises."""
    settings = resolved(config)
    task = make_task(0)  # before anything is written: it may fail
    if config.method != "comera":
        train = _dense(config, task.steps_per_epoch)
        return finish(fit(task, train, config.folder, resume=resume, resolved=settings), task, config.folder)
    with hold(config.folder, open_accelerator(config.train.device)):
        return _fit_stages(config, make_task, task, resume=resume, finish=finish)


def _fit_stages(
    config: StagedConfig,
    make_task: Callable[[int], T],
    task: T,
    *,
    resume: bool,
    finish: Callable[[Summary, T, Path], Summary],
) -> Summary:
    """The early stage and the late ones, in a folder that no other process writes to."""
    folders, main, settings = runs(config), is_main(config.train), resolved(config)
    if main:  # each run has this file too; `--resume` reads the one of the whole
        config.folder.mkdir(parents=True, exist_ok=True)
        replace_file(config.folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    log(main, task.name, f"early stage, in {folders['early']}")
    train = replace(config.train, schedule="constant") if config.late_targets else config.train
    early = fit(task, train, folders["early"], resume=resume, resolved=settings)
    summary = finish(early, task, folders["early"])
    for target in config.late_targets:
        if not summary.finished:
            break
        folder = folders[f"late {target:g}"]
        log(main, task.name, f"late stage to {target:g} of the size, in {folder}")
        task = make_task(early.steps)
        late = _late(config, target, task.steps_per_epoch)
        summary = fit(task, late, folder, resume=resume, resolved=settings, start_from=folders["early"])
        summary = finish(summary, task, folder)
    return summary


def _late(config: StagedConfig, target: float, epoch: int | None) -> TrainConfig:
    """Settings of a late stage; epoch: steps per epoch."""
    train = replace(config.train, epochs=config.late_epochs)
    half = (train.bound(epoch) or 0) // 2  # the size shrinks during the first half
    steps = half if train.late.steps is None else train.late.steps
    return replace(train, late=replace(train.late, target_size=target, steps=steps))


def _dense(config: StagedConfig, epoch: int | None) -> TrainConfig:
    """Settings of a baseline: in steps, so that it sees exactly what the early stage and a late one see together."""
    early, late = config.train.bound(epoch), replace(config.train, epochs=config.late_epochs).bound(epoch)
    if early is None or late is None or not config.late_targets:
        return config.train
    return replace(config.train, steps=early + late, epochs=None)
