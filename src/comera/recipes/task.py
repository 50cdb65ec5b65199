"""What the recipes share: tasks with a sequence of batches and all that decides what a run learns, and estimates."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comera.baselines import COMMON_METHODS, Applied, Conversion, Method, installed
from comera.files import replace_file, typed_path
from comera.memory.estimate import MemoryEstimate
from comera.memory.estimate import estimate as estimate_step
from comera.pretrained import load_pretrained
from comera.recipes.stages import log
from comera.trainer.checkpoint import find_checkpoint
from comera.trainer.config import TrainConfig
from comera.trainer.display import figure
from comera.trainer.evaluation import evaluate
from comera.trainer.metrics import to_json
from comera.trainer.processes import open_accelerator
from comera.trainer.state import adapt_
from comera.trainer.step import set_precision_
from comera.trainer.task import Batch, Task


class RecipeTask(Task):
    """A task for `comera.trainer.loop.fit`, from a recipe's configuration, its prepared data and its model. config:
    with the fields `method`, `train`, `model`, `compress`. report: of the model's conversion. first: steps that earlier
    runs trained. Keyword arguments: further entries of the identity, by dotted name."""

    def __init__(
        self, config: Any, data: Any, model: nn.Module, report: Conversion, first: int = 0, **identity: Any
    ) -> None:
        self.config, self.data, self.first = config, data, first
        self.method: str = config.method
        self.model = model
        set_from_conversion(self, report)
        self.identity = {"data.prepared": data.folder.name, **identity}
        for group in ("model", "compress"):
            self.identity |= {f"{group}.{name}": value for name, value in asdict(getattr(config, group)).items()}

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


def set_from_conversion(task: Any, report: Conversion) -> None:
    """Set the members of a task that its method decides: rows of the layer table, parameters of the dense model, and
    for a baseline its optimizer and what it does after a step. report: of the conversion."""
    task.report_rows = [row.to_dict() for row in report.rows] if report else []
    task.dense_total = report.dense_total if report else None
    if isinstance(report, Applied):
        task.optimizer, task.after_step = report.optimizer, report.after_step


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
    metrics = ", ".join(f"{name} {figure(mean)}" for name, mean in means.items())
    log(accelerator.is_main_process, task.name, f"test: {metrics}")
    accelerator.wait_for_everyone()


def runs_folder(out: str | None, recipe: str, method: str) -> Path:
    """The folder of a recipe's runs: `out`, by default runs/RECIPE-METHOD."""
    return typed_path(f"runs/{recipe}-{method}" if out is None else out, "out")


def estimates_by_method(
    build: Callable[[Method], tuple[nn.Module, Conversion, Callable[[], Tensor]]],
    train: TrainConfig,
    methods: Sequence[Method] = COMMON_METHODS,
    *,
    keep_logits: bool = True,
) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step for every installed method. build: makes a method's model, the report of its
    conversion, and a closure that returns the loss; it is called on the meta device. train: how the model is fused.
    methods: those of the recipe. keep_logits: as the task has it."""
    estimates: dict[str, MemoryEstimate] = {}
    for method in filter(installed, methods):
        with torch.device("meta"):
            model, report, loss = build(method)
            plain = replace(train, recompute=False, precision="fp32")  # without what only compressed models can
            own = train if method == "comera" else plain
            adapt_(model.train(), own, keep_logits=keep_logits)
            estimate = (
                report.estimate(model, loss)
                if isinstance(report, Applied)
                else estimate_step(model, loss, device=train.device)
            )
        estimates[method] = estimate
    return estimates
