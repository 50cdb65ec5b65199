"""Experiment trackers of a run: those of Accelerate.

Each gets the configuration, every number of every record of metrics.jsonl under its path (train/loss, eval/loss,
train/lr/cores), and at the end those of the summary. A tracker that fails while a run goes on is closed, with a
warning: training never stops for one. A resumed run continues the same TensorBoard folder and the same run of W&B
and MLflow, whose ids trackers.json keeps.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import yaml
from accelerate.tracking import GeneralTracker, MLflowTracker, TensorBoardTracker, WandBTracker

from comera.errors import ConfigError
from comera.extras import require
from comera.files import replace_file

TrackerName = Literal["tensorboard", "wandb", "mlflow"]

_PROJECT = "comera"  # unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME names another
_IDS = "trackers.json"
_log = logging.getLogger(__name__)


def check_installed(names: Sequence[str]) -> None:
    """Raise MissingPackageError for a tracker whose package is not installed."""
    for name in names:
        require(f"the tracker {name} of train.trackers", name, name)


class Trackers:
    """The trackers of a run, by name, from its start to its end.

    Args:
        names: which ones.
        folder: of the run.
        settings: its whole configuration, JSON-ready.
        step: that the run has reached; later entries, of a run that was killed, are removed where that is possible.

    Raises:
        ConfigError: one that cannot start.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any], *, step: int = 0) -> None:
        self._folder, self._step = folder, step
        self._open: dict[str, GeneralTracker] = {}
        ids = _read_ids(folder) if step else {}
        try:
            for name in names:
                self._open[name], continued = self._start(name, ids)
                if not continued:
                    self._open[name].store_init_configuration(dict(_settings(settings)))
        except BaseException:
            self.close(failed=True)
            raise
        if ids:
            replace_file(folder / _IDS, json.dumps(ids) + "\n")

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Log the values of a record that are finite."""
        numbers = {name: value for name, value in _scalars(kind, values) if isfinite(value)}
        self._each(lambda tracker: tracker.log(numbers, step=step), f"at step {step:,}")

    def close(self, *, failed: bool = False, interrupted: bool = False) -> None:
        """End the runs of all trackers. failed: by an error. interrupted: to be resumed later."""
        self._each(lambda tracker: _finish(tracker, failed=failed, interrupted=interrupted), "at its end")
        self._open.clear()

    def _start(self, name: str, ids: dict[str, str]) -> tuple[GeneralTracker, bool]:
        """A tracker that has started, and whether it continues the run `ids[name]`; notes the id."""
        earlier = ids.pop(name, None)
        try:
            tracker = self._make(name, earlier)
            try:
                tracker.start()
            except Exception as error:  # the tracker's own types
                if earlier is None:
                    raise
                _log.warning(
                    "tracker %s cannot continue its run %s (%s): it starts another", name, earlier, _one(error)
                )
                earlier, tracker = None, self._make(name, None)
                tracker.start()
        except Exception as error:
            raise ConfigError(
                f"train.trackers: expected {name} to start, got {_one(error)}: repair that, or leave it out"
            ) from error
        if isinstance(tracker, WandBTracker):
            ids[name] = tracker.tracker.id
        elif isinstance(tracker, MLflowTracker):
            ids[name] = tracker.tracker.info.run_id
        return tracker, earlier is not None

    def _make(self, name: str, id: str | None) -> GeneralTracker:
        title = "/".join(self._folder.resolve().parts[-2:])
        if name == "tensorboard":
            return _TensorBoard(name, self._folder, purge_step=self._step + 1)
        if name == "mlflow":
            return MLflowTracker(_PROJECT, run_id=id, run_name=title)
        where = {} if "WANDB_DIR" in os.environ else {"dir": str(self._folder)}
        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        return WandBTracker(project, name=title, id=id, resume="allow" if id else None, **where)

    def _each(self, action: Callable[[GeneralTracker], object], when: str) -> None:
        for name, tracker in list(self._open.items()):
            try:
                action(tracker)
            except Exception as error:  # the tracker's own types
                del self._open[name]
                _log.warning(
                    "tracker %s failed %s (%s): the run goes on without it; metrics.jsonl has all",
                    name,
                    when,
                    _one(error),
                )
                with suppress(Exception):
                    _finish(tracker, failed=True)


def _finish(tracker: GeneralTracker, *, failed: bool = False, interrupted: bool = False) -> None:
    if isinstance(tracker, WandBTracker):
        tracker.tracker.finish(exit_code=int(failed))
    elif isinstance(tracker, MLflowTracker):
        import mlflow

        mlflow.end_run("FAILED" if failed else "KILLED" if interrupted else "FINISHED")
    else:
        tracker.finish()


class _TensorBoard(TensorBoardTracker):  # type: ignore[misc, unused-ignore]
    """Writes the configuration as a text: as Accelerate has it, each start would leave a folder of its own."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        self.writer.add_text("config", f"```\n{text}```")


def _read_ids(folder: Path) -> dict[str, str]:
    """The ids of the trackers' runs; none if the file is missing or damaged."""
    try:
        ids = json.loads((folder / _IDS).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(id) for name, id in ids.items()} if isinstance(ids, dict) else {}


def _settings(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a configuration by dotted name; lists become text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _settings(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value if isinstance(value, str | int | float | None) else json.dumps(value)


def _scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number in `value` with its path."""
    if isinstance(value, int | float):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value, start=1)
        for key, item in items:
            yield from _scalars(f"{name}/{key}", item)


def _one(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
