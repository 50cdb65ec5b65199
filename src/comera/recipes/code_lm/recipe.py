"""Pre-trains a BERT-style transformer from scratch on source code: compressed, dense or by a baseline.

Masked language modeling on packed blocks. The loss covers the masked positions only, so the output head is computed for
15 % of the tokens.
B batch, T block size, P masked positions, H hidden, V vocabulary."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertForMaskedLM

from comera.baselines import BaselineConfig, Conversion, Method, apply_method_, check_method, rates_by_method
from comera.convert import TT, TTM, TensorizeConfig
from comera.errors import check_fields
from comera.recipes.architectures import check_length, example_ids, stored_rows, transformers_architecture
from comera.recipes.bert import BertFormats, ModelConfig
from comera.recipes.code_lm.data import END, PAD, START, Batch, CodeData, CodeDataConfig, prepare, run_files
from comera.recipes.interface import Architecture
from comera.recipes.stages import is_main, log, resolved
from comera.recipes.task import RecipeTask, estimates_by_method, runs_folder
from comera.recipes.tokenizer_files import stored_tokenizer
from comera.trainer.config import TrainConfig
from comera.trainer.loop import fit
from comera.trainer.memory import MemoryEstimate
from comera.trainer.metrics import Summary

NAME = "code-lm"
Preset = Literal["small", "base"]


@dataclass(frozen=True)
class CompressConfig(BertFormats):
    """Formats of the compressed layers; only the method comera uses them."""

    embedding_rank: int | tuple[int, ...] = 32
    """Initial TT-rank of the token embedding."""
    head: Literal["share", "untie", "dense"] = "untie"
    """Output head: share the embedding's cores, untie it as a tensor train of its own, or as a dense weight."""
    head_rank: int | tuple[int, ...] = 64
    """Initial TT-rank of an untied output head."""

    def tensorize(self) -> TensorizeConfig:
        """The conversion; position and segment tables stay dense, as published."""
        overrides: dict[str, TT | TTM | None] = {"*.position_embeddings": None, "*.token_type_embeddings": None}
        if self.head != "share":
            own = TT(order=self.order, rank=self.head_rank)
            overrides["cls.predictions.decoder"] = own if self.head == "untie" else None
        return TensorizeConfig(
            linear=self.linear,
            embedding=self.embedding,
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
PRESETS: dict[Preset, dict[Method, TrainConfig]] = {
    "small": rates_by_method(_SMALL, _SMALL),
    "base": rates_by_method(_TRAIN, replace(_TRAIN, lr=1e-4, core_lr=None)),
}


@dataclass(frozen=True)
class CodeLMConfig:
    """Pre-training of a BERT-style transformer on source code."""

    method: Method = "comera"
    """comera: compressed, with adaptive ranks; dense: the uncompressed model; the others: baselines for comparison."""
    preset: Preset = "base"
    """Where the defaults come from. small: four narrow encoders, about ten minutes on two CPU cores; base: the six
    encoders of the published results."""
    out: str | None = None
    """Folder of the run; default: runs/code-lm-METHOD."""
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

    def __post_init__(self) -> None:
        check_method(self.method)
        check_fields(self, "", {"preset": (self.preset in PRESETS, f"one of {', '.join(PRESETS)}")})
        check_length("data.block_size", self.data.block_size, self.model.max_positions)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return runs_folder(self.out, NAME, self.method)


def preset(method: Method = "comera", preset: Preset = "small") -> CodeLMConfig:
    """The defaults for a method; methods differ in their learning rates."""
    config = CodeLMConfig(method=method, preset=preset, train=PRESETS[preset][method])
    if preset == "small":
        formats = CompressConfig(order=4, rank=24, embedding_order=3, embedding_rank=48)
        return replace(config, model=_SMALL_MODEL, compress=formats)
    return config


def build_model(config: CodeLMConfig, vocab_size: int) -> tuple[BertForMaskedLM, Conversion]:
    """A stock BertForMaskedLM, seeded by train.seed and converted by the method, and the report of that."""
    torch.manual_seed(config.train.seed)
    tokens = {"type_vocab_size": 1, "bos_token_id": START, "pad_token_id": PAD, "eos_token_id": END}
    model = BertForMaskedLM(config.model.bert(vocab_size, **tokens))
    return model, apply_method_(model, config.method, config.compress.tensorize(), config.baselines)


def masked_loss(model: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy of the masked positions, in nats: the head sees (P, H) instead of (B, T, H)."""
    hidden_BTH = model.bert(batch.input_ids)[0]
    logits_PV = model.cls(hidden_BTH.flatten(0, 1)[batch.positions])
    return F.cross_entropy(logits_PV, batch.labels)


def frequency_loss(config: CodeLMConfig, data: CodeData) -> float:
    """Held-out loss, in nats, of a model that ignores its input and knows only the token frequencies: where the head
    starts, and what a model must beat to have learned anything from context."""
    batches = islice(data.held_out_batches(config.train.batch_size), config.train.eval_batches or None)
    frequencies = data.log_frequencies()
    return float(torch.stack([-frequencies[batch.labels].mean() for batch in batches]).mean())


class CodeLMTask(RecipeTask):
    """Masked language modeling, as a task for `comera.trainer.loop.fit`."""

    name = NAME
    config: CodeLMConfig
    data: CodeData

    def __init__(self, config: CodeLMConfig, data: CodeData) -> None:
        model, report = build_model(config, data.vocab_size)
        with torch.no_grad():  # the head starts with the token frequencies: no steps are spent on learning them
            model.cls.predictions.bias.copy_(data.log_frequencies())
        settings = {f"data.{name}": getattr(config.data, name) for name in ("block_size", "mask_share")}
        super().__init__(config, data, model, report, **settings, **config.baselines.identity(config.method))
        self.files = run_files(data.tokenizer, config.model.max_positions)

    def eval_batches(self) -> Iterator[Batch]:
        """Held-out blocks, in batches of the training size."""
        return self.data.held_out_batches(self.config.train.batch_size)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return masked_loss(model, batch)

    def weight(self, batch: Batch) -> int:
        return len(batch.labels)

    def tokens(self, batch: Batch) -> int:
        return batch.input_ids.numel()


def run(config: CodeLMConfig, *, resume: bool = False) -> Summary:
    """Prepare the data, build the model and train it into `config.folder`; raises what `prepare` and `fit` raise."""
    main = is_main(config.train)
    data = prepare(config.data, quiet=not main)
    reached = frequency_loss(config, data)
    log(main, NAME, f"held-out loss from token frequencies alone: {reached:.4f}")
    task = CodeLMTask(config, data)
    task.references = {"loss": {"token frequencies alone": reached}}
    return fit(task, config.train, config.folder, resume=resume, resolved=resolved(config))


def runs(config: CodeLMConfig) -> dict[str, Path]:
    """The folder of the only run, by its method."""
    return {config.method: config.folder}


def estimate(config: CodeLMConfig) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step for every installed method, on the meta device: nothing is allocated or
    computed."""
    rows, width = config.train.batch_size, config.data.block_size
    masked = max(1, round(config.data.mask_share * rows * width))

    def build(method: Method) -> tuple[nn.Module, Conversion, Callable[[], Tensor]]:
        model, report = build_model(replace(config, method=method), config.data.vocab_size)
        ids = (torch.empty(shape, dtype=torch.int64) for shape in [(rows, width), (masked,), (masked,)])
        return model, report, partial(masked_loss, model, Batch(*ids))

    return estimates_by_method(build, config.train)


def architecture(config: CodeLMConfig, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
    """How to rebuild the model of a run."""
    vocab_size = stored_rows(checkpoint, "bert.embeddings.word_embeddings")
    return transformers_architecture(
        BertForMaskedLM,
        lambda: build_model(config, vocab_size)[0],
        {"input_ids": example_ids(vocab_size, config.data.block_size)},
        config.model,
        longest=config.model.max_positions,
        files=stored_tokenizer(checkpoint.parents[1]),
        vocab_size=vocab_size,
    )
