"""What a run holds while it trains: the pieces that `fit` builds from a task and its configuration."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.errors import ConfigError, DataError, TrainingError
from comera.fp8 import FP8Report
from comera.fusion.fuse import fuse_
from comera.memory import recompute_
from comera.memory.estimate import peak_memory, reset_peak
from comera.nn.size import model_size
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.rank.controller import RankController
from comera.trainer.checkpoint import checkpoints, clean, last_good, load_checkpoint, take_over
from comera.trainer.clock import Clock
from comera.trainer.config import TrainConfig
from comera.trainer.energy import SOURCES, EnergyMeter
from comera.trainer.optimizer import lr_multiplier, named_optimizer
from comera.trainer.step import StepResult, TrainStep, set_precision_
from comera.trainer.task import Batch, Task
from comera.trainer.trainer_json import Progress


@dataclass
class TrainState:
    """A run under way.

    Checkpoints hold model, optimizer, controller (None for a dense model) and progress.

    trains: the model's tensor trains by name.
    method: what the report calls it. identity: the values under which alone the run may be resumed. max_steps: None
    where only the clock ends the run.
    pending: step, loss and gradient norm of the steps that the host has not seen yet; last: loss and norm of the last
    one that it has; step_times: mean seconds of the steps between two such checks, the last at `checked_at`.
    fp8: which layers compute in FP8, if the precision is that. peak_memory: bytes between the last record and a pause.
    """

    task: Task
    config: TrainConfig
    out: Path
    accelerator: Accelerator
    model: nn.Module
    trains: dict[str, TensorTrain]
    optimizer: Optimizer
    controller: RankController | None
    train_step: TrainStep
    method: str
    identity: dict[str, Any]
    max_steps: int | None
    clock: Clock
    energy: EnergyMeter
    fp8: FP8Report | None = None
    progress: Progress = field(default_factory=Progress)
    checked_at: float = 0.0
    pending: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    last: tuple[float, float] = (0.0, 0.0)
    step_times: list[float] = field(default_factory=list)
    peak_memory: int = 0

    @property
    def stage(self) -> str | None:
        """Stage of the rank adaptation, "early" or "late"; None for a dense model."""
        return self.controller.stage if self.controller else None

    def fraction_done(self, ahead: float = 0.0) -> float:
        """The fraction of the run that is done; ahead: steps to count in addition."""
        by_steps = (self.progress.step + ahead) / self.max_steps if self.max_steps else 0.0
        by_time = self.progress.time / self.config.max_seconds if self.config.max_seconds else 0.0
        return min(1.0, max(by_steps, by_time))

    def set_rates(self) -> None:
        """Set the rates of the middle of the next step: so neither the first nor the last one has a rate of zero."""
        config, done = self.config, self.fraction_done(ahead=0.5)
        times = lr_multiplier(done, warmup=config.warmup, schedule=config.schedule, final=config.final_lr)
        self.train_step.set_rates([peak * times for peak in self.progress.peak_lrs])

    def weights(self, batches: Sequence[Batch]) -> Tensor | None:
        """Weights of a step's batches on the device; None if no other batch shares this step."""
        weights = [self.task.weight(batch) for batch in batches]
        if not all(0 < weight < float("inf") for weight in weights):
            raise DataError(
                f"expected training batches of a weight above 0 from {self.task.name}, got "
                f"{', '.join(map(str, weights))} at step {self.progress.step + 1:,}: drop batches without tokens"
            )
        if len(batches) == self.accelerator.num_processes == 1:
            return None
        return torch.tensor(weights, dtype=torch.float64).to(self.accelerator.device, non_blocking=True)

    def count(self, result: StepResult, tokens: int, examples: int, *, interrupted: bool) -> None:
        """Add a step to the progress, and stop the run at a bound or an interruption.

        Processes agree on the longest time, all tokens, examples and joules, and any interruption: they must decide
        alike.
        """
        progress, config, accelerator = self.progress, self.config, self.accelerator
        self.pending.append((progress.step, result.loss, result.grad_norm))
        progress.time, joules = self.clock.seconds, self.energy.take()
        if accelerator.num_processes > 1:
            own = [[progress.time, tokens, examples, interrupted, *(joules.get(source, 0.0) for source in SOURCES)]]
            gathered = accelerator.gather(torch.tensor(own, dtype=torch.float64, device=accelerator.device))
            times, all_tokens, all_examples, all_interrupted, *all_joules = gathered.T.tolist()
            progress.time, interrupted = max(times), any(all_interrupted)
            tokens, examples = int(sum(all_tokens)), int(sum(all_examples))
            joules = {source: sum(each) for source, each in zip(SOURCES, all_joules, strict=True) if any(each)}
        progress.tokens += tokens
        progress.examples += examples
        self.add_energy(joules)
        if self.max_steps and progress.step >= self.max_steps:
            progress.stopped = "steps"
        elif config.max_seconds and progress.time >= config.max_seconds:
            progress.stopped = "time"
        elif interrupted:
            progress.stopped = "interrupted"

    def add_energy(self, joules: Mapping[str, float]) -> None:
        """Add joules by source to those of the run."""
        for source, amount in joules.items():
            self.progress.energy[source] = self.progress.energy.get(source, 0.0) + amount

    def check_finite(self) -> None:
        """Bring the losses and norms since the last check to the host: the one point where a run synchronizes.

        Raises TrainingError at the first one that is not finite.
        """
        values = torch.stack([torch.stack([loss, norm.float()]) for _, loss, norm in self.pending]).tolist()
        for (step, *_), (loss, norm) in zip(self.pending, values, strict=True):
            if not (isfinite(loss) and isfinite(norm)):
                raise self.failure(f"loss {loss} with gradient norm {norm}", step)
        now = self.clock.seconds
        self.step_times.append((now - self.checked_at) / len(self.pending))
        self.checked_at = now
        self.last = tuple(values[-1])
        self.pending.clear()

    def failure(self, what: str, step: int) -> TrainingError:
        """The error for what is not finite."""
        return TrainingError(
            f"expected finite values, got {what} at step {step}; {last_good(self.out)}: start a new run with a lower "
            "lr, a longer warmup or a smaller max_grad_norm, or with precision fp32 if it was another"
        )

    def start(self) -> None:
        """Start the clock and the energy meter."""
        self.clock.start()
        self.energy.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop both inside this context, and count no memory."""
        self.peak_memory = max(self.peak_memory, peak_memory(self.accelerator.device))
        with self.clock.paused():
            self.energy.stop()
            yield
        self.energy.start()
        reset_peak(self.accelerator.device)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds in this context as a part of the run: batches, evaluation or pruning."""
        began = time.perf_counter()
        yield
        seconds = self.progress.parts
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    def take_peak_memory(self) -> int:
        """Peak bytes of training since the last call; `progress` keeps that of the whole run."""
        peak, self.peak_memory = max(self.peak_memory, peak_memory(self.accelerator.device)), 0
        self.progress.peak_memory = max(self.progress.peak_memory, peak)
        reset_peak(self.accelerator.device)
        return peak


def build_state(
    task: Task, config: TrainConfig, out: Path, accelerator: Accelerator, start_from: Path | str | None
) -> TrainState:
    """Build everything that a run needs, from its last checkpoint in `out`, from `start_from`, or anew."""
    reset_peak(accelerator.device)
    set_seed(config.seed, device_specific=True)  # each process draws its own dropout
    model, fp8 = _prepare_model(task, config, accelerator)
    own_optimizer = task.optimizer(config)
    if own_optimizer and config.optimizer != "adamw":
        raise ConfigError(
            f"train.optimizer: {task.name} has an optimizer of its own with method {task.method!r}, got "
            f"{config.optimizer!r}: leave train.optimizer out, or take the method dense, narrow or comera"
        )
    optimizer = own_optimizer or named_optimizer(model, config)
    for k, group in enumerate(optimizer.param_groups):
        group.setdefault("name", f"group_{k}")
    groups = optimizer.param_groups
    peak_lrs, decays = ([float(group.get(key, 0)) for group in groups] for key in ("lr", "weight_decay"))
    controller, trains = None, dict(named_trains(model))
    if trains:
        controller = RankController(model, config.early, config.late, multiple=config.rank_multiple)
        controller.attach(optimizer)
    train_step = TrainStep(
        model,
        task.loss,
        optimizer,
        controller=controller,
        max_grad_norm=config.max_grad_norm,
        precision=config.precision,
        average=(lambda flat: accelerator.reduce(flat, "mean")) if accelerator.num_processes > 1 else None,
        mode=config.mode,
    )
    identity = run_identity(task, config, accelerator, own_optimizer)
    state = TrainState(
        task,
        config,
        out,
        accelerator,
        model,
        trains,
        optimizer,
        controller,
        train_step,
        method=identity["method"],
        identity=identity,
        max_steps=config.bound(task.steps_per_epoch),
        clock=Clock(accelerator.device),
        energy=EnergyMeter(config.energy, accelerator.device, reads_cpu=accelerator.is_local_main_process),
        fp8=fp8,
        progress=Progress(peak_lrs=peak_lrs, weight_decays=decays),
    )
    _resume(state, start_from)
    return state


def run_identity(
    task: Task, config: TrainConfig, accelerator: Accelerator, own_optimizer: Optimizer | None
) -> dict[str, Any]:
    """What decides what a run learns, JSON-ready: it resumes only with the same. own_optimizer: that of the task."""
    return {
        **config.identity(),
        **{"recipe": task.name, "method": task.method or ("comera" if any(named_trains(task.model)) else "dense")},
        **{"processes": accelerator.num_processes, "steps_per_epoch": task.steps_per_epoch},
        **({"optimizer": type(own_optimizer).__name__} if own_optimizer else {}),
        **task.identity,
    }


def _prepare_model(task: Task, config: TrainConfig, accelerator: Accelerator) -> tuple[nn.Module, FP8Report | None]:
    """The task's model on its device, the same one in all processes, in FP8, fused and recomputing as configured."""
    model = task.model.to(accelerator.device)
    if accelerator.num_processes > 1:
        broadcast([tensor.detach() for tensor in [*model.parameters(), *model.buffers()]])
    return model, adapt_(model, config, keep_logits=task.keep_logits)


def adapt_(model: nn.Module, config: TrainConfig, *, keep_logits: bool = True) -> FP8Report | None:
    """Let a model compute in FP8, fuse it and let it recompute, as configured. keep_logits: as for `fuse_`."""
    fp8 = set_precision_(model, config.precision)
    if config.fuse:
        fuse_(model, keep_logits=keep_logits)
    if config.recompute:
        recompute_(model)
    return fp8


def _resume(state: TrainState, start_from: Path | str | None) -> None:
    """Continue from the last checkpoint in the run's folder, or from what another run left, or from nothing."""
    config, accelerator, controller = state.config, state.accelerator, state.controller
    loaded = (state.model, state.optimizer, controller)
    if accelerator.is_main_process:
        clean(state.out)
    accelerator.wait_for_everyone()
    if found := checkpoints(state.out):
        process = accelerator.process_index
        began = state.progress
        how: Any = {"identity": state.identity, "process": process, "one_sequence": state.task.one_sequence}
        state.progress = load_checkpoint(found[-1], *loaded, **how)
        state.progress.peak_lrs = state.progress.peak_lrs or began.peak_lrs
        state.progress.weight_decays = state.progress.weight_decays or began.weight_decays
        for group, decay in zip(state.optimizer.param_groups, state.progress.weight_decays, strict=True):
            group["weight_decay"] = decay
        if state.progress.stopped == "interrupted":
            state.progress.stopped = None
        state.checked_at = state.progress.time
        state.clock = Clock(accelerator.device, state.progress.time)
        return
    if start_from is not None:
        step, size = take_over(Path(start_from), *loaded).step, model_size(state.model)
        state.progress.start_from = {"step": step, "parameters": size.total, "tensorized": size.tensorized}
    if controller and config.late.target_size is not None:
        _check_late_stage(config, start_from)
        if not config.late.starts:
            controller.start_late()


def _check_late_stage(config: TrainConfig, start_from: Path | str | None) -> None:
    """Raise ConfigError where nothing will start the late stage of a new run."""
    if not config.late.starts and start_from is None:
        raise ConfigError(
            f"train.late.target_size is {config.late.target_size!r}, but nothing starts the late stage: set "
            "train.late.start_step, start_epoch or plateau, or start from a run that has finished its early stage"
        )
