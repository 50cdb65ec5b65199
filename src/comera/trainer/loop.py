"""fit(): trains a task into a run folder. On Hugging Face Accelerate: CPU, one GPU, or several processes.

What is learned follows from the configuration alone: the batch of a step is a pure function of its number, so a run
that was killed resumes from its last checkpoint with the same losses, to the bit on CPU. (A bound in seconds steers
the learning rates by the clock too, so two runs under one differ.)

The clock of a run counts training: batches, steps and logging, but neither evaluation nor pruning nor saving.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object, send_to_device, set_seed
from torch import Tensor

from comera.errors import ConfigError, TrainingError
from comera.fusion.fuse import fuse_
from comera.nn.tensor_train import named_trains
from comera.rank.controller import RankController
from comera.rank.size import model_size
from comera.trainer.checkpoint import (
    Progress,
    checkpoints,
    clean,
    load_checkpoint,
    rng_state,
    save_checkpoint,
    take_over,
)
from comera.trainer.clock import Clock, Interrupt
from comera.trainer.config import TrainConfig
from comera.trainer.evaluation import evaluate
from comera.trainer.memory import MemoryMeter
from comera.trainer.metrics import Display, Summary
from comera.trainer.optimizer import lr_multiplier, named_optimizer
from comera.trainer.run_log import Journal
from comera.trainer.step import TrainStep
from comera.trainer.task import Task

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
    start_from: Path | str | None = None,
) -> Summary:
    """Train `task.model` in place; leave configuration, metrics, checkpoints and summary of the run in `out`.

    resume: go on from the last checkpoint in `out`, from the start without one; a finished run returns its summary.
    resolved: the whole configuration for config.yaml, which re-runs the run; `config` under "train" if left out.
    start_from: folder of another run of this model, or of a checkpoint of it, to begin with: its model with the ranks,
    optimizer and rank adaptation are taken over, steps count from 0. A late stage that names no start begins at once.
    A resumed run goes on from its own checkpoint and needs that folder no more.
    SIGINT and SIGTERM end the run after the current step, with a checkpoint to resume from.
    With a late stage, a run that reaches its bound ends with a model of the target size or below.

    Raises ConfigError when `out` holds a run and `resume` is not set, or one begun under another configuration, and for
    a late stage that nothing starts; CheckpointError for a run that cannot be read or taken over; RankError for a
    target size that cannot be; TrainingError when loss or gradient is no longer finite, with the last good checkpoint
    kept.
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
        return _Run(task, config, out, accelerator, resolved, start_from, stack).train()


class _Run:
    """A run under way: the state of the loop and its step."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        out: Path,
        accelerator: Accelerator,
        resolved: Mapping[str, Any] | None,
        start_from: Path | str | None,
        stack: ExitStack,
    ) -> None:
        self.task, self.config, self.out, self.accelerator = task, config, out, accelerator
        self.main: bool = accelerator.is_main_process
        self.world: int = accelerator.num_processes
        self.device: torch.device = accelerator.device
        self.epoch = task.steps_per_epoch
        self.bound = config.bound(self.epoch)
        self.memory = MemoryMeter.start(self.device)
        set_seed(config.seed, device_specific=True)  # every process draws its own dropout
        self.model = task.model.to(self.device)
        if self.world > 1:
            broadcast([tensor.detach() for tensor in [*self.model.parameters(), *self.model.buffers()]])
        compressed = next(named_trains(self.model), None) is not None
        if config.fuse and compressed:
            fuse_(self.model)
        if config.recompute:
            from comera.recompute.blocks import recompute_

            recompute_(self.model)
        own_optimizer = task.optimizer(config)
        self.optimizer = own_optimizer or named_optimizer("adamw", self.model, config)
        for k, group in enumerate(self.optimizer.param_groups):
            group.setdefault("name", f"group_{k}")
        self.peak_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.controller = None
        if compressed:
            self.controller = RankController(self.model, config.early, config.late, multiple=config.rank_multiple)
            self.controller.attach(self.optimizer)
        self.step = TrainStep(
            self.model,
            task.loss,
            self.optimizer,
            controller=self.controller,
            clip=config.clip,
            precision=config.precision,
            average=(lambda flat: accelerator.reduce(flat, "mean")) if self.world > 1 else None,
            mode=config.mode,
        )
        self.method = task.method or ("comera" if compressed else "dense")
        about = {"recipe": task.name, "method": self.method, "processes": self.world, "steps_per_epoch": self.epoch}
        if own_optimizer is not None:
            about["optimizer"] = type(self.optimizer).__name__
        self.identity = {**config.identity(), **about, **task.identity}

        self.progress = self._take_up(start_from)
        self.told_mode = (self.progress.mode, 0)
        self.late = self.progress.step > 0 and self._is_late()  # as far as told
        self.clock = Clock(self.device, self.progress.time)
        self.pending: list[tuple[int, Tensor, Tensor]] = []  # step, loss, gradient norm: not yet seen by the host
        self.seen = (0.0, 0.0)
        self.checked_at = self.progress.time
        self.durations: list[float] = []
        state = (self.model, self.optimizer, self.controller, self.progress)
        journal = Journal(task, config, out, *state, method=self.method, resolved=resolved, main=self.main)
        self.journal = stack.enter_context(journal)
        self.interrupt = stack.enter_context(Interrupt())

    def _take_up(self, start_from: Path | str | None) -> Progress:
        """Load the last checkpoint, or what another run has left, or nothing; returns the progress to go on from."""
        if self.main:
            clean(self.out)
        self.accelerator.wait_for_everyone()
        state = (self.model, self.optimizer, self.controller)
        if found := checkpoints(self.out):
            rank = self.accelerator.process_index
            progress = load_checkpoint(found[-1], *state, identity=self.identity, process=rank)
            if progress.stopped == "interrupted":
                progress.stopped = None
            return progress
        progress = Progress()
        if start_from is not None:
            step = take_over(Path(start_from), *state).step
            size = model_size(self.model)
            progress.start_from = {"step": step, "parameters": size.total, "tensorized": size.tensorized}
        if self.controller and self.config.late.target_size is not None:
            self._prepare_late_stage(self.controller, start_from)
        return progress

    def _prepare_late_stage(self, controller: RankController, start_from: Path | str | None) -> None:
        """At the start of a run: begin a late stage that nothing else begins, if there has been an early one."""
        late = self.config.late
        target = f"train.late.target_size is {late.target_size!r}"
        if controller.stage == "late":
            raise ConfigError(
                f"{target}, but the run in {start_from} is in its late stage already, towards "
                f"{controller.target_size:,} numbers: leave the target out to go on towards those, or start from a "
                "run in its early stage"
            )
        if not late.starts:
            if start_from is None:
                raise ConfigError(
                    f"{target}, but nothing starts the late stage: set train.late.start_step, start_epoch or plateau, "
                    "or start from a run that has been through its early stage"
                )
            controller.start_late()

    def train(self) -> Summary:
        """Step until a bound, and at the steps that are due for it log, prune, evaluate and save."""
        progress, config = self.progress, self.config
        eval_every = config.eval_steps(self.epoch)
        if progress.step == 0:
            self.journal.log_size()
            self._tell_stage()
        self.model.train()
        self.clock.start()
        while progress.stopped is None:
            self._take_step()
            ends = progress.stopped is not None
            complete = ends and progress.stopped != "interrupted"
            epoch_ends = self._due(self.epoch or 0)
            prunes = self._due(config.prune_every) or (complete and config.prune_at_end)
            evaluates = self._due(eval_every) or complete
            saves = self._due(config.save_every) or ends
            logs = self._due(config.log_every) or ends
            if epoch_ends or logs or prunes or evaluates or saves or self.device.type == "cpu":
                self._check()
            if epoch_ends and self.controller:
                self.controller.epoch_ended()
            self._tell_stage()
            if logs:
                self.journal.log_train(*self.seen, self._peak_memory(), self._done())
            if prunes or evaluates or saves:
                with self.clock.paused():
                    if prunes:
                        self._prune()
                    if complete:
                        self._meet_target()
                    if evaluates and self._evaluate(complete):
                        saves = True  # a new best one
                    if saves:
                        self._save()
        return self._finish()

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _done(self, ahead: float = 0.0) -> float:
        """The part of the run that is done; `ahead`: steps to count in addition."""
        seconds = self.config.max_seconds
        by_steps = (self.progress.step + ahead) / self.bound if self.bound else 0.0
        return min(1.0, max(by_steps, self.progress.time / seconds if seconds else 0.0))

    def _take_step(self) -> None:
        progress, config = self.progress, self.config
        # The middle of the step: neither the first nor the last one is lost to a rate of zero.
        multiplier = lr_multiplier(
            self._done(ahead=0.5), warmup=config.warmup, schedule=config.schedule, final=config.final_lr
        )
        self.step.set_rates([peak * multiplier for peak in self.peak_rates])
        rank = self.accelerator.process_index
        batches = [
            self.task.train_batch(progress.step, micro, rank, self.world) for micro in range(config.accumulation)
        ]
        tokens = sum(map(self.task.tokens, batches))
        counts = (self.task.examples(batch) for batch in batches)
        examples = sum(config.batch_size if count is None else count for count in counts)
        result = self.step([send_to_device(batch, self.device, non_blocking=True) for batch in batches])
        progress.step += 1
        self._tell_mode()
        self.task.after_step(progress.step)
        self.pending.append((progress.step, result.loss, result.grad_norm))
        progress.time, tokens, examples, interrupted = self._agree(
            self.clock.seconds, tokens, examples, self.interrupt.seen
        )
        progress.tokens += tokens
        progress.examples += examples
        if self.bound and progress.step >= self.bound:
            progress.stopped = "steps"
        elif config.max_seconds and progress.time >= config.max_seconds:
            progress.stopped = "time"
        elif interrupted:
            progress.stopped = "interrupted"

    def _agree(self, seconds: float, tokens: int, examples: int, interrupted: bool) -> tuple[float, int, int, bool]:
        """Longest time, all tokens and examples, any interruption: the processes must take the same decisions."""
        if self.world == 1:
            return seconds, tokens, examples, interrupted
        mine = torch.tensor([[seconds, tokens, examples, interrupted]], dtype=torch.float64, device=self.device)
        times, all_tokens, all_examples, any_interrupted = self.accelerator.gather(mine).T.tolist()
        return max(times), int(sum(all_tokens)), int(sum(all_examples)), any(any_interrupted)

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

    def _peak_memory(self) -> int:
        """Peak bytes since this was last called; `progress` keeps that of the whole run."""
        peak = self.memory.peak
        self.progress.peak_memory = max(self.progress.peak_memory, peak)
        self.memory = MemoryMeter.start(self.device)
        return peak

    def _is_late(self) -> bool:
        return self.controller is not None and self.controller.stage == "late"

    def _tell_stage(self) -> None:
        """Record the late stage, once, when it has begun."""
        if self.controller and not self.late and self._is_late():
            self.late = True
            self.journal.log_stage(self.controller)

    def _tell_mode(self) -> None:
        """Record how steps run, where that is news."""
        now = (self.step.mode, self.step.built)
        if now != self.told_mode:
            self.told_mode = now
            self.journal.log_mode(*now)

    def _prune(self) -> None:
        report = self.controller.prune_() if self.controller else None
        if report and report.changed:
            self.journal.log_prune(report)

    def _meet_target(self) -> None:
        """Bring a run that is complete to its target size, in the late stage; without one, nothing."""
        if self.controller is None:
            return
        if self._is_late():
            self._prune()
        report = self.controller.meet_target_()
        if report:
            self.journal.log_round(report)
        elif self.config.late.target_size is not None and not self.late:
            self.journal.say(
                "the late stage never began, so the model was not brought to its target size: start it earlier "
                "(train.late) or train longer"
            )

    def _evaluate(self, complete: bool) -> bool:
        """Take the means over the held-out data; whether their loss is a new best."""
        progress, config = self.progress, self.config
        batches, precision = config.eval_batches, config.precision
        means = evaluate(self.task, self.model, self.accelerator, batches=batches, precision=precision)
        loss = means.pop("loss")
        if not isfinite(loss):
            raise self._failure(f"held-out loss {loss}", progress.step)
        best = progress.best_held_out_loss is None or loss < progress.best_held_out_loss
        progress.held_out_loss, progress.held_out_step, progress.metrics = loss, progress.step, means
        if best:
            progress.best_held_out_loss = loss
        self.journal.log_eval(best)
        if self.controller and not complete:  # at its very end a run begins no stage
            self.controller.evaluated(loss)
            self._tell_stage()
        return best

    def _save(self) -> None:
        """Write a checkpoint; raises TrainingError instead for a model with numbers that are not finite."""
        progress = self.progress
        if not torch.stack([p.isfinite().all() for p in self.model.parameters()]).all():
            raise self._failure("parameters that are not finite", progress.step)
        if steady := self.durations[_WARM_UP_STEPS:] or self.durations:
            progress.step_time = statistics.median(steady)
        self._peak_memory()
        rng = gather_object([rng_state()])
        if self.main:
            self.journal.sync()
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
        summary = self.journal.summary()
        if self.main:
            summary.write(self.out / "summary.json")
        self.accelerator.wait_for_everyone()
        return summary
