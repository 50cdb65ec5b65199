"""The stages of a recipe as runs, one after the other.

    comera  out/early          early stage, `train.epochs` long
            out/late-0.8, ...  for each target a late stage of its own, from the end of the early one
    dense   out                the twin: as long as the early stage and one late stage
    others  out                baselines, as long as the twin

Batches follow from the seed and their place in one sequence, where the late stages go on after the early one: the twin
meets exactly the batches of the early stage and of each late one.

Where late stages follow, the early one holds its learning rates after the warm-up, and they fall in each late one: a
cut mends at full rates only, and rates that have fallen twice have lost the steps in between (docs/LOG.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml

from comera.baselines import Method
from comera.errors import ConfigError
from comera.files import replace_file
from comera.trainer.config import TrainConfig
from comera.trainer.loop import fit
from comera.trainer.metrics import Summary
from comera.trainer.task import Task


class Staged(Protocol):
    """What the stages read of a recipe's configuration."""

    @property
    def method(self) -> Method:
        """Of comera there are stages, of the others one run."""

    @property
    def late_targets(self) -> tuple[float, ...]:
        """Sizes to reach, each as a part of the size at the end of the early stage."""

    @property
    def late_epochs(self) -> float:
        """Passes over the training data in each late stage."""

    @property
    def train(self) -> TrainConfig:
        """How the early stage is trained."""

    @property
    def folder(self) -> Path:
        """The folder of all runs."""


T = TypeVar("T", bound=Task)


def check_stages(config: Staged) -> None:
    """Raise ConfigError for targets or lengths that make no late stage."""
    for target in config.late_targets:
        if isinstance(target, bool) or not 0 < target < 1:
            raise ConfigError(f"late_targets must be parts of the early size above 0 and below 1, got {target!r}")
    if len({f"{target:g}" for target in config.late_targets}) < len(config.late_targets):
        raise ConfigError(f"late_targets must differ, a folder is named after each, got {config.late_targets}")
    if not (isfinite(config.late_epochs) and config.late_epochs > 0):
        raise ConfigError(f"late_epochs must be a number > 0, got {config.late_epochs!r}")
    late = config.train.late
    if late.target_size is not None or late.starts:
        raise ConfigError("train.late takes no target_size and no start here: set late_targets and train.epochs")


def runs(config: Staged) -> dict[str, Path]:
    """Run folders by name, in their order: "early", "late 0.8", ...; of other methods than comera the one run."""
    if config.method != "comera":
        return {config.method: config.folder}
    late = {f"late {target:g}": config.folder / f"late-{target:g}" for target in config.late_targets}
    return {"early": config.folder / "early", **late}


def refuse_present(config: Staged) -> None:
    """Raise ConfigError where one of the runs is there already: for those that are not to resume."""
    present = [str(folder) for folder in runs(config).values() if (folder / "metrics.jsonl").exists()]
    if present:
        raise ConfigError(
            f"expected a folder without a run, got {config.folder} with {', '.join(present)}: "
            "resume those runs, give another folder, or move this one away"
        )


def fit_stages(
    config: Staged,
    make_task: Callable[[int], T],
    *,
    main: bool,
    resume: bool,
    resolved: Mapping[str, Any],
    finish: Callable[[Summary, T, Path], Summary] = lambda summary, task, folder: summary,
) -> Summary:
    """Train the runs of `config`; returns the summary of the last one that was begun.

    make_task: of a run that goes on after so many steps of others. main: whether this process is the one that writes.
    resume: finished runs are kept, one that was interrupted goes on. resolved: the whole configuration. finish: what is
    done after each run.
    An interruption ends the run that is under way and leaves out the others. Raises what `fit` raises.
    """
    folders = runs(config)
    task = make_task(0)  # before anything is written: it may not be possible
    if config.method != "comera":
        twin = _twin(config, task.steps_per_epoch)
        return finish(fit(task, twin, config.folder, resume=resume, resolved=resolved), task, config.folder)
    if main:  # each run has this file too; the one that `--resume` reads is that of the whole
        config.folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(dict(resolved), sort_keys=False, allow_unicode=True)
        replace_file(config.folder / "config.yaml", text)
    say(main, task.name, f"early stage, in {folders['early']}")
    early = fit(task, _early(config), folders["early"], resume=resume, resolved=resolved)
    summary = finish(early, task, folders["early"])
    for target in config.late_targets:
        if not summary.finished:
            break
        folder = folders[f"late {target:g}"]
        say(main, task.name, f"late stage to {target:g} of the size, in {folder}")
        task = make_task(early.steps)
        late = _late(config, target, task.steps_per_epoch)
        summary = fit(task, late, folder, resume=resume, resolved=resolved, start_from=folders["early"])
        summary = finish(summary, task, folder)
    return summary


def say(main: bool, recipe: str, text: str) -> None:
    """A line about a recipe's progress, on stderr, from the main process alone."""
    if main:
        print(f"{recipe}: {text}", file=sys.stderr)


def _early(config: Staged) -> TrainConfig:
    """How the early stage is trained."""
    return replace(config.train, schedule="constant") if config.late_targets else config.train


def _late(config: Staged, target: float, epoch: int | None) -> TrainConfig:
    """How a late stage is trained; epoch: steps in one."""
    train = replace(config.train, epochs=config.late_epochs)
    half = (train.bound(epoch) or 0) // 2
    steps = half if train.late.steps is None else train.late.steps
    return replace(train, late=replace(train.late, target_size=target, steps=steps))


def _twin(config: Staged, epoch: int | None) -> TrainConfig:
    """How the dense twin is trained: by steps, so that it sees exactly what the early stage and a late one see."""
    early, late = (
        replace(config.train, epochs=epochs).bound(epoch) for epochs in (config.train.epochs, config.late_epochs)
    )
    if early is None or late is None or not config.late_targets:
        return config.train
    return replace(config.train, steps=early + late, epochs=None)
