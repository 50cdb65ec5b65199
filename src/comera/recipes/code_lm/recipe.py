"""The main job: a BERT-style transformer pre-trained from scratch on source code, compressed, dense or by a baseline.

Masked language modelling on packed blocks. The loss looks at the masked positions alone, so the output head is computed
for 15 % of the tokens.  B batch, T block size, P masked positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate import PartialState
from torch import Tensor, nn
from transformers import BertForMaskedLM

from comera.baselines import Applied, BaselineConfig, Method
from comera.convert import TT, TTM, TensorizeConfig, TensorizeReport, tensorize_
from comera.errors import ConfigError
from comera.recipes.bert import ModelConfig
from comera.recipes.code_lm.data import END, PAD, START, Batch, CodeData, CodeDataConfig, prepare
from comera.recipes.methods import check_method, estimates_by_method, follow
from comera.trainer.config import TrainConfig
from comera.trainer.loop import fit
from comera.trainer.memory import MemoryEstimate
from comera.trainer.metrics import Summary
from comera.trainer.task import Task

NAME = "code-lm"


@dataclass(frozen=True)
class CompressConfig:
    """How the method comera compresses the model; the other methods do not look at it."""

    order: int = 6
    """Cores of a linear layer's tensor train."""
    rank: int | tuple[int, ...] = 30
    """Ranks of the linear layers at the start: one number, clipped where the modes allow less, or all of them."""
    embedding_order: int = 4
    """Cores of the token embedding's tensor-train matrix."""
    embedding_rank: int | tuple[int, ...] = 32
    """Ranks of the token embedding at the start."""
    head: Literal["share", "untie", "dense"] = "untie"
    """Output head: share the embedding's cores, have a tensor train of its own, or a dense weight of its own."""
    head_rank: int | tuple[int, ...] = 64
    """Ranks of an output head with a tensor train of its own."""

    def tensorize(self) -> TensorizeConfig:
        """The conversion that this describes; tables of positions and segments stay dense, as published."""
        overrides: dict[str, TT | TTM | None] = {"*.position_embeddings": None, "*.token_type_embeddings": None}
        if self.head != "share":
            own = TT(order=self.order, rank=self.head_rank)
            overrides["cls.predictions.decoder"] = own if self.head == "untie" else None
        return TensorizeConfig(
            linear=TT(order=self.order, rank=self.rank),
            embedding=TTM(order=self.embedding_order, rank=self.embedding_rank),
            overrides=overrides,
            tied="share" if self.head == "share" else "untie",
        )


# Measured on short runs (docs/LOG.md): with higher rates the model collapses onto the frequencies of the tokens.
_TRAIN = TrainConfig(
    steps=10_000,
    batch_size=16,
    lr=3e-4,
    core_lr=1.5e-3,
    betas=(0.9, 0.98),
    warmup=0.1,
    prune_every=500,
    eval_batches=16,
)
PRESETS: dict[Method, TrainConfig] = {
    "comera": _TRAIN,
    "dense": replace(_TRAIN, lr=1e-4, core_lr=None),
    # core_lr is the rate of what stands in place of the linear weights. Its ratio to that of the dense model is what
    # short runs of a small model take; cores of fixed rank take those of ours. None was tuned at this size.
    "galore": replace(_TRAIN, lr=1e-4, core_lr=1e-3),
    "lte": replace(_TRAIN, lr=1e-4, core_lr=1e-5),
    "cola": replace(_TRAIN, lr=1e-4, core_lr=5e-4),
    "tensorly": _TRAIN,
}


@dataclass(frozen=True)
class CodeLMConfig:
    """Pre-training of a BERT-style transformer on source code."""

    method: Method = "comera"
    """comera trains the compressed model with adaptive ranks; dense the model as it is; the others, for comparison too,
    what else could be done with it."""
    out: str | None = None
    """Folder of the run; left out: runs/code-lm-METHOD."""
    data: CodeDataConfig = field(default_factory=CodeDataConfig)
    """Source code, tokenizer, masking."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Sizes of the transformer."""
    compress: CompressConfig = field(default_factory=CompressConfig)
    """Formats of the compressed layers."""
    baselines: BaselineConfig = field(default_factory=BaselineConfig)
    """Settings of the methods besides comera and dense."""
    train: TrainConfig = field(default_factory=lambda: _TRAIN)
    """Length, optimizer, rank adaptation, outputs."""

    def __post_init__(self) -> None:
        check_method(self.method)
        if self.data.block_size > self.model.max_positions:
            raise ConfigError(
                f"data.block_size ({self.data.block_size}) must not be above model.max_positions "
                f"({self.model.max_positions}): lower the one or raise the other"
            )

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.out or f"runs/{NAME}-{self.method}").expanduser()


def preset(method: Method = "comera") -> CodeLMConfig:
    """The defaults that suit a method: they differ in the learning rates."""
    return CodeLMConfig(method=method, train=PRESETS[method])


def build_model(config: CodeLMConfig, vocab_size: int) -> tuple[BertForMaskedLM, TensorizeReport | Applied | None]:
    """A stock BertForMaskedLM, seeded by train.seed, turned into the method's, and what the method says of that."""
    torch.manual_seed(config.train.seed)
    tokens = {"type_vocab_size": 1, "bos_token_id": START, "pad_token_id": PAD, "eos_token_id": END}
    model = BertForMaskedLM(config.model.bert(vocab_size, **tokens))
    if config.method == "comera":
        return model, tensorize_(model, config.compress.tensorize())
    return model, None if config.method == "dense" else config.baselines[config.method].apply_(model)


def masked_loss(model: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy of the masked positions, in nats: the head sees (P, hidden) instead of (B, T, hidden)."""
    hidden_BTH = model.bert(batch.input_ids)[0]
    logits_PV = model.cls(hidden_BTH.flatten(0, 1)[batch.positions])
    return F.cross_entropy(logits_PV, batch.labels)


def frequency_loss(config: CodeLMConfig, data: CodeData) -> float:
    """Held-out loss, in nats, of a model that ignores its input and knows how frequent each token is: what the head
    starts from, and what a model has to beat to have learned anything from context."""
    batches = islice(data.held_out_batches(config.train.batch_size), config.train.eval_batches or None)
    frequencies = data.log_frequencies()
    return float(torch.stack([-frequencies[batch.labels].mean() for batch in batches]).mean())


class CodeLMTask(Task):
    """The job as `comera.trainer.loop.fit` wants it."""

    name = NAME

    def __init__(self, config: CodeLMConfig, data: CodeData) -> None:
        self.config, self.data = config, data
        self.method = config.method
        model, report = build_model(config, data.vocab_size)
        with torch.no_grad():  # from the start the head knows how frequent each token is: no steps are spent on that
            model.cls.predictions.bias.copy_(data.log_frequencies())
        self.model: nn.Module = model
        follow(self, report)
        data_fields = {"prepared": data.folder.name, **asdict(config.data)}
        self.identity = {
            **{f"data.{name}": data_fields[name] for name in ("prepared", "block_size", "mask_share")},
            **{f"model.{name}": value for name, value in asdict(config.model).items()},
            **{f"compress.{name}": value for name, value in asdict(config.compress).items()},
            **config.baselines.identity(config.method),
        }

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Batch:
        """Every micro-batch of every process is the next one of a single sequence."""
        train = self.config.train
        return self.data.train_batch((step * train.accumulation + micro) * world + rank, train.batch_size, train.seed)

    def eval_batches(self) -> Iterator[Batch]:
        """Held-out blocks in the size of a training batch."""
        return self.data.held_out_batches(self.config.train.batch_size)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The batch's mean loss."""
        return masked_loss(model, batch)

    def tokens(self, batch: Batch) -> int:
        """Tokens that the model reads."""
        return batch.input_ids.numel()


def run(config: CodeLMConfig, *, resume: bool = False) -> Summary:
    """Prepare the data, build the model and train it into `config.folder`; what is raised: see `prepare` and `fit`."""
    main = PartialState(cpu=config.train.device == "cpu").is_main_process
    data = prepare(config.data, quiet=not main)
    if main:
        print(f"held-out loss of the tokens' frequencies alone: {frequency_loss(config, data):.4f}", file=sys.stderr)
    resolved = asdict(replace(config, out=str(config.folder)))
    return fit(CodeLMTask(config, data), config.train, config.folder, resume=resume, resolved=resolved)


def estimate(config: CodeLMConfig) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step for every method that is installed, on the meta device: nothing is allocated
    or computed."""
    rows, width = config.train.batch_size, config.data.block_size
    masked = max(1, round(config.data.mask_share * rows * width))

    def parts(method: Method) -> tuple[nn.Module, Any, Callable[[], Tensor]]:
        model, report = build_model(replace(config, method=method), config.data.vocab_size)
        ids = (torch.empty(shape, dtype=torch.int64) for shape in [(rows, width), (masked,), (masked,)])
        return model, report, partial(masked_loss, model, Batch(*ids))

    return estimates_by_method(parts)
