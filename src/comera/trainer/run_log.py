"""What a run tells: the files and records of its folder, lines for the person, and at the end its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from torch import nn
from torch.optim import Optimizer

from comera.files import replace_file
from comera.nn.tensor_train import named_trains
from comera.rank.controller import RankController
from comera.rank.report import RankReport
from comera.rank.size import ModelSize, model_size, unpruned_ranks, unpruned_size
from comera.trainer.checkpoint import Progress
from comera.trainer.config import TrainConfig
from comera.trainer.metrics import Display, MetricsLog, Summary, to_json
from comera.trainer.task import Task


class Journal:
    """Writes the records of a run, each at the step and time of `progress`; inside it as a context.

    model, optimizer, controller (None for a dense model), progress: the run's own, read when there is something to
    tell. method: what the report calls it. resolved: the whole configuration for config.yaml, `config` under "train"
    if None. main: whether this process is the one that writes; the others write nothing.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        out: Path,
        model: nn.Module,
        optimizer: Optimizer,
        controller: RankController | None,
        progress: Progress,
        *,
        method: str,
        resolved: Mapping[str, Any] | None,
        main: bool,
    ) -> None:
        self.task, self.config, self.out, self.main = task, config, out, main
        self.model, self.optimizer, self.controller, self.progress = model, optimizer, controller, progress
        self.trains = dict(named_trains(model))
        self.method = method
        self.epoch: int | None = getattr(task, "steps_per_epoch", None)
        self.size = self._model_size()
        self._resolved = resolved
        self._logged_at = (progress.step, progress.tokens, progress.time)
        self._display = Display(task.name, shown=config.progress and main, counted=getattr(task, "counted", "tokens"))
        self._metrics: MetricsLog | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Journal:
        if self.main:
            self.out.mkdir(parents=True, exist_ok=True)
            settings = _plain({"train": asdict(self.config)} if self._resolved is None else self._resolved)
            replace_file(self.out / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
            rows = list(getattr(self.task, "report_rows", ()))
            replace_file(self.out / "layers.json", to_json(rows, indent=1) + "\n")
            self._metrics = MetricsLog(self.out, step=self.progress.step or -1, tensorboard=self.config.tensorboard)
            self._stack.callback(self._metrics.close)
        self._stack.enter_context(self._display)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def sync(self) -> None:
        """Have all records on the disk."""
        if self._metrics:
            self._metrics.sync()

    def say(self, text: str) -> None:
        """Print a line for the person."""
        self._display.say(f"{self.task.name}: {text}")

    def log_train(self, loss: float, grad_norm: float, memory: int, done: float) -> None:
        """A step of training, with what has passed since the last one told; waits for the device.

        memory: peak bytes since then; done: the part of the run.
        """
        progress = self.progress
        step, tokens, seconds = self._logged_at
        self._logged_at = (progress.step, progress.tokens, progress.time)
        passed = max(progress.time - seconds, 1e-9)
        tokens_per_s = (progress.tokens - tokens) / passed
        if self._metrics:
            self._write(
                "train",
                loss=loss,
                grad_norm=grad_norm,
                lr={group["name"]: float(group["lr"]) for group in self.optimizer.param_groups},
                tokens=progress.tokens,
                tokens_per_s=tokens_per_s,
                step_time=passed / (progress.step - step),
                peak_memory=memory,
                size=self.controller.size() if self.controller else 0,
                stage=self.controller.stage if self.controller else None,
            )
        about = {"tokens_per_s": tokens_per_s, "ratio": self.size.ratio, "time": progress.time}
        self._display.update(done, step=progress.step, loss=loss, **about)

    def log_mode(self, mode: str, built: int) -> None:
        """How steps run from now on, "graph" or "eager (why)", and the graphs captured or compiled so far."""
        self._write("mode", mode=mode, built=built)
        if mode != self.progress.mode:
            self.say(f"step {self.progress.step:,}: mode {mode}")
        self.progress.mode = mode

    def log_size(self) -> None:
        """Numbers stored, and the ranks of every chain."""
        size = self.size
        self._write(
            "size",
            total=size.total,
            tensorized=size.tensorized,
            ratio=size.ratio,
            tensorized_ratio=size.tensorized_ratio,
            active=sum(map(unpruned_size, self.trains.values())),
            ranks={name: unpruned_ranks(train) for name, train in self.trains.items()},
        )

    def log_stage(self, controller: RankController) -> None:
        """The switch to the late stage."""
        size, target, loss = controller.size(), controller.target_size, controller.target_loss
        self._write("stage", stage=controller.stage, target_size=target, target_loss=loss, size=size)
        self.say(
            f"step {self.progress.step:,}: the late stage begins, from {size:,} numbers in tensorized layers to "
            f"{target:,}, at a loss of {loss:.4f}"
        )

    def log_prune(self, report: RankReport) -> None:
        """A cut of inactive ranks that made the model smaller."""
        self.size = self._model_size()
        self._write("prune", before=report.before, after=report.after)
        self.log_size()

    def log_round(self, report: RankReport) -> None:
        """Rounding to the target size."""
        self.size = self._model_size()
        self._write("round", before=report.before, after=report.after, error=report.error, target=report.target)
        self.say(
            f"step {self.progress.step:,}: rounded from {report.before:,} to {report.after:,} numbers in tensorized "
            f"layers (target {report.target:,}), relative error of the worst one {report.error:.2g}"
        )

    def log_eval(self, best: bool) -> None:
        """An evaluation, which `progress` holds; best: whether its loss is the lowest so far."""
        progress = self.progress
        loss, metrics = progress.held_out_loss, progress.metrics
        self._write(
            "eval",
            tokens=progress.tokens,
            loss=loss,
            metrics=metrics,
            epoch=progress.step / self.epoch if self.epoch else None,
        )
        self.log_size()
        self.say(
            f"step {progress.step:,}, {progress.time:.0f} s: held-out loss {loss:.4f}{' (best so far)' if best else ''}"
            f"{''.join(f', {name} {value:.4f}' for name, value in metrics.items())}, {self.size.ratio:.1f}x smaller"
        )

    def summary(self) -> Summary:
        """How the run ended."""
        progress, size = self.progress, self.size
        assert progress.stopped is not None
        return Summary(
            method=self.method,
            recipe=self.task.name,
            steps=progress.step,
            time=progress.time,
            tokens=progress.tokens,
            step_time=progress.step_time,
            peak_memory=progress.peak_memory,
            held_out_loss=progress.held_out_loss,
            best_held_out_loss=progress.best_held_out_loss,
            parameters=size.total,
            size_bytes=size.bytes,
            tensorized=size.tensorized,
            tensorized_ratio=size.tensorized_ratio if isfinite(size.tensorized_ratio) else None,
            ratio=size.ratio if isfinite(size.ratio) else None,
            stopped=progress.stopped,
            metrics=progress.metrics,
            epoch_time=progress.time / progress.step * self.epoch if self.epoch else None,
            examples=progress.examples,
            mode=progress.mode,
        )

    def _write(self, kind: str, **values: Any) -> None:
        if self._metrics:
            self._metrics.write(kind, self.progress.step, time=self.progress.time, **values)

    def _model_size(self) -> ModelSize:
        return model_size(self.model, dense_total=getattr(self.task, "dense_total", None))


def _plain(value: Any) -> Any:
    """Built-in types only, for YAML."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)
