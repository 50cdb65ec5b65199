"""Click prediction: DLRM on Criteo's click log, with its large embedding tables compressed or not.

Runs in stages, see `comera.recipes.base`.
B batch."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.baselines import TABLE_METHODS, Conversion, Method, smaller_tables_
from comera.convert import TT, TTM, TensorizeConfig, tensorize_
from comera.errors import ConfigError, check_fields
from comera.memory.estimate import MemoryEstimate, check_memory
from comera.memory.estimate import estimate as estimate_step
from comera.optim.names import OPTIMIZERS
from comera.rank.objective import EarlyStage
from comera.recipes import base
from comera.recipes.base import runs
from comera.recipes.config import StagedConfig
from comera.recipes.dlrm.click_metrics import click_metrics
from comera.recipes.dlrm.criteo import ClickBatch, ClickData, CriteoConfig, prepare
from comera.recipes.dlrm.model import DLRM, DLRMConfig
from comera.recipes.dlrm.table_budget import ORDERS, fit_tables
from comera.recipes.trained import Architecture
from comera.trainer.config import TrainConfig
from comera.trainer.metrics import Summary, to_json

__all__ = ["DLRMTask", "DLRMTaskConfig", "architecture", "estimate", "preset", "run", "runs"]

NAME = "dlrm"
Preset = Literal["sample", "kaggle"]
METHODS: tuple[Method, ...] = ("dense", "comera", *TABLE_METHODS)
_LARGE = 2**15  # elements of a layer worth a tensor train
_EXAMPLE_ROWS = 1024  # of an example batch


@dataclass(frozen=True)
class CompressConfig:
    """Formats of the compressed layers; the methods that only replace tables use the ratio alone."""

    ratio: float = 8.0
    """Initial compression ratio of all embedding tables together. Of comera, large tables share the budget in
    proportion to the square root of their rows; within its share, a table takes the fewest cores that allow rank 8,
    then the largest rank. The late stage shrinks them further, by importance to the loss."""
    min_rows: int = 10_000
    """Tables with fewer rows stay dense. A model whose dense tables all have fewer gets dense gradients."""
    order: int | None = None
    """Cores in the TT-matrix of each table, 2 to 4; default: chosen for each table."""
    mlp_rank: int = 0
    """TT-rank of the large layers of the two MLPs; 0 leaves them dense: they have half a million parameters, the tables
    millions. Two cores of rank 64 made a step 1.2 times faster and the result of one pass over the sample 0.6 % worse
    (docs/log.md)."""
    mlp_order: int = 2
    """Cores in the tensor trains of the MLPs."""

    def __post_init__(self) -> None:
        checks = {
            "ratio": (1 < self.ratio < float("inf"), "a number > 1"),
            "min_rows": (self.min_rows >= 1, "at least 1"),
            "order": (self.order is None or self.order in ORDERS, f"one of {', '.join(map(str, ORDERS))}, or none"),
            "mlp_rank": (self.mlp_rank >= 0, "a number >= 0"),
            "mlp_order": (2 <= self.mlp_order <= 8, "from 2 to 8"),
        }
        check_fields(self, "compress.", checks)

    def tensorize(self, model: DLRM) -> TensorizeConfig:
        """The conversion of this model. Raises ConfigError if the budget is too small."""
        dim = model.tables[0].get_parameter("weight").shape[1]
        specs = fit_tables(model.table_sizes, dim, ratio=self.ratio, min_rows=self.min_rows, order=self.order)
        formats: dict[str, TT | TTM | None] = {
            f"tables.{k}": TTM(rank=spec.ranks, row_modes=spec.row_modes, col_modes=spec.col_modes) if spec else None
            for k, spec in enumerate(specs)
        }
        if self.mlp_rank:
            train = TT(order=self.mlp_order, rank=self.mlp_rank)
            layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
            formats |= {name: train if layer.weight.numel() >= _LARGE else None for name, layer in layers}
        return TensorizeConfig(linear=None, embedding=None, overrides=formats)


# Rates measured on the sample (docs/log.md). One pass over the rows in total: in a second, the dense baseline overfits.
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
_RATES: dict[Method, TrainConfig] = {
    method: _TRAIN if method == "comera" else replace(_TRAIN, core_lr=None, rank_lr=None) for method in METHODS
}


@dataclass(frozen=True)
class DLRMTaskConfig(StagedConfig):
    """Click prediction with DLRM, on Criteo's log or a table of one's own: will this user click on this ad?"""

    method: Method = "comera"
    """comera: compressed tables, in an early stage and late ones; dense: uncompressed tables, for comparison; hashing,
    quotient_remainder, narrow_tables: other tables of as many parameters, as `compress.ratio` says."""
    preset: Preset = "sample"
    """Where the defaults come from. sample: one table row per category of the data; kaggle: categories hashed into
    tables of the full Kaggle data's sizes, compressed 200 times."""
    late_targets: tuple[float, ...] = (0.5,)
    late_epochs: float = 0.5
    data: CriteoConfig = field(default_factory=CriteoConfig)
    """The click log, and how its categories map to rows of tables."""
    model: DLRMConfig = field(default_factory=DLRMConfig)
    """Sizes of the model."""
    compress: CompressConfig = field(default_factory=CompressConfig)
    """Budget of the compressed tables."""
    train: TrainConfig = field(default_factory=lambda: _TRAIN)
    """Length of the early stage, learning rates, rank adaptation and outputs. Limits in steps and seconds apply to each
    run. If late stages follow, the early stage holds its learning rates after the warm-up; they decay in the late
    stages."""

    # the other methods compress linear layers, and nearly all of this model is tables
    recipe, methods, presets = NAME, METHODS, get_args(Preset)


def preset(method: Method = "comera", preset: Preset = "sample") -> DLRMTaskConfig:
    """The defaults for a method; methods differ in their learning rates."""
    config = DLRMTaskConfig(method=method, preset=preset, train=_RATES.get(method, _TRAIN))
    if preset == "kaggle":
        return replace(config, data=CriteoConfig(table_sizes="kaggle"), compress=CompressConfig(ratio=200.0))
    return config


def build_model(config: DLRMTaskConfig, table_sizes: Sequence[int]) -> tuple[DLRM, Conversion]:
    """A DLRM, seeded by train.seed and with the method's tables, and the report of these. Tables that are replaced
    never exist in dense form: they are converted on the meta device."""
    torch.manual_seed(config.train.seed)
    report: Conversion = None
    if config.method == "dense":
        model = DLRM(config.model, table_sizes, config.data.number_count)
    else:
        device = torch.get_default_device()
        with torch.device("meta"):
            model = DLRM(config.model, table_sizes, config.data.number_count)
            if config.method == "comera":
                report = tensorize_(model, config.compress.tensorize(model))
            else:
                report = smaller_tables_(model, config.method, config.compress.ratio)
        if device.type != "meta":
            model.to_empty(device=device).reset_parameters()
    dense = _dense_tables(model)
    # A sparse gradient touches only the rows of its batch, which large tables need. Where all are small, dense ones are
    # faster: one lookup serves all tables, and a step can be recorded.
    large = any(table.num_embeddings >= config.compress.min_rows for table in dense)
    for table in dense:
        table.sparse = large and OPTIMIZERS[config.train.optimizer].sparse
    return model, report


def _dense_tables(model: DLRM) -> list[nn.Embedding | nn.EmbeddingBag]:
    """The tables, and those of which the methods other than comera make smaller ones."""
    return [table for table in model.tables.modules() if isinstance(table, nn.Embedding | nn.EmbeddingBag)]


def click_loss(model: nn.Module, batch: ClickBatch) -> Tensor:
    """Mean log loss of the clicks, in nats."""
    return F.binary_cross_entropy_with_logits(model(batch.dense, batch.ids), batch.labels)


class DLRMTask(base.RecipeTask):
    """Click prediction, as a task for `comera.trainer.loop.fit`. first: steps that earlier runs trained. files: of the
    run's folder, text by name. part: of the data to evaluate on."""

    counted = "samples"
    part: Literal["validation", "test"] = "validation"
    config: DLRMTaskConfig
    data: ClickData

    def __init__(
        self, config: DLRMTaskConfig, data: ClickData, first: int = 0, *, files: Mapping[str, str] | None = None
    ) -> None:
        settings = {"shuffle": data.shuffle, "first_step": first, "table_sizes": list(data.table_sizes)}
        identity = {f"data.{name}": value for name, value in settings.items()}
        super().__init__(config, data, partial(build_model, table_sizes=data.table_sizes), first, identity=identity)
        self.steps_per_epoch = self.epoch_length()
        self.files = files or {}
        self.references = {"nce": {"click rate alone": 1.0}}  # by the definition of normalized entropy

    def eval_batches(self) -> Iterator[ClickBatch]:
        """The held-out rows in time order, in batches of the training size."""
        return self.data.batches(self.part, self.config.train.batch_size)

    def loss(self, model: nn.Module, batch: ClickBatch) -> Tensor:
        return click_loss(model, batch)

    def evaluate(self, model: nn.Module, batch: ClickBatch) -> tuple[dict[str, Tensor], int, Tensor]:
        """Loss and accuracy, means over the batch; its number of rows; their scores and labels (B, 2)."""
        scores, labels = model(batch.dense, batch.ids).float(), batch.labels
        correct = ((scores > 0) == (labels > 0.5)).float()
        loss = F.binary_cross_entropy_with_logits(scores, labels)
        return {"loss": loss, "accuracy": correct.mean()}, len(labels), torch.stack([scores, labels], 1)

    def evaluate_rows(self, rows: Tensor) -> dict[str, float]:
        """Area under the ROC curve and normalized cross-entropy over all held-out rows."""
        return click_metrics(*rows.unbind(1))

    def tokens(self, batch: ClickBatch) -> int:
        return len(batch.labels)

    def finish(self, folder: Path, summary: Summary) -> None:
        """Write test.json for a finished run, unless it exists."""
        if summary.finished and not (folder / "test.json").exists():
            self.part = "test"
            base.write_test(self, folder)


def run(config: DLRMTaskConfig, *, resume: bool = False) -> Summary:
    """Prepare the data and train the runs of `config`, one after the other; returns the summary of the last one. Each
    finished run also writes test.json: the metrics of its last model on the test rows. resume: keep finished runs and
    continue an interrupted one. An interruption ends the current run and skips the rest. Raises ConfigError if a run
    exists already and `resume` is not set, or the budget is too small, and what `prepare` and `fit` raise."""
    main = base.is_main(config.train)
    if not resume:
        base.refuse_existing(config)
    data = prepare(config.data, quiet=not main)
    steps = estimate(config, ("dense", config.method))  # before anything is written: the budget may be too small
    check_memory(steps[config.method], config.train.device, f"method={config.method}")
    # for the report: estimated bytes by method and part
    files = {"memory.json": to_json({method: step.parts for method, step in steps.items()}) + "\n"}
    return base.fit_stages(config, partial(DLRMTask, config, data, files=files), resume=resume)


def estimate(config: DLRMTaskConfig, methods: Sequence[Method] = METHODS) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step by method, on the meta device: nothing is allocated or computed. Data is
    prepared only if the table sizes depend on it."""
    sizes, rows = config.data.hashed_sizes or prepare(config.data).table_sizes, config.train.batch_size
    estimates: dict[str, MemoryEstimate] = {}
    with torch.device("meta"):
        for method in dict.fromkeys(methods):
            try:
                model, _ = build_model(replace(config, method=method), sizes)
            except ConfigError as error:  # narrow tables have a least size
                if method == config.method:
                    raise
                print(f"{NAME}: no estimate of {method}: {error}", file=sys.stderr)
                continue
            ids = torch.empty(rows, len(sizes), dtype=torch.int64)
            batch = ClickBatch(torch.empty(rows, config.data.number_count), ids, torch.empty(rows))
            step = estimate_step(model, partial(click_loss, model, batch), optimizer=config.train.optimizer)
            for weight in (table.weight for table in _dense_tables(model) if table.sparse):
                # a row and its id for each row of the batch
                saved = weight.nbytes - rows * (weight.element_size() * weight.shape[1] + ids.element_size())
                step = replace(step, gradients=step.gradients - max(0, saved))
            estimates[method] = step
    return estimates


def architecture(config: DLRMTaskConfig, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
    """How to rebuild the model of a run."""
    sizes = identity["data.table_sizes"]
    # load_pretrained cannot convert sparse tables
    dense = replace(config, method="dense", train=replace(config.train, optimizer="adamw"))
    rng = torch.Generator().manual_seed(0)
    dense_BI = 5 * torch.rand(_EXAMPLE_ROWS, config.data.number_count, generator=rng)
    ids_BF = torch.stack([torch.randint(size, (_EXAMPLE_ROWS,), generator=rng) for size in sizes], 1)
    batch = torch.export.Dim("batch")
    return Architecture(
        build=lambda: build_model(config, sizes)[0],
        dense=lambda folder: build_model(dense, sizes)[0],
        inputs={"dense": dense_BI, "ids": ids_BF},
        dynamic={"dense": {0: batch}, "ids": {0: batch}},
        about={"table_sizes": sizes, "model": asdict(config.model)},
    )
