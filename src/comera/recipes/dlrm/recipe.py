"""Clicks on ads: DLRM on Criteo's log, whose large embedding tables are compressed, or not.

Its runs: see `stages`.  B batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.baselines import Method
from comera.convert import TT, TTM, TensorizeConfig, TensorizeReport, tensorize_
from comera.errors import ConfigError
from comera.files import replace_file
from comera.pretrained import load_pretrained
from comera.rank.objective import EarlyStage
from comera.recipes.dlrm.click_metrics import click_metrics
from comera.recipes.dlrm.criteo import ClickBatch, ClickData, CriteoConfig, prepare
from comera.recipes.dlrm.criteo_parse import INTEGERS
from comera.recipes.dlrm.model import DLRM, DLRMConfig
from comera.recipes.dlrm.table_budget import ORDERS, fit_tables
from comera.recipes.methods import follow
from comera.recipes.stages import check_stages, fit_stages, refuse_present, runs, say
from comera.trainer.checkpoint import find_checkpoint
from comera.trainer.config import TrainConfig
from comera.trainer.evaluation import evaluate
from comera.trainer.memory import MemoryEstimate, check_memory
from comera.trainer.memory import estimate as estimate_step
from comera.trainer.metrics import Summary, to_json
from comera.trainer.optimizer import OPTIMIZERS, OptimizerName, named_optimizer
from comera.trainer.task import Task

NAME = "dlrm"
Preset = Literal["sample", "kaggle"]
PRESETS: tuple[Preset, ...] = ("sample", "kaggle")
METHODS: tuple[Method, ...] = ("dense", "comera")
_SPARSE = ("adagrad", "sgd")  # those that take gradients with the rows of the batch alone


@dataclass(frozen=True)
class CompressConfig:
    """How the method comera compresses the model; dense does not look at it."""

    ratio: float = 8.0
    """How many times smaller all embedding tables together are to be when training begins. The budget is shared among
    the large ones in proportion to the root of their rows, and within its share a table takes the fewest cores that
    allow a rank of 8, then the largest rank. The late stage shrinks them further, by what the loss leans on."""
    min_rows: int = 10_000
    """Tables with fewer rows stay dense."""
    order: int | None = None
    """Cores of each table's tensor-train matrix, 2 to 4; left out: chosen by table."""
    mlp_rank: int = 0
    """Rank of tensor trains for the wide layers of the two MLPs; 0 leaves them dense: they are half a million numbers
    beside millions. Trains of two cores and rank 64 made a step 1.2 times faster, and what was learned in one pass over
    the sample 0.6 % worse (docs/LOG.md)."""
    mlp_order: int = 2
    """Cores of those tensor trains."""

    def __post_init__(self) -> None:
        checks = {
            "ratio": (1 < self.ratio < float("inf"), "a number above 1"),
            "min_rows": (self.min_rows >= 1, "at least 1"),
            "order": (self.order is None or self.order in ORDERS, f"one of {', '.join(map(str, ORDERS))}, or none"),
            "mlp_rank": (self.mlp_rank >= 0, "0 or a number above"),
            "mlp_order": (2 <= self.mlp_order <= 8, "from 2 to 8"),
        }
        for name, (holds, expected) in checks.items():
            if not holds:
                raise ConfigError(f"compress.{name} must be {expected}, got {getattr(self, name)!r}")

    def tensorize(self, model: DLRM) -> TensorizeConfig:
        """The conversion of this model that this describes. Raises ConfigError where the budget cannot hold."""
        dim = model.tables[0].get_parameter("weight").shape[1]
        specs = fit_tables(model.table_sizes, dim, ratio=self.ratio, min_rows=self.min_rows, order=self.order)
        formats: dict[str, TT | TTM | None] = {
            f"tables.{k}": TTM(rank=spec.ranks, row_modes=spec.row_modes, col_modes=spec.col_modes) if spec else None
            for k, spec in enumerate(specs)
        }
        if self.mlp_rank:
            train = TT(order=self.mlp_order, rank=self.mlp_rank)
            layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
            formats |= {name: train if layer.weight.numel() >= _WIDE else None for name, layer in layers}
        return TensorizeConfig(linear=None, embedding=None, overrides=formats)


_WIDE = 2**15  # numbers of a layer that is worth a tensor train

# Rates as measured on the sample (docs/LOG.md). One pass over the rows in all: in a second one the dense twin overfits.
_TRAIN = TrainConfig(
    epochs=0.5,
    batch_size=2048,
    lr=3e-3,
    core_lr=6e-3,
    rank_lr=3e-3,
    schedule="constant",
    max_grad_norm=0.0,
    early=EarlyStage(size_weight=0),
    prune_every=10,
)
_RATES: dict[Method, TrainConfig] = {"comera": _TRAIN, "dense": replace(_TRAIN, core_lr=None, rank_lr=None)}


@dataclass(frozen=True)
class DLRMTaskConfig:
    """Click prediction with DLRM on Criteo's log: will this user click on this ad."""

    method: Method = "comera"
    """comera trains the model with compressed tables, an early stage and late ones; dense trains its twin."""
    preset: Preset = "sample"
    """What to start from. sample: tables as large as the data have categories; kaggle: tables of the sizes of the full
    Kaggle data, into which categories are hashed, 200 times smaller."""
    out: str | None = None
    """Folder of the runs; left out: runs/dlrm-METHOD."""
    late_targets: tuple[float, ...] = (0.5,)
    """Sizes to reach, each as a part of the chains' size at the end of the early stage, by a late stage of its own."""
    late_epochs: float = 0.5
    """Passes over the training rows in each late stage; train.epochs are those of the early one. The size falls over
    the first half of it, unless train.late.steps says otherwise."""
    optimizer: OptimizerName = "adamw"
    """adamw; adagrad or sgd: with sparse gradients of the dense tables, so that a step touches the rows of its batch
    alone. That is what large dense tables need; small ones are as fast with dense gradients."""
    data: CriteoConfig = field(default_factory=CriteoConfig)
    """The click log, and how its categories become rows of tables."""
    model: DLRMConfig = field(default_factory=DLRMConfig)
    """Sizes of the model."""
    compress: CompressConfig = field(default_factory=CompressConfig)
    """Budget of the compressed tables."""
    train: TrainConfig = field(default_factory=lambda: _TRAIN)
    """Length of the early stage, rates, rank adaptation, outputs. Bounds in steps and seconds hold for each run.
    Where a late stage follows, the early one holds its rates after the warm-up: they fall in the late ones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "late_targets", tuple(self.late_targets))  # YAML has lists only
        if self.method not in METHODS:
            raise ConfigError(
                f"method: dlrm compares dense and comera, got {self.method!r}: the other methods compress linear "
                "layers, and nearly all of this model is embedding tables"
            )
        if self.preset not in PRESETS:
            raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        check_stages(self)

    @property
    def folder(self) -> Path:
        """The folder of all runs."""
        return Path(self.out or f"runs/{NAME}-{self.method}").expanduser()

    @property
    def sparse(self) -> bool:
        """Whether the gradients of dense tables are sparse."""
        return self.optimizer in _SPARSE


def preset(method: Method = "comera", preset: Preset = "sample") -> DLRMTaskConfig:
    """The defaults that suit a method: they differ in the learning rates."""
    config = DLRMTaskConfig(method=method, preset=preset, train=_RATES.get(method, _TRAIN))
    if preset == "kaggle":
        return replace(config, data=CriteoConfig(table_sizes="kaggle"), compress=CompressConfig(ratio=200.0))
    return config


def build_model(config: DLRMTaskConfig, table_sizes: Sequence[int]) -> tuple[DLRM, TensorizeReport | None]:
    """A DLRM, seeded by train.seed, compressed for the method comera, and the report of that.

    The dense form of compressed tables is never there: they are chosen on the meta device.
    """
    torch.manual_seed(config.train.seed)
    report = None
    if config.method == "comera":
        device = torch.get_default_device()
        with torch.device("meta"):
            model = DLRM(config.model, table_sizes, INTEGERS)
            report = tensorize_(model, config.compress.tensorize(model))
        if device.type != "meta":
            model.to_empty(device=device).reset_parameters()
    else:
        model = DLRM(config.model, table_sizes, INTEGERS)
    for table in model.tables:
        if isinstance(table, nn.EmbeddingBag):
            table.sparse = config.sparse
    return model, report


def click_loss(model: nn.Module, batch: ClickBatch) -> Tensor:
    """Mean log loss of the clicks, in nats."""
    return F.binary_cross_entropy_with_logits(model(batch.dense, batch.ids), batch.labels)


class DLRMTask(Task):
    """A run as `comera.trainer.loop.fit` wants it.

    first: steps of other runs that it goes on after. part: of the data to evaluate on.
    """

    name = NAME
    counted = "samples"

    def __init__(
        self,
        config: DLRMTaskConfig,
        data: ClickData,
        first: int = 0,
        part: Literal["validation", "test"] = "validation",
    ) -> None:
        self.config, self.data, self.first, self.part = config, data, first, part
        self.method = config.method
        train = config.train
        batches = train.accumulation * PartialState(cpu=train.device == "cpu").num_processes
        self.steps_per_epoch = data.steps_per_epoch(train.batch_size, batches)
        model, report = build_model(config, data.table_sizes)
        self.model: nn.Module = model
        follow(self, report)
        self.identity = {
            "data.prepared": data.folder.name,
            "data.shuffle": data.shuffle,
            "data.first_step": first,
            "data.table_sizes": list(data.table_sizes),
            **{f"model.{name}": value for name, value in asdict(config.model).items()},
            **{f"compress.{name}": value for name, value in asdict(config.compress).items()},
        }

    def optimizer(self, train: TrainConfig) -> Optimizer:
        """The optimizer of the configuration, one for all parameters."""
        return named_optimizer(self.config.optimizer, self.model, train)

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> ClickBatch:
        """Every micro-batch of every process is the next one of a single sequence."""
        train = self.config.train
        index = ((self.first + step) * train.accumulation + micro) * world + rank
        return self.data.train_batch(index, train.batch_size, train.seed)

    def eval_batches(self) -> Iterator[ClickBatch]:
        """The held-out rows in time order, in the size of a training batch."""
        return self.data.batches(self.part, self.config.train.batch_size)

    def loss(self, model: nn.Module, batch: ClickBatch) -> Tensor:
        """The batch's mean loss."""
        return click_loss(model, batch)

    def evaluate(self, model: nn.Module, batch: ClickBatch) -> tuple[dict[str, Tensor], int, Tensor]:
        """Loss and share of right answers, means over the batch; its rows; their scores and labels (B, 2)."""
        scores, labels = model(batch.dense, batch.ids).float(), batch.labels
        right = ((scores > 0) == (labels > 0.5)).float()
        loss = F.binary_cross_entropy_with_logits(scores, labels)
        return {"loss": loss, "accuracy": right.mean()}, len(labels), torch.stack([scores, labels], 1)

    def evaluate_rows(self, rows: Tensor) -> dict[str, float]:
        """Area under the ROC curve and normalised cross-entropy over all held-out rows."""
        return click_metrics(*rows.unbind(1))

    def examples(self, batch: ClickBatch) -> int:
        """Rows in a batch."""
        return len(batch.labels)

    def tokens(self, batch: ClickBatch) -> int:
        """What the recipe counts as its input: rows."""
        return len(batch.labels)


def run(config: DLRMTaskConfig, *, resume: bool = False) -> Summary:
    """Prepare the data and train the runs of `config`, one after the other; returns the summary of the last one.

    Each finished run leaves test.json too: what its last model comes to on the test rows.
    resume: finished runs are kept, one that was interrupted goes on. An interruption ends the run that is under way and
    leaves out the others. Raises ConfigError when there is a run already and `resume` is not set, and for a budget that
    cannot hold, and what `prepare` and `fit` raise.
    """
    main = PartialState(cpu=config.train.device == "cpu").is_main_process
    if not resume:
        refuse_present(config)
    data = prepare(config.data, quiet=not main)
    steps = estimate(config, ("dense", config.method))  # before anything is written: the budget may not hold
    check_memory(steps[config.method], config.train.device, f"method={config.method}")
    resolved = asdict(replace(config, out=str(config.folder)))
    _note_memory(main, runs(config).values(), steps)
    make_task = partial(DLRMTask, config, data)
    return fit_stages(config, make_task, main=main, resume=resume, resolved=resolved, finish=_tested)


def _tested(summary: Summary, task: DLRMTask, folder: Path) -> Summary:
    """Write test.json for a run that is finished, unless it is there; returns the summary."""
    path, train = folder / "test.json", task.config.train
    if summary.finished and not path.exists():
        accelerator = Accelerator(cpu=train.device == "cpu")
        model = task.model.to(accelerator.device)
        load_pretrained(model, find_checkpoint(folder))  # where the run was finished earlier, `task` has not trained
        task.part = "test"
        means = evaluate(task, model, accelerator, precision=train.precision)
        if accelerator.is_main_process:
            replace_file(path, to_json(means, indent=1) + "\n")
        figures = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items())
        say(accelerator.is_main_process, NAME, f"test: {figures}")
        accelerator.wait_for_everyone()
    return summary


def _note_memory(main: bool, folders: Iterable[Path], steps: dict[str, MemoryEstimate]) -> None:
    """Leave estimated bytes by method and part in each folder, for the report."""
    for folder in folders if main else ():
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "memory.json", to_json({method: step.parts for method, step in steps.items()}) + "\n")


def estimate(config: DLRMTaskConfig, methods: Sequence[Method] = METHODS) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step by method, on the meta device: nothing is allocated or computed. Data
    are prepared only where the sizes of the tables come from them."""
    sizes, rows = config.data.hashed_sizes or prepare(config.data).table_sizes, config.train.batch_size
    estimates: dict[str, MemoryEstimate] = {}
    with torch.device("meta"):
        for method in dict.fromkeys(methods):
            model, _ = build_model(replace(config, method=method), sizes)
            ids = torch.empty(rows, len(sizes), dtype=torch.int64)
            batch = ClickBatch(torch.empty(rows, INTEGERS), ids, torch.empty(rows))
            step = estimate_step(model, partial(click_loss, model, batch), optimizer=config.optimizer)
            tables = [table.weight for table in model.tables if isinstance(table, nn.EmbeddingBag) and table.sparse]
            for weight in tables:  # a row and its number for each row of the batch
                saved = weight.nbytes - rows * (weight.element_size() * weight.shape[1] + ids.element_size())
                step = replace(step, gradients=step.gradients - max(0, saved))
            estimates[method] = step
    return estimates
