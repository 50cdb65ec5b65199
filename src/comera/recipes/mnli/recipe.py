"""Natural-language inference on MNLI: the six-encoder transformer of METHOD §4 from scratch, compressed or not.

Its runs: see `stages`.  B batch, T tokens of its longest pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate import PartialState
from torch import Tensor, nn
from transformers import BertForSequenceClassification

from comera.baselines import Applied, BaselineConfig, Method
from comera.convert import TT, TTM, TensorizeConfig, TensorizeReport, tensorize_
from comera.errors import ConfigError
from comera.rank.objective import EarlyStage, LateStage
from comera.recipes.bert import ModelConfig
from comera.recipes.methods import check_method, estimates_by_method, follow
from comera.recipes.mnli.data import (
    MNLIData,
    MNLIDataConfig,
    PairBatch,
    find_vocabulary,
    parse_vocabulary,
    prepare,
)
from comera.recipes.stages import check_stages, fit_stages, refuse_present, say
from comera.trainer.config import TrainConfig
from comera.trainer.memory import MemoryEstimate
from comera.trainer.metrics import Summary
from comera.trainer.task import Task

NAME = "mnli"
Preset = Literal["tuned", "published", "short", "small"]

# The published modes of BERT's table; those of linear layers are what balanced modes come to at their widths.
_TABLE = (30_522, 768)
_TABLE_ROWS, _TABLE_COLUMNS = (16, 20, 10, 10), (4, 4, 8, 6)


@dataclass(frozen=True)
class CompressConfig:
    """How the method comera compresses the model; dense does not look at it. The defaults are the published ones."""

    order: int = 6
    """Cores of a linear layer's tensor train."""
    rank: int | tuple[int, ...] = 30
    """Ranks of the linear layers at the start: one number, clipped where the modes allow less, or all of them."""
    embedding_order: int = 4
    """Cores of the token embedding's tensor-train matrix."""
    embedding_rank: int | tuple[int, ...] = 30
    """Ranks of the token embedding at the start."""

    def tensorize(self, vocab_size: int, hidden: int) -> TensorizeConfig:
        """The conversion that this describes; positions, segments and the classifier stay dense, as published."""
        table = TTM(order=self.embedding_order, rank=self.embedding_rank)
        if (vocab_size, hidden) == _TABLE and self.embedding_order == len(_TABLE_ROWS):
            table = replace(table, row_modes=_TABLE_ROWS, col_modes=_TABLE_COLUMNS)
        dense = ("*.position_embeddings", "*.token_type_embeddings", "classifier")
        return TensorizeConfig(
            linear=TT(order=self.order, rank=self.rank), embedding=table, overrides=dict.fromkeys(dense)
        )


# METHOD §4: AdamW without weight decay, batches of 32 to 128, the ranks by the surrogate of the size.
_PUBLISHED = TrainConfig(
    epochs=6,
    batch_size=64,
    lr=5e-5,
    core_lr=1e-4,
    rank_lr=1e-3,
    prune_every=100,
    late=LateStage(shrink="surrogate"),
)
# The table at ten times the rate of the other cores, which learns far faster (docs/LOG.md).
_TUNED = replace(_PUBLISHED, table_lr=1e-3, late=LateStage())
# The six encoders on two CPU cores: small batches, since they leave the majority's answer by steps, not by pairs.
_SHORT = replace(_TUNED, epochs=1.2, batch_size=16, early=EarlyStage(size_weight=0))
# Two narrow encoders that learn on two CPU cores in minutes, at rates as measured (docs/LOG.md).
_SMALL = replace(
    _TUNED,
    epochs=2,
    batch_size=32,
    lr=5e-4,
    core_lr=1e-3,
    table_lr=2e-3,
    early=EarlyStage(size_weight=0),
    prune_every=40,
)
_SMALL_MODEL = ModelConfig(hidden=128, layers=2, heads=4, ffn=512, dropout=0.1)


def _by_method(comera: TrainConfig, dense: TrainConfig) -> dict[Method, TrainConfig]:
    """Rates of the baselines from those of the dense twin, as in the recipe code-lm, and for cores of fixed rank ours;
    core_lr: of what stands in the place of linear weights."""
    factors: dict[Method, float] = {"galore": 10.0, "lte": 0.1, "cola": 5.0}
    others = {method: replace(dense, core_lr=dense.lr * factor) for method, factor in factors.items()}
    others["tensorly"] = replace(dense, lr=comera.lr, core_lr=comera.core_lr)
    return {"comera": comera, "dense": dense, **others}


PRESETS: dict[Preset, dict[Method, TrainConfig]] = {
    "tuned": _by_method(_TUNED, _TUNED),
    "published": _by_method(_PUBLISHED, _PUBLISHED),
    "short": _by_method(_SHORT, replace(_SHORT, core_lr=None, table_lr=None)),
    "small": _by_method(_SMALL, replace(_SMALL, core_lr=None, table_lr=None)),
}


@dataclass(frozen=True)
class MNLIConfig:
    """Natural-language inference: does a sentence follow from another, contradict it, or neither."""

    method: Method = "comera"
    """comera trains the compressed model, an early stage and late ones; dense trains its twin, for comparison, and the
    others what else could be done with it."""
    preset: Preset = "tuned"
    """What to start from. published: the paper's rates and its way of shrinking; tuned: the same rates, ranks by
    sensitivity; short: the six encoders on 20,000 pairs for an evening on a CPU, and small: two narrow encoders on
    them for minutes, both with rates of their own."""
    out: str | None = None
    """Folder of the runs; left out: runs/mnli-METHOD."""
    late_targets: tuple[float, ...] = (0.8, 0.5, 0.2)
    """Sizes to reach, each as a part of the size at the end of the early stage, by a late stage of its own."""
    late_epochs: float = 2.0
    """Passes over the training pairs in each late stage; train.epochs are those of the early one. The size falls over
    the first half of it, unless train.late.steps says otherwise."""
    data: MNLIDataConfig = field(default_factory=MNLIDataConfig)
    """Pairs of sentences, vocabulary, lengths."""
    model: ModelConfig = field(default_factory=lambda: ModelConfig(dropout=0.1))
    """Sizes of the transformer."""
    compress: CompressConfig = field(default_factory=CompressConfig)
    """Formats of the compressed layers."""
    baselines: BaselineConfig = field(default_factory=BaselineConfig)
    """Settings of the methods besides comera and dense."""
    train: TrainConfig = field(default_factory=lambda: _TUNED)
    """Length of the early stage, optimizer, rank adaptation, outputs. Bounds in steps and seconds hold for each run.
    Where a late stage follows, the early one holds its rates after the warm-up: they fall in the late ones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "late_targets", tuple(self.late_targets))  # YAML has lists only
        check_method(self.method)
        if self.preset not in PRESETS:
            raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        check_stages(self)
        if self.data.max_length > self.model.max_positions:
            raise ConfigError(
                f"data.max_length ({self.data.max_length}) must not be above model.max_positions "
                f"({self.model.max_positions}): lower the one or raise the other"
            )

    @property
    def folder(self) -> Path:
        """The folder of all runs."""
        return Path(self.out or f"runs/{NAME}-{self.method}").expanduser()


def preset(method: Method = "comera", preset: Preset = "tuned") -> MNLIConfig:
    """The defaults that suit a method: they differ in the learning rates."""
    config = MNLIConfig(method=method, preset=preset, train=PRESETS[preset][method])
    if preset == "short":
        return replace(config, data=MNLIDataConfig(max_examples=20_000, buckets=32), late_epochs=1.2)
    if preset == "small":
        formats = CompressConfig(order=4, rank=24, embedding_order=3, embedding_rank=48)
        data = MNLIDataConfig(max_examples=20_000)
        return replace(config, data=data, model=_SMALL_MODEL, compress=formats, late_epochs=1.0)
    return config


def build_model(
    config: MNLIConfig, vocab_size: int, labels: int = 3
) -> tuple[BertForSequenceClassification, TensorizeReport | Applied | None]:
    """A stock BertForSequenceClassification, seeded by train.seed, turned into the method's, and what the method says
    of that; the classifier stays dense."""
    torch.manual_seed(config.train.seed)
    model = BertForSequenceClassification(config.model.bert(vocab_size, type_vocab_size=2, num_labels=labels))
    if config.method == "comera":
        return model, tensorize_(model, config.compress.tensorize(vocab_size, config.model.hidden))
    if config.method == "dense":
        return model, None
    return model, config.baselines[config.method].apply_(model, skip=("classifier",))


def scores(model: Any, batch: PairBatch) -> Tensor:
    """Logits of the labels, (B, labels)."""
    # As (B, 1, T, T), which the model takes as it is: of a (B, T) mask it would ask the device whether all is true.
    mask_B1TT = batch.attention_mask[:, None, None, :].expand(-1, -1, batch.attention_mask.shape[1], -1)
    outputs = model(input_ids=batch.input_ids, token_type_ids=batch.token_type_ids, attention_mask=mask_B1TT)
    logits: Tensor = outputs.logits
    return logits


def pair_loss(model: Any, batch: PairBatch) -> Tensor:
    """Mean cross-entropy of the labels, in nats."""
    return F.cross_entropy(scores(model, batch), batch.labels)


class MNLITask(Task):
    """A run as `comera.trainer.loop.fit` wants it; `first`: steps of other runs that it goes on after."""

    name = NAME

    def __init__(self, config: MNLIConfig, data: MNLIData, first: int = 0) -> None:
        self.config, self.data, self.first = config, data, first
        self.method = config.method
        train = config.train
        batches = train.accumulation * PartialState(cpu=train.device == "cpu").num_processes
        self.steps_per_epoch = data.steps_per_epoch(train.batch_size, batches)
        model, report = build_model(config, data.vocab_size, len(data.label_names))
        self.model: nn.Module = model
        follow(self, report)
        self.identity = {
            "data.prepared": data.folder.name,
            "data.first_step": first,
            **{f"model.{name}": value for name, value in asdict(config.model).items()},
            **{f"compress.{name}": value for name, value in asdict(config.compress).items()},
            **config.baselines.identity(config.method),
        }

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> PairBatch:
        """Every micro-batch of every process is the next one of a single sequence."""
        train = self.config.train
        index = ((self.first + step) * train.accumulation + micro) * world + rank
        return self.data.train_batch(index, train.batch_size, train.seed)

    def eval_batches(self) -> Iterator[PairBatch]:
        """The matched development pairs, in the size of a training batch; always the same batches in the same order."""
        batches = list(self.data.dev_batches(self.config.train.batch_size))
        Random(0).shuffle(batches)  # they come by length: so the first few stand for all
        return iter(batches)

    def loss(self, model: nn.Module, batch: PairBatch) -> Tensor:
        """The batch's mean loss."""
        return pair_loss(model, batch)

    def evaluate(self, model: nn.Module, batch: PairBatch) -> tuple[dict[str, Tensor], int]:
        """Loss and share of right answers, means over the batch; its pairs."""
        logits = scores(model, batch)
        right = (logits.argmax(-1) == batch.labels).float()
        return {"loss": F.cross_entropy(logits, batch.labels), "accuracy": right.mean()}, len(batch.labels)

    def examples(self, batch: PairBatch) -> int:
        """Pairs in a batch."""
        return len(batch.labels)

    def tokens(self, batch: PairBatch) -> int:
        """Tokens that the model reads; padding is none."""
        return int(batch.attention_mask.sum())


def run(config: MNLIConfig, *, resume: bool = False) -> Summary:
    """Prepare the data and train the runs of `config`, one after the other; returns the summary of the last one.

    resume: finished runs are kept, one that was interrupted goes on. An interruption ends the run that is under way and
    leaves out the others. Raises ConfigError when there is a run already and `resume` is not set, and what `prepare`
    and `fit` raise.
    """
    main = PartialState(cpu=config.train.device == "cpu").is_main_process
    if not resume:
        refuse_present(config)
    data = prepare(config.data, quiet=not main)
    say(main, NAME, _about(data))
    resolved = asdict(replace(config, out=str(config.folder)))
    return fit_stages(config, partial(MNLITask, config, data), main=main, resume=resume, resolved=resolved)


def _about(data: MNLIData) -> str:
    """What was left out and why, and what a model that ignores its input is right on: the share to beat."""
    skipped = {why: count for why, count in data.skipped.items() if count}
    reasons = f" ({', '.join(f'{why}: {count:,}' for why, count in skipped.items())})" if skipped else ""
    counts = data.label_counts["dev"]
    label = max(counts, key=counts.__getitem__)
    return (
        f"{sum(skipped.values()):,} pairs skipped{reasons}; always answering {label!r} is right on "
        f"{counts[label] / data.dev_size:.4f} of the {data.dev_size:,} held-out pairs"
    )


def estimate(config: MNLIConfig) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step on pairs of the full length for every method that is installed, on the meta
    device: nothing is allocated or computed, and no data are read but the vocabulary."""
    rows, width, vocab_size = config.train.batch_size, config.data.max_length, _vocab_size(config.data)

    def parts(method: Method) -> tuple[nn.Module, Any, Callable[[], Tensor]]:
        model, report = build_model(replace(config, method=method), vocab_size)
        ids, segments = (torch.empty(rows, width, dtype=torch.int64) for _ in range(2))
        mask = torch.empty(rows, width, dtype=torch.bool)
        batch = PairBatch(ids, segments, mask, torch.empty(rows, dtype=torch.int64))
        return model, report, partial(pair_loss, model, batch)

    return estimates_by_method(parts)


def _vocab_size(config: MNLIDataConfig) -> int:
    """Size of the vocabulary, that of BERT where the data are still to be fetched and none is named."""
    if config.vocab is None and not Path(config.path).expanduser().is_dir():
        return _TABLE[0]
    file = find_vocabulary(config)
    return max(parse_vocabulary(file.read_bytes(), file).values()) + 1
