"""fit(): trains a task into a run folder, on a CPU, one GPU or several processes, with Hugging Face Accelerate.

What a run learns follows from its configuration alone: the batch of a step is a pure function of its number. So a run
that was killed resumes from its last checkpoint with the same losses, to the bit on a CPU. (A bound in seconds lets the
clock steer the learning rates, so two runs under one differ.)

A run's clock counts training: batches, steps and logging, but not evaluation, pruning or saving.
"""

import statistics
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device

from comera.errors import CheckpointError, ConfigError
from comera.files import NO_ROOM
from comera.kernels import float32_products
from comera.trainer.checkpoint import check_resumed, clean, not_written, save_checkpoint
from comera.trainer.clock import Interrupt
from comera.trainer.config import TrainConfig
from comera.trainer.evaluation import evaluate
from comera.trainer.lock import hold
from comera.trainer.metrics import Summary
from comera.trainer.processes import open_accelerator
from comera.trainer.random_state import rng_state
from comera.trainer.run_log import RunLogger
from comera.trainer.state import TrainState, build_state, run_identity
from comera.trainer.task import Task
from comera.trainer.trackers import check_installed

# The first steps after a start are slower (memory pools, threads, plans), so no step time counts them.
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
    whole: Path | None = None,
) -> Summary:
    """Train `task.model` in place; write configuration, metrics, checkpoints and summary of the run to `out`.

    SIGINT and SIGTERM end the run after the current step, with a checkpoint to resume from. With a late stage, a run
    that reaches its bound ends with a model of the target size or below.

    Args:
        task: the model, its batches and its loss.
        config: how to train.
        out: the run folder.
        resume: continue from the last checkpoint in `out`, or start anew if there is none. A finished run returns its
            summary.
        resolved: the whole configuration for config.yaml, from which the run can be repeated. Default: `config` under
            "train".
        whole: folder of the runs that this is one of, which gets the same config.yaml.
        start_from: folder of another run of this model, or of one of its checkpoints, to start from: the run takes
            over its model with the ranks, optimizer and rank adaptation, and counts its own steps from 0. A late stage
            without a start of its own then begins at once. Resuming does not need this folder again.

    Raises:
        ConfigError: `out` holds a run and `resume` is not set, or a run with another configuration; another process
            trains in `out`, or it cannot be a folder; a late stage that nothing starts;
            processes that were started together but are not connected; a tracker that cannot start.
        MissingPackageError: a tracker whose package is not installed.
        DataError: a batch without weight.
        CheckpointError: a run that cannot be read or taken over.
        RankError: an impossible target size.
        TrainingError: a loss or gradient that is not finite, or a full disk; the last good checkpoint stays.

    Example:
        >>> import torch
        >>> from comera.trainer import Task, TrainConfig, fit
        >>> class Sum(Task):
        ...     name = "sum"
        ...     def __init__(self):
        ...         self.model = torch.nn.Linear(4, 1)
        ...     def train_batch(self, step, micro, rank, world):
        ...         return torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        ...     def eval_batches(self):
        ...         return [torch.ones(1, 4)]
        ...     def loss(self, model, batch):
        ...         return (model(batch)[:, 0] - batch.sum(1)).square().mean()
        ...     def tokens(self, batch):
        ...         return len(batch)
        >>> config = TrainConfig(steps=30, lr=0.1, progress=False, device="cpu")
        >>> summary = fit(Sum(), config, "runs/sum")
        >>> summary.stopped, summary.method
        ('steps', 'dense')
        >>> fit(Sum(), config, "runs/sum", resume=True) == summary  # finished already
        True
    """
    out = Path(out)
    check_installed(config.trackers)
    accelerator = open_accelerator(config.device)
    with hold(out, accelerator):
        try:
            return _fit(
                task, config, out, accelerator, resume=resume, resolved=resolved, start_from=start_from, whole=whole
            )
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise not_written("the records of the run", out, error) from error


def _fit(
    task: Task,
    config: TrainConfig,
    out: Path,
    accelerator: Accelerator,
    *,
    resume: bool,
    resolved: Mapping[str, Any] | None,
    start_from: Path | str | None,
    whole: Path | None,
) -> Summary:
    """`fit` in a folder that no other run writes to."""
    present = [name for name in _RUN_FILES if (out / name).exists()]
    if present and not resume:
        raise ConfigError(
            f"expected a folder without a run, got {out} with {', '.join(present)}: "
            "resume that run, give another folder, or move this one away"
        )
    done = Summary.read(out / "summary.json")
    if done is not None and done.finished:
        identity = run_identity(task, config, accelerator, task.optimizer(config))
        check_resumed(out, identity, one_sequence=task.one_sequence)
        if config.progress and accelerator.is_main_process:
            print(f"{task.name}: the run in {out} is finished, {done.steps:,} steps ({done.stopped})", file=sys.stderr)
        return done
    accelerator.wait_for_everyone()  # no process writes before all have looked
    with ExitStack() as stack:
        if config.threads is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(config.threads)
        stack.enter_context(float32_products.fastest(accelerator.device))
        state = build_state(task, config, out, accelerator, start_from)
        logger = stack.enter_context(RunLogger(state, resolved=resolved, whole=whole))
        interrupt = stack.enter_context(Interrupt())
        return _train(state, logger, interrupt)


def _train(state: TrainState, logger: RunLogger, interrupt: Interrupt) -> Summary:
    """The training loop: batch, step, log, prune, evaluate, save."""
    task, config, progress, controller = state.task, state.config, state.progress, state.controller
    device, rank, world = state.accelerator.device, state.accelerator.process_index, state.accelerator.num_processes
    eval_every = config.eval_steps(task.steps_per_epoch)

    def due(every: int) -> bool:
        return every > 0 and progress.step % every == 0

    state.model.train()
    state.start()
    while progress.stopped is None:
        state.set_rates()
        with state.part("batches"):
            batches = [task.train_batch(progress.step, micro, rank, world) for micro in range(config.accumulation)]
        tokens, counts = sum(map(task.tokens, batches)), map(task.examples, batches)
        examples = sum(config.batch_size if count is None else count for count in counts)
        inputs = [send_to_device(batch, device, non_blocking=True) for batch in batches]
        result = state.train_step(inputs, state.weights(batches))
        progress.step += 1
        task.after_step(progress.step)
        state.count(result, tokens, examples, interrupted=interrupt.seen)

        ends = progress.stopped is not None
        completes = ends and progress.stopped != "interrupted"
        epoch_ends = due(task.steps_per_epoch or 0)
        prunes = due(config.prune_every) or (completes and config.prune_at_end)
        evaluates = due(eval_every) or completes
        saves = due(config.save_every) or ends
        logs = due(config.log_every) or ends

        if epoch_ends or logs or prunes or evaluates or saves or device.type == "cpu":
            state.check_finite()
        if epoch_ends and controller:
            controller.epoch_ended()
        done, peak = state.fraction_done(), state.take_peak_memory() if logs else 0
        logger.log_mode(state.train_step.mode, state.train_step.built)
        logger.log_stage()
        if logs:
            logger.log_train(*state.last, peak, done)
        if not (prunes or evaluates or saves):
            continue
        with state.paused():
            if prunes or completes:
                with state.part("pruning"):
                    if prunes:
                        _prune(state, logger)
                    if completes:
                        _meet_target(state, logger)
            if evaluates:
                with state.part("evaluation"):
                    is_best = _evaluate(state, logger, last=completes)
                saves = saves or is_best
            if saves:
                _save(state, logger)
    summary = logger.summary()
    if state.accelerator.is_main_process:
        summary.write(state.out / "summary.json")
    state.accelerator.wait_for_everyone()
    return summary


def _prune(state: TrainState, logger: RunLogger) -> None:
    report = state.controller.prune_() if state.controller else None
    if report and report.changed:
        logger.log_prune(report)


def _meet_target(state: TrainState, logger: RunLogger) -> None:
    """Bring a complete run to its target size."""
    if state.controller is None or (state.stage == "early" and state.config.late.target_size is None):
        return
    _prune(state, logger)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = state.controller.meet_target_()
    for each in said:
        logger.announce(str(each.message))
    if report.action == "rounded":
        logger.log_round(report)


def _evaluate(state: TrainState, logger: RunLogger, *, last: bool) -> bool:
    """Evaluate on the held-out data; returns whether the loss is the lowest so far. last: of a complete run."""
    progress, config = state.progress, state.config
    batches, precision = config.eval_batches, config.precision
    means = evaluate(state.task, state.model, state.accelerator, batches=batches, precision=precision)
    loss = means.pop("loss")
    if not isfinite(loss):
        raise state.failure(f"held-out loss {loss}", progress.step)
    is_best = progress.best_held_out_loss is None or loss < progress.best_held_out_loss
    progress.held_out_loss, progress.held_out_step, progress.metrics = loss, progress.step, means
    if is_best:
        progress.best_held_out_loss = loss
    logger.log_eval(is_best)
    if state.controller and not last:  # no stage begins at the very end of a run
        state.controller.evaluated(loss)
        logger.log_stage()
    return is_best


def _save(state: TrainState, logger: RunLogger) -> None:
    """Write a checkpoint; raises TrainingError instead if a parameter is not finite."""
    progress = state.progress
    if not torch.stack([p.isfinite().all() for p in state.model.parameters()]).all():
        raise state.failure("parameters that are not finite", progress.step)
    if steady := state.step_times[_WARM_UP_STEPS:] or state.step_times:
        progress.step_time = statistics.median(steady)
    rng, joules = zip(*gather_object([(rng_state(), state.energy.take())]), strict=True)
    for each in joules:
        state.add_energy(each)
    if state.accelerator.is_main_process:
        logger.sync()
        saved = (state.model, state.optimizer, state.controller, progress)
        try:
            save_checkpoint(state.out, *saved, identity=state.identity, rng=rng)
        except (OSError, CheckpointError) as error:
            clean(state.out)
            raise not_written(f"the checkpoint of step {progress.step:,}", state.out, error) from error
    state.accelerator.wait_for_everyone()
