"""fit(): trains a task into a run folder. On Hugging Face Accelerate: CPU, one GPU, or several processes.

What is learned follows from the configuration alone: the batch of a step is a pure function of its number, so a run
that was killed resumes from its last checkpoint with the same losses, to the bit on CPU. (A bound in seconds steers
the learning rates by the clock too, so two runs under one differ.)

The clock of a run counts training: batches, steps and logging, but neither evaluation nor pruning nor saving.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object, send_to_device, set_seed
from torch import Tensor

from comera.errors import ConfigError, TrainingError
from comera.files import replace_file
from comera.nn.bonds import named_trains
from comera.rank.controller import RankController
from comera.rank.size import ModelSize, active_ranks, active_size, model_size
from comera.train.clock import Clock, Interrupt
from comera.train.config import TrainConfig
from comera.train.memory import MemoryMeter
from comera.train.metrics import Display, MetricsLog, Summary, to_json
from comera.train.optimizer import lr_multiplier, param_groups
from comera.train.runs import Progress, checkpoints, clean, load_checkpoint, rng_state, save_checkpoint
from comera.train.step import TrainStep, autocast
from comera.train.task import Task

# The first steps after a start are slower (memory pools, threads, plans): they count in no step time.
_WARM_UP_STEPS = 3
_RUN_FILES = ("metrics.jsonl", "summary.json", "checkpoints")


def fit(
    task: Task,
    config: TrainConfig,
    out: Path | str,
    *,
    resume: bool = False,
    resolved: Mapping[str, Any] | None = None,
) -> Summary:
    """Train `task.model` in place; leave configuration, metrics, checkpoints and summary of the run in `out`.

    resume: go on from the last checkpoint in `out`, from the start without one; a finished run returns its summary.
    resolved: the whole configuration for config.yaml, which re-runs the run; `config` under "train" if left out.
    SIGINT and SIGTERM end the run after the current step, with a checkpoint to resume from.

    Raises ConfigError when `out` holds a run and `resume` is not set, or one begun under another configuration;
    CheckpointError for one that cannot be read; TrainingError when loss or gradient is no longer finite, with the last
    good checkpoint kept.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"expected a folder for the run, got the file {out}: give another place")
    accelerator = Accelerator(cpu=config.device == "cpu")
    present = [name for name in _RUN_FILES if (out / name).exists()]
    if present and not resume:
        raise ConfigError(
            f"expected a folder without a run, got {out} with {', '.join(present)}: "
            "resume that run, give another folder, or move this one away"
        )
    done = Summary.read(out / "summary.json")
    if done is not None and done.finished:
        display = Display(task.name, shown=config.progress and accelerator.is_main_process)
        display.say(f"{task.name}: the run in {out} is finished, {done.steps:,} steps ({done.stopped})")
        return done
    accelerator.wait_for_everyone()  # no process writes before all have looked
    with ExitStack() as stack:
        if config.threads is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(config.threads)
        return _Run(task, config, out, accelerator, resolved, stack).train()


class _Run:
    """A run under way: the state of the loop, its step, and what it writes."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        out: Path,
        accelerator: Accelerator,
        resolved: Mapping[str, Any] | None,
        stack: ExitStack,
    ) -> None:
        self.task, self.config, self.out, self.accelerator = task, config, out, accelerator
        self.main: bool = accelerator.is_main_process
        self.world: int = accelerator.num_processes
        self.device: torch.device = accelerator.device
        self.memory = MemoryMeter.start(self.device)
        set_seed(config.seed, device_specific=True)  # every process draws its own dropout
        self.model = task.model.to(self.device)
        if self.world > 1:
            broadcast([tensor.detach() for tensor in [*self.model.parameters(), *self.model.buffers()]])
        groups = param_groups(
            self.model,
            lr=config.lr,
            core_lr=config.core_lr,
            rank_lr=config.rank_lr,
            weight_decay=config.weight_decay,
        )
        # Fused, one kernel a parameter: on CPU 2-3 times faster over dense weights, 6 times over many small cores.
        self.optimizer = torch.optim.AdamW(groups, betas=config.betas, fused=True)
        self.peak_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.trains = dict(named_trains(self.model))
        self.controller = RankController(self.model, config.early).attach(self.optimizer) if self.trains else None
        self.step = TrainStep(
            self.model,
            task.loss,
            self.optimizer,
            controller=self.controller,
            clip=config.clip,
            precision=config.precision,
            average=(lambda flat: accelerator.reduce(flat, "mean")) if self.world > 1 else None,
        )
        self.method: str = getattr(task, "method", "comera" if self.trains else "dense")
        about = {"recipe": task.name, "method": self.method, "processes": self.world}
        self.identity = {**config.identity(), **about, **getattr(task, "identity", {})}

        self.progress = self._take_up()
        self.size = self._model_size()
        self.clock = Clock(self.device, self.progress.time)
        self.pending: list[tuple[int, Tensor, Tensor]] = []  # step, loss, gradient norm: not yet seen by the host
        self.seen = (0.0, 0.0)
        self.checked_at = self.progress.time
        self.logged_at = (self.progress.step, self.progress.tokens, self.progress.time)
        self.durations: list[float] = []
        self.metrics = self._open_folder(resolved) if self.main else None
        if self.metrics:
            stack.callback(self.metrics.close)
        self.interrupt = stack.enter_context(Interrupt())
        self.display = stack.enter_context(Display(task.name, shown=config.progress and self.main))

    def _take_up(self) -> Progress:
        """The progress of the last checkpoint, loaded, or of a run that begins."""
        if self.main:
            clean(self.out)
        self.accelerator.wait_for_everyone()
        found = checkpoints(self.out)
        if not found:
            return Progress()
        rank = self.accelerator.process_index
        state = (self.model, self.optimizer, self.controller)
        progress = load_checkpoint(found[-1], *state, identity=self.identity, process=rank)
        if progress.stopped == "interrupted":
            progress.stopped = None
        return progress

    def _open_folder(self, resolved: Mapping[str, Any] | None) -> MetricsLog:
        self.out.mkdir(parents=True, exist_ok=True)
        settings = _plain({"train": asdict(self.config)} if resolved is None else resolved)
        replace_file(self.out / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        replace_file(self.out / "layers.json", to_json(list(getattr(self.task, "report_rows", ())), indent=1) + "\n")
        return MetricsLog(self.out, step=self.progress.step or -1, tensorboard=self.config.tensorboard)

    def train(self) -> Summary:
        """Step until a bound, and at the steps that are due for it log, prune, evaluate and save."""
        progress, config = self.progress, self.config
        if progress.step == 0:
            self._log_size()
        self.model.train()
        self.clock.start()
        while progress.stopped is None:
            self._take_step()
            ends = progress.stopped is not None
            complete = ends and progress.stopped != "interrupted"
            prunes = self._due(config.prune_every) or (complete and config.prune_at_end)
            evaluates = self._due(config.eval_every) or complete
            saves = self._due(config.save_every) or ends
            logs = self._due(config.log_every) or ends
            if logs or prunes or evaluates or saves or self.device.type == "cpu":
                self._check()
            if logs:
                self._log()
            if prunes or evaluates or saves:
                with self.clock.paused():
                    if prunes:
                        self._prune()
                    if evaluates and self._evaluate():
                        saves = True  # a new best one
                    if saves:
                        self._save()
        return self._finish()

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _done(self, ahead: float = 0.0) -> float:
        """The part of the run that is done; `ahead`: steps to count in addition."""
        steps, seconds = self.config.steps, self.config.max_seconds
        by_steps = (self.progress.step + ahead) / steps if steps else 0.0
        return min(1.0, max(by_steps, self.progress.time / seconds if seconds else 0.0))

    def _take_step(self) -> None:
        progress, config = self.progress, self.config
        # The middle of the step: neither the first nor the last one is lost to a rate of zero.
        multiplier = lr_multiplier(
            self._done(ahead=0.5), warmup=config.warmup, schedule=config.schedule, final=config.final_lr
        )
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak * multiplier
        rank = self.accelerator.process_index
        batches = [
            self.task.train_batch(progress.step, micro, rank, self.world) for micro in range(config.accumulation)
        ]
        tokens = sum(map(self.task.tokens, batches))
        result = self.step([send_to_device(batch, self.device, non_blocking=True) for batch in batches])
        progress.step += 1
        self.pending.append((progress.step, result.loss, result.grad_norm))
        progress.time, tokens, interrupted = self._agree(self.clock.seconds, tokens, self.interrupt.seen)
        progress.tokens += tokens
        if config.steps and progress.step >= config.steps:
            progress.stopped = "steps"
        elif config.max_seconds and progress.time >= config.max_seconds:
            progress.stopped = "time"
        elif interrupted:
            progress.stopped = "interrupted"

    def _agree(self, seconds: float, tokens: int, interrupted: bool) -> tuple[float, int, bool]:
        """Longest time, all tokens, any interruption: the processes must take the same decisions."""
        if self.world == 1:
            return seconds, tokens, interrupted
        mine = torch.tensor([[seconds, tokens, interrupted]], dtype=torch.float64, device=self.device)
        all_seconds, all_tokens, any_interrupted = self.accelerator.gather(mine).T.tolist()
        return max(all_seconds), int(sum(all_tokens)), any(any_interrupted)

    def _check(self) -> None:
        """Bring the losses and norms of the steps since the last check to the host: the loop's one wait for the device.

        Raises TrainingError at the first one that is not finite.
        """
        values = torch.stack([torch.stack([loss, norm.float()]) for _, loss, norm in self.pending]).tolist()
        for (step, *_), (loss, norm) in zip(self.pending, values, strict=True):
            if not (isfinite(loss) and isfinite(norm)):
                raise self._failure(f"loss {loss} with gradient norm {norm}", step)
        now = self.clock.seconds
        self.durations.append((now - self.checked_at) / len(self.pending))
        self.checked_at = now
        self.seen = tuple(values[-1])
        self.pending.clear()

    def _log(self) -> None:
        progress, (loss, grad_norm) = self.progress, self.seen
        step, tokens, seconds = self.logged_at
        self.logged_at = (progress.step, progress.tokens, progress.time)
        passed = max(progress.time - seconds, 1e-9)
        tokens_per_s = (progress.tokens - tokens) / passed
        self._write(
            "train",
            loss=loss,
            grad_norm=grad_norm,
            lr={group["name"]: group["lr"] for group in self.optimizer.param_groups},
            tokens=progress.tokens,
            tokens_per_s=tokens_per_s,
            step_time=passed / (progress.step - step),
        )
        about = {"tokens_per_s": tokens_per_s, "ratio": self.size.ratio, "time": progress.time}
        self.display.update(self._done(), step=progress.step, loss=loss, **about)

    def _log_size(self) -> None:
        size = self.size
        self._write(
            "size",
            total=size.total,
            tensorized=size.tensorized,
            ratio=size.ratio,
            tensorized_ratio=size.tensorized_ratio,
            active=sum(map(active_size, self.trains.values())),
            ranks={name: active_ranks(train) for name, train in self.trains.items()},
        )

    def _write(self, kind: str, **values: Any) -> None:
        if self.metrics:
            self.metrics.write(kind, self.progress.step, time=self.progress.time, **values)

    def _model_size(self) -> ModelSize:
        return model_size(self.model, dense_total=getattr(self.task, "dense_total", None))

    def _prune(self) -> None:
        report = self.controller.prune_() if self.controller else None
        if report and report.changed:
            self.size = self._model_size()
            self._write("prune", before=report.before, after=report.after)

    @torch.no_grad()
    def _evaluate(self) -> bool:
        """Mean loss over the held-out batches, shared out among the processes; whether it is a new best."""
        progress, rank = self.progress, self.accelerator.process_index
        sums = torch.zeros(2, device=self.device)
        # What evaluation draws at random must not shift what training draws.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self.model.eval()
            for batch in islice(self.task.eval_batches(), rank, self.config.eval_batches or None, self.world):
                with autocast(self.device, self.config.precision):
                    loss = self.task.loss(self.model, send_to_device(batch, self.device))
                sums += torch.stack([loss.float(), loss.new_ones((), dtype=torch.float32)])
            self.model.train()
        total, count = self.accelerator.reduce(sums, "sum").tolist()
        if not count:
            raise ConfigError(f"expected held-out batches from {self.task.name}, got none: give it more held-out data")
        loss_value = total / count
        if not isfinite(loss_value):
            raise self._failure(f"held-out loss {loss_value}", progress.step)
        best = progress.best_held_out_loss is None or loss_value < progress.best_held_out_loss
        progress.held_out_loss, progress.held_out_step = loss_value, progress.step
        if best:
            progress.best_held_out_loss = loss_value
        self._write("eval", tokens=progress.tokens, loss=loss_value)
        self._log_size()
        self.display.say(
            f"{self.task.name}: step {progress.step:,}, {progress.time:.0f} s: held-out loss {loss_value:.4f}"
            f"{' (best so far)' if best else ''}, {self.size.ratio:.1f}x smaller"
        )
        return best

    def _save(self) -> None:
        """Write a checkpoint; raises TrainingError instead for a model with numbers that are not finite."""
        progress = self.progress
        if not torch.stack([p.isfinite().all() for p in self.model.parameters()]).all():
            raise self._failure("parameters that are not finite", progress.step)
        if steady := self.durations[_WARM_UP_STEPS:] or self.durations:
            progress.step_time = statistics.median(steady)
        progress.peak_memory = max(progress.peak_memory, self.memory.peak)
        rng = gather_object([rng_state()])
        if self.metrics:
            self.metrics.sync()
            state = (self.model, self.optimizer, self.controller, progress)
            save_checkpoint(self.out, *state, identity=self.identity, rng=rng)
        self.accelerator.wait_for_everyone()

    def _failure(self, what: str, step: int) -> TrainingError:
        found = checkpoints(self.out)
        kept = f"the last good checkpoint is {found[-1]}" if found else "no checkpoint had been saved yet"
        return TrainingError(
            f"expected finite numbers, got {what} at step {step}; {kept}: start a new run with a lower lr, a longer "
            "warmup or a smaller clip, or with precision fp32 if it was bf16"
        )

    def _finish(self) -> Summary:
        progress, size = self.progress, self.size
        assert progress.stopped is not None
        summary = Summary(
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
        )
        if self.main:
            summary.write(self.out / "summary.json")
        self.accelerator.wait_for_everyone()
        return summary


def _plain(value: Any) -> Any:
    """Built-in types only, for YAML."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)
