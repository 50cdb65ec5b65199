"""What the recipes share: tasks with a sequence of batches, the method narrow, estimates, and runs, a single one or
several stages one after the other.

    comera  out/early          early stage of `train.epochs`
            out/late-0.8, ...  one late stage per target, each starting from the end of the early stage
    dense   out                dense baseline: as long as the early stage and one late stage together
    others  out                other baselines, as long as the dense one

Batches depend on the seed and on their place in one sequence, in which each late stage continues after the early one:
the dense baseline sees exactly the batches of the early stage and of a late one.
If late stages follow, the early stage holds its learning rates after the warm-up, and they decay in each late stage:
pruned ranks recover at full rates only, and rates that have decayed twice waste the steps in between (docs/log.md)."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comera.baselines import (
    Applied,
    BaselineConfig,
    Conversion,
    Method,
    Narrow,
    installed,
    widest,
)
from comera.errors import ConfigError
from comera.files import replace_file
from comera.memory.estimate import MemoryEstimate, count_flops
from comera.memory.estimate import estimate as estimate_step
from comera.pretrained import load_pretrained
from comera.recipes.config import StagedConfig
from comera.trainer.checkpoint import find_checkpoint
from comera.trainer.config import TrainConfig
from comera.trainer.display import figure
from comera.trainer.evaluation import evaluate
from comera.trainer.lock import hold
from comera.trainer.loop import fit
from comera.trainer.metrics import Summary, to_json
from comera.trainer.processes import open_accelerator
from comera.trainer.state import adapt_
from comera.trainer.step import set_precision_
from comera.trainer.task import Batch, Task

Step = tuple[nn.Module, Conversion, Callable[[], Tensor]]
"""Of a method, to count and estimate on the meta device: its model, the report of the conversion, the step's loss."""


def is_main(train: TrainConfig) -> bool:
    """Whether this process is the one that writes and logs."""
    return bool(open_accelerator(train.device).is_main_process)


def log(config: Any, *lines: str) -> None:
    """Print lines about a recipe's progress to stderr, from the main process only."""
    if is_main(config.train):
        for line in lines:
            print(f"{config.name}: {line}", file=sys.stderr)


# --- the method narrow, and those that add to it: a dense model with so few channels that a step costs no more than a
# compressed one's; the sizes in `config.model` have `narrowed(hidden)` -----------------------------------------------


def _narrow(config: Any) -> Narrow | None:
    """The settings of the method, if it is narrow or adds to it."""
    own = getattr(config.baselines, config.method, None) if hasattr(config, "baselines") else None
    return own if isinstance(own, Narrow) else None


def step_flops(config: Any, meta_step: Callable[..., Step], *sizes: Any) -> int:
    """FLOPs of a training step, forward and backward, counted on the meta device."""
    with torch.device("meta"):
        model, _, loss = meta_step(config, *sizes)
        return count_flops(model, loss)


def sizes_of(config: Any, meta_step: Callable[..., Step], *sizes: Any) -> Any:
    """The sizes of the model that is trained: those of `config.model`, for narrow of fewer channels: as set by hand, or
    as many as cost no more than the compressed model on the same batch. sizes: further arguments of `meta_step`."""
    own = _narrow(config)
    if own is None:
        return config.model

    def dense(width: int) -> float:
        return step_flops(replace(config, method="dense", model=config.model.narrowed(width)), meta_step, *sizes)

    hidden = own.hidden or widest(step_flops(replace(config, method="comera"), meta_step, *sizes), dense)
    return config.model.narrowed(hidden)


def as_begun(config: Any, identity: Mapping[str, Any]) -> Any:
    """`config`, for narrow with the width that was chosen when the run started."""
    own = _narrow(config)
    if own is None:
        return config
    as_it_was = replace(own, hidden=identity[f"baselines.{config.method}.hidden"])
    return replace(config, baselines=replace(config.baselines, **{config.method: as_it_was}))


# --- tasks ----------------------------------------------------------------------------------------------------------


def set_from_conversion(task: Any, report: Conversion) -> None:
    """Set the members of a task that its method decides: rows of the layer table, parameters of the dense model, and
    for a baseline its optimizer and what it does after a step. report: of the conversion."""
    task.report_rows = [row.to_dict() for row in report.rows] if report else []
    task.dense_total = report.dense_total if report else None
    if isinstance(report, Applied):
        task.optimizer, task.after_step = report.optimizer, report.after_step


class RecipeTask(Task):
    """A task for `comera.trainer.loop.fit`, from a recipe's configuration, its prepared data, if it has any, and what
    makes a configuration's model. first: steps that earlier runs trained. groups: parts of the configuration that
    decide what is learned. identity: further entries of the run's, by dotted name."""

    one_sequence = True

    def __init__(
        self,
        config: Any,
        data: Any,
        build: Callable[[Any], tuple[nn.Module, Conversion]],
        first: int = 0,
        *,
        groups: Sequence[str] = ("model", "compress"),
        identity: Mapping[str, Any],
    ) -> None:
        self.config, self.data, self.first = config, data, first
        self.name, self.method = config.name, config.method
        self.model, report = build(config)
        set_from_conversion(self, report)
        self.identity = {"data.prepared": data.folder.name} if data else {}
        self.identity |= identity
        if isinstance(getattr(config, "baselines", None), BaselineConfig):
            self.identity |= config.baselines.identity(config.method)
        for group in groups:
            self.identity |= {f"{group}.{name}": value for name, value in asdict(getattr(config, group)).items()}
        if _narrow(config):
            with torch.device("meta"):
                whole, _ = build(replace(config, method="dense"))
            self.dense_total = sum(p.numel() for p in whole.parameters())
            self.identity[f"baselines.{config.method}.hidden"] = self.width()  # under which alone a run resumes

    def width(self) -> int:
        """Width of the model, in channels."""
        return int(self.model.config.hidden_size)  # type: ignore[union-attr, arg-type]

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Batch:
        """The next batch of a single sequence that all micro-batches, processes and successive runs share."""
        train = self.config.train
        index = ((self.first + step) * train.accumulation + micro) * world + rank
        return self.data.train_batch(index, train.batch_size, train.seed)

    def epoch_length(self) -> int:
        """Steps per epoch over all processes."""
        train = self.config.train
        batches = train.accumulation * open_accelerator(train.device).num_processes
        return int(self.data.steps_per_epoch(train.batch_size, batches))

    def examples(self, batch: Batch) -> int:
        """Rows of the first tensor of a batch."""
        return len(batch[0])

    def finish(self, folder: Path, summary: Summary) -> None:
        """What remains to be done in the folder of a run that has ended; called again where it is resumed."""

    def about(self) -> list[str]:
        """What became of the model, in lines to print."""
        if _narrow(self.config) is None:
            return []
        return [f"{self.method}: dense and {self.width()} wide instead of {self.config.model.hidden}"]


def evaluate_last(task: RecipeTask, folder: Path) -> dict[str, float]:
    """The means of a finished run's last model over `task.eval_batches`; the task's model becomes that one."""
    accelerator = open_accelerator(task.config.train.device)
    model = task.model.to(accelerator.device)
    set_precision_(model, task.config.train.precision)
    load_pretrained(model, find_checkpoint(folder))  # if an earlier call finished the run, `task` is untrained
    return evaluate(task, model, accelerator, precision=task.config.train.precision)


def write_test(task: RecipeTask, folder: Path) -> None:
    """Evaluate a finished run's last model on the test data, which `task.eval_batches` has, and write test.json."""
    accelerator, means = open_accelerator(task.config.train.device), evaluate_last(task, folder)
    if accelerator.is_main_process:
        replace_file(folder / "test.json", to_json(means, indent=1) + "\n")
    log(task.config, "test: " + ", ".join(f"{name} {figure(mean)}" for name, mean in means.items()))
    accelerator.wait_for_everyone()


def estimates_by_method(
    config: Any,
    meta_step: Callable[..., Step],
    *sizes: Any,
    methods: Sequence[Method] = (),
    keep_logits: bool = True,
) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step for every installed method, on the meta device: nothing is allocated or
    computed. sizes: further arguments of `meta_step`. methods: default: all of the recipe. keep_logits: as the task
    has it."""
    estimates: dict[str, MemoryEstimate] = {}
    train = config.train
    for method in filter(installed, methods or config.methods):
        with torch.device("meta"):
            model, report, loss = meta_step(replace(config, method=method), *sizes)
            plain = replace(train, recompute=False, precision="fp32")  # without what only compressed models can
            own = train if method == "comera" else plain
            adapt_(model.train(), own, keep_logits=keep_logits)
            if isinstance(report, Applied):
                estimates[method] = report.estimate(model, loss)
            else:
                estimates[method] = estimate_step(model, loss, optimizer=train.optimizer, device=train.device)
    return estimates


# --- runs -----------------------------------------------------------------------------------------------------------


def runs(config: Any) -> dict[str, Path]:
    """Run folders by name, in order: "early", "late 0.8", ...; for other methods than comera, and recipes without
    stages, the only run, by its method."""
    if config.method != "comera" or not isinstance(config, StagedConfig):
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


def _resolved(config: Any) -> dict[str, Any]:
    """All fields of a recipe's configuration, with the actual folder of its runs."""
    return asdict(replace(config, out=str(config.folder)))


def fit_one(task: RecipeTask, *, resume: bool, lines: Iterable[str] = ()) -> Summary:
    """Train the only run of a recipe into its folder; raises what `fit` raises. lines: to print before."""
    config = task.config
    log(config, *lines, *task.about())
    return fit(task, config.train, config.folder, resume=resume, resolved=_resolved(config))


def fit_stages(config: Any, make_task: Callable[[int], RecipeTask], *, resume: bool) -> Summary:
    """Train the runs of `config`; returns the summary of the last run that was started. make_task: makes the task of a
    run, from the number of steps that other runs trained before it. resume: keep finished runs and continue an
    interrupted one. An interruption ends the current run and skips the rest. Raises what `fit` raises."""
    folders, settings = runs(config), _resolved(config)
    task = make_task(0)  # before anything is written: it may fail

    def run(task: RecipeTask, train: TrainConfig, folder: Path, **others: Any) -> Summary:
        summary = fit(task, train, folder, resume=resume, resolved=settings, whole=config.folder, **others)
        task.finish(folder, summary)
        return summary

    if config.method != "comera":
        return run(task, _dense(config, task.steps_per_epoch), config.folder)
    with hold(config.folder, open_accelerator(config.train.device)):
        log(config, f"early stage, in {folders['early']}")
        train = replace(config.train, schedule="constant") if config.late_targets else config.train
        summary = run(task, train, folders["early"])
        first = summary.steps
        for target in config.late_targets:
            if not summary.finished:
                break
            folder = folders[f"late {target:g}"]
            log(config, f"late stage to {target:g} of the size, in {folder}")
            task = make_task(first)
            summary = run(task, _late(config, target, task.steps_per_epoch), folder, start_from=folders["early"])
        return summary


def _late(config: Any, target: float, epoch: int | None) -> TrainConfig:
    """Settings of a late stage; epoch: steps per epoch."""
    train: TrainConfig = replace(config.train, epochs=config.late_epochs)
    half = (train.bound(epoch) or 0) // 2  # the size shrinks during the first half
    steps = half if train.late.steps is None else train.late.steps
    return replace(train, late=replace(train.late, target_size=target, steps=steps))


def _dense(config: Any, epoch: int | None) -> TrainConfig:
    """Settings of a baseline: in steps, so that it sees exactly what the early stage and a late one see together."""
    train: TrainConfig = config.train
    early, late = train.bound(epoch), replace(train, epochs=config.late_epochs).bound(epoch)
    if early is None or late is None or not config.late_targets:
        return train
    return replace(train, steps=early + late, epochs=None)
