"""Pre-trains a BERT-style transformer from scratch on source code: compressed, dense or by a baseline.

Masked language modeling on packed blocks of whole files, or on single functions and pairs of a docstring and its
function. The loss covers the masked positions only, so the output head is computed for 15 % of the tokens.
B batch, T block size, P masked positions, H hidden, V vocabulary."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertForMaskedLM

from comera.baselines import LINEAR_METHODS, BaselineConfig, Conversion, Method, apply_method_, rates_by_method
from comera.convert import BTT, TT, TTM, TensorizeConfig
from comera.fusion.causal_lm import head_loss
from comera.memory.estimate import MemoryEstimate
from comera.rank.objective import LateStage
from comera.recipes import base
from comera.recipes.base import runs
from comera.recipes.bert import ModelConfig
from comera.recipes.code_lm.data import (
    IGNORED,
    Batch,
    CodeData,
    CodeDataConfig,
    FunctionData,
    PaddedBatch,
    masked_at_most,
    prepare,
)
from comera.recipes.code_lm.masking import Special
from comera.recipes.config import Format, Formats, RecipeConfig
from comera.recipes.data.tokenizer import stored_tokenizer
from comera.recipes.trained import Architecture, check_length, example_ids, stored_rows, transformers_architecture
from comera.trainer.config import TrainConfig
from comera.trainer.metrics import Summary

__all__ = ["PRESETS", "CodeLMConfig", "CodeLMTask", "architecture", "estimate", "preset", "run", "runs"]

NAME = "code-lm"
Preset = Literal["small", "base", "codebert", "codebert-small"]
_SPECIAL = "data.special"  # in a run's identity, if they are not those of a tokenizer that was trained here


@dataclass(frozen=True)
class CompressConfig(Formats):
    """Formats of the compressed layers; only the method comera uses them."""

    format: Format = "tt"
    order: int = 6
    rank: int | tuple[int, ...] = 30
    embedding: Literal["ttm", "low_rank"] = "ttm"
    embedding_order: int = 4
    embedding_rank: int | tuple[int, ...] = 32
    head: Literal["share", "untie", "dense"] = "untie"
    """Output head: share the embedding's cores, untie it in the format of linear layers, or as a dense weight."""
    head_rank: int | tuple[int, ...] = 64
    """Initial rank of an untied output head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tensorize()  # refuses what no layer can have

    def tensorize(self) -> TensorizeConfig:
        """The conversion; position and segment tables stay dense, as published."""
        overrides: dict[str, TT | BTT | TTM | None] = {"*.position_embeddings": None, "*.token_type_embeddings": None}
        if self.head != "share":
            own = self.linear(self.head_rank, self.blocks) if self.head == "untie" else None
            overrides["cls.predictions.decoder"] = own
        return TensorizeConfig(
            linear=self.linear(self.rank, self.blocks),
            embedding=self.table(),
            overrides=overrides,
            tied="share" if self.head == "share" else "untie",
        )


# Measured on short runs (docs/log.md): with higher rates the model collapses onto the token frequencies.
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
# Four narrow encoders on two CPU cores; fewer and larger cores suit them, at rates that follow from lr.
_SMALL = replace(_TRAIN, steps=3000, batch_size=8, lr=1e-3, core_lr=None)
_SMALL_MODEL = ModelConfig(hidden=256, layers=4, heads=4, ffn=1024)
# CodeBERT's schedule: 100,000 steps of 2,048 sequences. Phase 1 is the first half; phase 2 cuts the compressed layers
# to 0.5 over half of the rest and trains on at that size. Rates of the cores follow from lr; none of it is tuned at
# this size.
_CODEBERT = TrainConfig(
    steps=100_000,
    batch_size=64,
    accumulation=32,
    lr=5e-4,
    betas=(0.9, 0.98),
    weight_decay=0.01,
    warmup=0.1,
    schedule="linear",
    prune_every=1000,
    eval_every=1000,
    eval_batches=64,
    late=LateStage(target_size=0.5, start_step=50_000, steps=25_000),
)
_CODEBERT_SMALL = replace(
    _CODEBERT,
    steps=3000,
    batch_size=8,
    accumulation=1,
    lr=1e-3,
    prune_every=100,
    eval_every=100,
    eval_batches=32,
    late=LateStage(target_size=0.5, start_step=1500, steps=750),
)
# With a head of its own the model leaves the plateau on which masked language models begin much later (docs/log.md).
_TIED: dict[str, Any] = {"head": "share", "embedding": "low_rank"}
PRESETS: dict[Preset, dict[Method, TrainConfig]] = {
    "small": rates_by_method(_SMALL, _SMALL),
    "base": rates_by_method(_TRAIN, replace(_TRAIN, lr=1e-4, core_lr=None)),
    "codebert": rates_by_method(_CODEBERT, _CODEBERT),
    "codebert-small": rates_by_method(_CODEBERT_SMALL, _CODEBERT_SMALL),
}


@dataclass(frozen=True)
class CodeLMConfig(RecipeConfig):
    """Pre-training of a BERT-style transformer on source code."""

    method: Method = "comera"
    """comera: compressed, with adaptive ranks; dense: the uncompressed model; narrow: a dense model of fewer channels
    that costs as much as the compressed one; the others: baselines for comparison."""
    preset: Preset = "base"
    """Where the defaults come from. small: four narrow encoders, about ten minutes on two CPU cores; base: the six
    encoders of the published results; codebert: CodeBERT's twelve encoders, its vocabulary size, length and schedule,
    on functions and their docstrings, compressed further in the second half; codebert-small: the same in small, for a
    CPU."""
    data: CodeDataConfig = field(default_factory=CodeDataConfig)
    """Source code, tokenizer and masking."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Sizes of the transformer."""
    compress: CompressConfig = field(default_factory=CompressConfig)
    """Formats of the compressed layers."""
    baselines: BaselineConfig = field(default_factory=BaselineConfig)
    """Settings of the other methods."""
    train: TrainConfig = field(default_factory=lambda: _TRAIN)
    """Length, optimizer, rank adaptation and outputs."""

    recipe, methods, presets = NAME, LINEAR_METHODS, tuple(PRESETS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length("data.block_size", self.data.block_size, self.model.max_positions)


def preset(method: Method = "comera", preset: Preset = "small") -> CodeLMConfig:
    """The defaults for a method; methods differ in their learning rates."""
    config = CodeLMConfig(method=method, preset=preset, train=PRESETS[preset][method])
    if preset == "small":
        formats = CompressConfig(order=4, rank=24, embedding_rank=48, **_TIED)
        return replace(config, model=_SMALL_MODEL, compress=formats)
    return config if preset == "base" else _codebert(config)


def _codebert(config: CodeLMConfig) -> CodeLMConfig:
    """The published job, 12 encoders and RoBERTa's vocabulary, or the same in small."""
    functions = CodeDataConfig(form="functions", suffixes=(".py", ".jsonl", ".jsonl.gz"))
    if config.preset == "codebert":
        data = replace(functions, block_size=512, vocab_size=50_265, tokenizer_bytes=64_000_000)
        sizes = ModelConfig(layers=12, dropout=0.1)
        # Four cores a layer: from rank 96 on, six have more parameters than two factors. 4.5 times smaller over all.
        formats = CompressConfig(order=4, rank=112, embedding_rank=160, **_TIED)
    else:
        data, sizes = replace(functions, max_bytes=20_000_000), _SMALL_MODEL  # too few passes to need dropout
        formats = CompressConfig(format="btt", rank=10, blocks=(4, 4), embedding_rank=40, **_TIED)
    return replace(config, data=data, model=sizes, compress=formats)


def build_model(
    config: CodeLMConfig,
    vocab_size: int,
    special: Special = Special(),  # noqa: B008
) -> tuple[BertForMaskedLM, Conversion]:
    """A stock BertForMaskedLM, seeded by train.seed and converted by the method, and the report of that."""
    sizes = base.sizes_of(config, meta_step, vocab_size)
    torch.manual_seed(config.train.seed)
    tokens = {"bos_token_id": special.start, "pad_token_id": special.pad, "eos_token_id": special.end}
    tokens["type_vocab_size"] = 1
    model = BertForMaskedLM(sizes.bert(vocab_size, **tokens))
    if config.method == "narrow":
        return model, None
    report = apply_method_(model, config.method, config.compress.tensorize(), config.baselines)
    if config.method == "comera":
        config.compress.add_ngrams_(model)
    return model, report


def meta_step(config: CodeLMConfig, vocab_size: int) -> base.Step:
    """A method's model, the report of its conversion, and the loss of a step."""
    model, report = build_model(config, vocab_size)
    rows, width = config.train.batch_size, config.data.block_size
    masked = masked_at_most(config.data.mask_share, rows * width)
    ids, *others = (torch.empty(shape, dtype=torch.int64) for shape in [(rows, width), (masked,), (masked,)])
    batch: Batch | PaddedBatch = Batch(ids, *others)
    if config.data.form == "functions":
        batch = PaddedBatch(ids, torch.empty(rows, width, dtype=torch.bool), *others)
    return model, report, partial(masked_loss, model, batch)


def masked_loss(model: Any, batch: Batch | PaddedBatch) -> Tensor:
    """Mean cross-entropy of the masked positions, in nats: the head sees (P, H) instead of (B, T, H)."""
    padding = {}
    if isinstance(batch, PaddedBatch):  # square: of a mask (B, T), BERT asks whether all is true, and synchronizes
        mask_BT = batch.attention_mask
        padding["attention_mask"] = mask_BT[:, None, None, :].expand(-1, -1, mask_BT.shape[1], -1)
    hidden_BTH, head = model.bert(batch.input_ids, **padding)[0], model.cls.predictions
    x_PH = head.transform(hidden_BTH.flatten(0, 1)[batch.positions])
    total = head_loss(model, head.decoder, x_PH, batch.labels, IGNORED)
    if total is not None:
        return total / (batch.labels != IGNORED).sum()
    return F.cross_entropy(head.decoder(x_PH), batch.labels, ignore_index=IGNORED)


def frequency_loss(config: CodeLMConfig, data: CodeData | FunctionData) -> float:
    """Held-out loss, in nats, of a model that ignores its input and knows only the token frequencies: where the head
    starts, and what a model must beat to have learned anything from context."""
    held_out: Iterator[Batch | PaddedBatch] = iter(data.held_out_batches(config.train.batch_size))
    batches = islice(held_out, config.train.eval_batches or None)
    labels = torch.cat([batch.labels[batch.labels != IGNORED] for batch in batches])
    return -float(data.log_frequencies()[labels].mean())


class CodeLMTask(base.RecipeTask):
    """Masked language modeling, as a task for `comera.trainer.loop.fit`."""

    config: CodeLMConfig
    data: CodeData | FunctionData

    def __init__(self, config: CodeLMConfig, data: CodeData | FunctionData) -> None:
        settings = {f"data.{name}": getattr(config.data, name) for name in ("block_size", "mask_share")}
        if data.special != Special():
            settings[_SPECIAL] = list(data.special)
        build = partial(build_model, vocab_size=data.vocab_size, special=data.special)
        super().__init__(config, data, build, identity=settings)
        with torch.no_grad():  # the head starts with the token frequencies: no steps are spent on learning them
            self.model.get_parameter("cls.predictions.bias").copy_(data.log_frequencies())
        self.files = data.files(config.model.max_positions)
        if isinstance(data, FunctionData):
            self.steps_per_epoch = self.epoch_length()

    def eval_batches(self) -> Iterator[Batch | PaddedBatch]:
        """Held-out blocks or functions, in batches of the training size."""
        return iter(self.data.held_out_batches(self.config.train.batch_size))

    def loss(self, model: nn.Module, batch: Batch | PaddedBatch) -> Tensor:
        return masked_loss(model, batch)

    def weight(self, batch: Batch | PaddedBatch) -> int:
        return int((batch.labels != IGNORED).sum()) if isinstance(batch, PaddedBatch) else len(batch.labels)

    def tokens(self, batch: Batch | PaddedBatch) -> int:
        """Tokens that the model reads; padding does not count."""
        return int(batch.attention_mask.sum()) if isinstance(batch, PaddedBatch) else batch.input_ids.numel()


def run(config: CodeLMConfig, *, resume: bool = False) -> Summary:
    """Prepare the data, build the model and train it into `config.folder`; raises what `prepare` and `fit` raise."""
    data = prepare(config.data, quiet=not base.is_main(config.train))
    reached, task = frequency_loss(config, data), CodeLMTask(config, data)
    task.references = {"loss": {"token frequencies alone": reached}}
    return base.fit_one(task, resume=resume, lines=[f"held-out loss from token frequencies alone: {reached:.4f}"])


def estimate(config: CodeLMConfig) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step for every installed method."""
    return base.estimates_by_method(config, meta_step, config.data.vocab_size)


def architecture(config: CodeLMConfig, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
    """How to rebuild the model of a run."""
    vocab_size = stored_rows(checkpoint, "bert.embeddings.word_embeddings")
    special = Special(*identity.get(_SPECIAL, ()))
    return transformers_architecture(
        BertForMaskedLM,
        lambda: build_model(config, vocab_size, special)[0],
        {"input_ids": example_ids(vocab_size, config.data.block_size)},
        config.model,
        longest=config.model.max_positions,
        files=stored_tokenizer(checkpoint.parents[1]),
        vocab_size=vocab_size,
    )
