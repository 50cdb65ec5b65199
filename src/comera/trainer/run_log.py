"""What a run logs: the files and records of its folder, lines on the terminal, and at the end its summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields
from math import isfinite
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from comera.files import replace_file
from comera.nn.size import ModelSize, model_size
from comera.rank.report import RankReport
from comera.rank.size import unpruned_ranks, unpruned_size
from comera.trainer.display import Display, figure
from comera.trainer.energy import emissions
from comera.trainer.metrics import MetricsLog, Summary, to_json
from comera.trainer.provenance import note
from comera.trainer.state import TrainState
from comera.trainer.trackers import Trackers


class RunLogger:
    """Logs a run while its context is open, each record at the step and time that the run has reached.

    Only the main process writes. resolved: the whole configuration for config.yaml. Default: that of the run, under
    "train". whole: a folder besides the run's that gets this file.
    """

    def __init__(
        self, state: TrainState, *, resolved: Mapping[str, Any] | None = None, whole: Path | None = None
    ) -> None:
        progress, task, config = state.progress, state.task, state.config
        self._state, self._resolved, self._whole = state, resolved, whole
        self._size = self._model_size()
        # what has been logged so far: of a run that resumes, all but graphs
        self._logged_at = (progress.step, progress.tokens, progress.time)
        self._mode = (progress.mode, 0)
        self._late = progress.step > 0 and state.stage == "late"
        self._is_main: bool = state.accelerator.is_main_process
        self._display = Display(task.name, shown=config.progress and self._is_main, counted=task.counted)
        self._metrics: MetricsLog | None = None
        self._trackers: Trackers | None = None
        self._stack = ExitStack()

    def __enter__(self) -> RunLogger:
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def _open(self, stack: ExitStack) -> None:
        if self._is_main:
            out, config = self._state.out, self._state.config
            out.mkdir(parents=True, exist_ok=True)
            step = self._state.progress.step
            self._metrics = MetricsLog(out, step=step or -1)
            stack.callback(self._metrics.close)
            settings = {"train": asdict(config)} if self._resolved is None else dict(self._resolved)
            settings = json.loads(json.dumps(settings, default=str))  # YAML takes built-in types only
            for folder in filter(None, (out, self._whole)):
                replace_file(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
            task = self._state.task
            replace_file(out / "layers.json", to_json([*task.report_rows], indent=1) + "\n")
            if task.references:
                replace_file(out / "references.json", to_json(task.references, indent=1) + "\n")
            self._note_provenance()
            for name, text in task.files.items():
                replace_file(out / name, text)
            self._trackers = Trackers(config.trackers, out, settings, step=step)
            stack.push(self._close_trackers)
        stack.enter_context(self._display)
        self._log_fp8()
        if self._state.progress.step == 0:
            self.log_size()
            self.log_stage()

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def _close_trackers(self, kind: type[BaseException] | None, *raised: object) -> None:
        if self._trackers:
            interrupted = self._state.progress.stopped == "interrupted"
            self._trackers.close(failed=kind is not None, interrupted=interrupted)

    def _note_provenance(self) -> None:
        state = self._state
        energy = state.energy.unknown or state.energy.basis
        note(
            state.out,
            state.accelerator.device,
            step=state.progress.step,
            processes=state.accelerator.num_processes,
            data=state.task.identity.get("data.prepared"),
            start_from=state.progress.start_from,
            energy=energy,
        )

    def sync(self) -> None:
        """Flush all records to the disk."""
        if self._metrics:
            self._metrics.sync()

    def announce(self, text: str) -> None:
        """Print a line on the terminal."""
        self._display.announce(f"{self._state.task.name}: {text}")

    def log_train(self, loss: float, grad_norm: float, peak_memory: int, done: float) -> None:
        """Log a training step, with the rates since the last one logged. Synchronizes.

        peak_memory: bytes since then; done: the fraction of the run.
        """
        state, progress = self._state, self._state.progress
        step, tokens, seconds = self._logged_at
        self._logged_at = (progress.step, progress.tokens, progress.time)
        elapsed = max(progress.time - seconds, 1e-9)
        tokens_per_s = (progress.tokens - tokens) / elapsed
        if self._metrics:
            self._write(
                "train",
                loss=loss,
                grad_norm=grad_norm,
                lr={group["name"]: float(group["lr"]) for group in state.optimizer.param_groups},
                tokens=progress.tokens,
                tokens_per_s=tokens_per_s,
                step_time=elapsed / (progress.step - step),
                peak_memory=peak_memory,
                size=state.controller.size() if state.controller else 0,
                stage=state.stage,
                energy=progress.energy,
            )
        about = {"tokens_per_s": tokens_per_s, "ratio": self._size.ratio, "time": progress.time}
        self._display.update(done, step=progress.step, loss=loss, held_out_loss=progress.held_out_loss, **about)

    def log_mode(self, mode: str, built: int) -> None:
        """Log how steps run, "graph" or "eager (why)", and the graphs built so far, if either has changed."""
        progress = self._state.progress
        before, self._mode = self._mode, (mode, built)
        if self._mode == before:
            return
        progress.mode = mode
        self._write("mode", mode=mode, built=built)
        if mode != before[0]:
            self.announce(f"step {progress.step:,}: mode {mode}")

    def _log_fp8(self) -> None:
        """Log which layers compute in FP8 and why the others do not, if the precision is that."""
        report = self._state.fp8
        if report is None:
            return
        self.announce(report.headline)
        by_reason: dict[str, list[str]] = {}
        for row in report.left_alone:
            by_reason.setdefault(row.reason, []).append(row.name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.announce(f"not in FP8: {names[0]}{more}: {reason}")

    def log_size(self) -> None:
        """Log the parameters stored and the ranks of every tensor train."""
        size = self._size
        self._write(
            "size",
            **{name: getattr(size, name) for name in ("total", "tensorized", "ratio", "tensorized_ratio")},
            active=sum(map(unpruned_size, self._state.trains.values())),
            ranks={name: unpruned_ranks(train) for name, train in self._state.trains.items()},
        )

    def log_stage(self) -> None:
        """Log the late stage once it has begun."""
        controller = self._state.controller
        if controller is None or self._late or self._state.stage != "late":
            return
        self._late = True
        size, target, loss = controller.size(), controller.target_size, controller.target_loss
        self._write("stage", stage=controller.stage, target_size=target, target_loss=loss, size=size)
        self.announce(
            f"step {self._state.progress.step:,}: the late stage begins, from {size:,} parameters in compressed layers "
            f"to {target:,}, at a loss of {figure(loss)}"
        )

    def log_prune(self, report: RankReport) -> None:
        """Log a pruning that made the model smaller."""
        self._size = self._model_size()
        self._write("prune", before=report.before, after=report.after)
        self.log_size()

    def log_round(self, report: RankReport) -> None:
        """Log the rounding to the target size."""
        self._size = self._model_size()
        self._write("round", before=report.before, after=report.after, error=report.error, target=report.target)
        self.announce(
            f"step {self._state.progress.step:,}: rounded from {report.before:,} to {report.after:,} parameters in "
            f"compressed layers (target {report.target:,}), largest relative error {report.error:.2g}"
        )

    def log_eval(self, is_best: bool) -> None:
        """Log the evaluation that `progress` holds; is_best: whether its loss is the lowest so far."""
        progress, epoch = self._state.progress, self._state.task.steps_per_epoch
        loss, metrics = progress.held_out_loss, progress.metrics
        epochs = progress.step / epoch if epoch else None
        energy = progress.energy
        self._write("eval", tokens=progress.tokens, loss=loss, metrics=metrics, epoch=epochs, energy=energy)
        self.log_size()
        self.announce(
            f"step {progress.step:,}, {progress.time:.0f} s: held-out loss {figure(loss)}"
            f"{' (best so far)' if is_best else ''}"
            f"{''.join(f', {name} {figure(value)}' for name, value in metrics.items())}"
            f", {self._size.ratio:.1f}x smaller"
        )

    def summary(self) -> Summary:
        """The summary of the run at its end; the trackers get it, too."""
        progress, size, epoch = self._state.progress, self._size, self._state.task.steps_per_epoch
        shared = {f.name: getattr(progress, f.name) for f in fields(Summary) if hasattr(progress, f.name)}
        summary = Summary(
            **shared,
            method=self._state.method,
            recipe=self._state.task.name,
            steps=progress.step,
            parameters=size.total,
            size_bytes=size.bytes,
            tensorized=size.tensorized,
            tensorized_ratio=size.tensorized_ratio if isfinite(size.tensorized_ratio) else None,
            ratio=size.ratio if isfinite(size.ratio) else None,
            epoch_time=progress.time / progress.step * epoch if epoch else None,
            memory={"weights": size.bytes, "optimizer state": self._optimizer_bytes()},
            co2=emissions(progress.energy, self._state.config.energy),
            counted=self._state.task.counted,
        )
        if self._trackers:
            self._trackers.log("summary", progress.step, asdict(summary))
        return summary

    def _optimizer_bytes(self) -> int:
        states = self._state.optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))

    def _write(self, kind: str, **values: Any) -> None:
        if self._metrics:
            progress = self._state.progress
            self._metrics.write(kind, progress.step, time=progress.time, **values)
        if self._trackers:
            self._trackers.log(kind, progress.step, {"time": progress.time, **values})

    def _model_size(self) -> ModelSize:
        return model_size(self._state.model, dense_total=self._state.task.dense_total)
