"""Pre-trains a causal language model from scratch on text or code: compressed, dense, narrow or by another baseline.

Next-token prediction on packed blocks, in the family of Llama or GPT-2. Held-out losses are also given in nats per
byte, which does not depend on the vocabulary, beside those of byte n-grams.
B batch, T block size, V vocabulary."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from comera.baselines import (
    LINEAR_METHODS,
    TOKEN_METHODS,
    BaselineConfig,
    Conversion,
    Method,
    apply_method_,
    rates_by_method,
)
from comera.errors import ConfigError
from comera.memory.estimate import MemoryEstimate, shortage
from comera.recipes import base
from comera.recipes.base import runs
from comera.recipes.config import RecipeConfig
from comera.recipes.data.tokenizer import stored_tokenizer
from comera.recipes.lm.data import Batch, LMData, LMDataConfig, prepare
from comera.recipes.lm.model import CLASSES, CompressConfig, ModelConfig, dense_model
from comera.recipes.lm.tokenizer import run_files
from comera.recipes.trained import Architecture, check_length, example_ids, stored_rows, transformers_architecture
from comera.trainer.config import TrainConfig
from comera.trainer.metrics import Summary

__all__ = ["PRESETS", "LMConfig", "LMTask", "architecture", "estimate", "preset", "run", "runs"]

NAME = "lm"
Preset = Literal["small", "base", "llama-1b", "llama-7b"]
METRIC = "nats_per_byte"
METHODS: tuple[Method, ...] = (*LINEAR_METHODS, *TOKEN_METHODS)
_WITHOUT_LINEAR: tuple[Method, ...] = ("comera", "dense", "narrow", *TOKEN_METHODS)  # where layers are no nn.Linear

_TRAIN = TrainConfig(
    steps=10_000, batch_size=16, lr=3e-3, betas=(0.9, 0.95), warmup=0.05, prune_every=500, eval_batches=16
)
_SMALL = replace(_TRAIN, steps=2500, batch_size=8)  # with four blocks of 128 tokens, on two CPU cores


def _by_method(train: TrainConfig) -> dict[Method, TrainConfig]:
    """Muon where the recipe chooses the optimizer, at a rate that was tuned (docs/log.md); AdamW's rate elsewhere."""
    muon = replace(train, optimizer="muon", lr=1e-2)
    return {**rates_by_method(train, train), **dict.fromkeys(_WITHOUT_LINEAR, muon)}


def _of_512(lr: float, table_lr: float | None = None, recompute: bool = False) -> dict[Method, TrainConfig]:
    """Steps of one text of 512 tokens, for models that dense training cannot hold, by AdamW, whose step takes no memory
    besides its moments. lr, table_lr: of the compressed model. recompute: what that can."""
    dense = replace(_TRAIN, batch_size=1, lr=1e-3)
    return rates_by_method(replace(dense, lr=lr, table_lr=table_lr, recompute=recompute), dense)


PRESETS: dict[Preset, dict[Method, TrainConfig]] = {
    "small": _by_method(_SMALL),
    "base": _by_method(_TRAIN),
    "llama-1b": _of_512(lr=5e-4, table_lr=3e-4),  # with 1e-3 for both the loss rose (docs/log.md)
    "llama-7b": _of_512(lr=1e-3, recompute=True),  # not tuned
}
_LARGE: dict[Preset, ModelConfig] = {  # TinyLlama's and Llama's own
    "llama-1b": ModelConfig(hidden=2048, layers=22, heads=32, kv_heads=4, ffn=5632),
    "llama-7b": ModelConfig(hidden=4096, layers=32, heads=32, ffn=11008),
}


@dataclass(frozen=True)
class LMConfig(RecipeConfig):
    """Pre-training of a causal language model on text or code."""

    method: Method = "comera"
    """comera: compressed, with adaptive ranks; dense: the uncompressed model; narrow: a dense model of fewer channels
    that costs as much as the compressed one; hashed_ngrams, summed_tables, narrow_conv: the narrow model with what it
    could have to read more than a token at a position; the others: baselines for comparison."""
    preset: Preset = "base"
    """Where the defaults come from. small: four blocks on short texts, about ten minutes on two CPU cores; base: six
    blocks on longer texts and more steps, hours; llama-1b, llama-7b: the shapes of Llamas of that many parameters, of
    which the compressed model alone ever exists."""
    data: LMDataConfig = field(default_factory=LMDataConfig)
    """Text, tokenizer and blocks."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Sizes of the transformer."""
    compress: CompressConfig = field(default_factory=CompressConfig)
    """Formats of the compressed layers."""
    baselines: BaselineConfig = field(default_factory=BaselineConfig)
    """Settings of the other methods."""
    train: TrainConfig = field(default_factory=lambda: PRESETS["base"]["comera"])
    """Length, optimizer, rank adaptation and outputs."""

    recipe, methods, presets = NAME, METHODS, tuple(PRESETS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length("data.block_size", self.data.block_size, self.context)
        if self.model.family == "gpt2" and self.method not in _WITHOUT_LINEAR:
            raise ConfigError(
                f"method {self.method} converts nn.Linear, of which gpt2 has none: take model.family llama, or a "
                f"method out of {', '.join(_WITHOUT_LINEAR)}"
            )
        if self.compress.head == "share" and not self.model.tie:
            raise ConfigError("compress.head share needs a tied head: set model.tie, or take another compress.head")

    @property
    def context(self) -> int:
        """The longest text that the model reads, in tokens."""
        return self.model.max_positions or self.data.block_size


def preset(method: Method = "comera", preset: Preset = "small") -> LMConfig:
    """The defaults for a method; methods differ in their learning rates."""
    config = LMConfig(method=method, preset=preset, train=PRESETS[preset][method])
    if preset == "small":  # n-grams pay in few steps; at those of base they were not measured
        compress = CompressConfig(ngrams=4)
        return replace(config, data=LMDataConfig(block_size=128), model=ModelConfig(layers=4), compress=compress)
    if preset in _LARGE:
        compress = CompressConfig(rank=16, embedding_rank=128)
        return replace(config, data=LMDataConfig(block_size=512), model=_LARGE[preset], compress=compress)
    return config


def build_model(config: LMConfig, vocab_size: int, separator: int = 0) -> tuple[PreTrainedModel, Conversion]:
    """A stock model of transformers, seeded by train.seed and converted by the method, and the report of that."""
    sizes = base.sizes_of(config, meta_step, vocab_size)
    torch.manual_seed(config.train.seed)
    compresses = config.method == "comera" and config.compress.converts
    with torch.device("meta") if compresses else nullcontext():
        model = dense_model(sizes, vocab_size, config.context, separator)
    if config.method == "narrow":
        return model, None
    if config.method in TOKEN_METHODS:
        return model, config.baselines[config.method].apply_(model)
    report: Conversion = None
    if compresses:
        report = config.compress.tensorize_(model, config.model)
    elif config.method != "comera":
        report = apply_method_(model, config.method, config.compress.tensorize(config.model), config.baselines)
    if config.method == "comera":
        config.compress.add_ngrams_(model)
    return model, report


def meta_step(config: LMConfig, vocab_size: int) -> base.Step:
    """A method's model, the report of its conversion, and the loss of a step."""
    model, report = build_model(config, vocab_size)
    rows, width = config.train.batch_size, config.data.block_size
    batch = Batch(*(torch.empty(shape, dtype=torch.int64) for shape in [(rows, width), (rows, width), (rows,)]))
    return model, report, partial(next_token_loss, model, batch)


def token_losses(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy of every next token, in nats, (B, T)."""
    logits_BTV = model(input_ids=batch.input_ids).logits
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch.labels.flatten(), reduction="none").view_as(batch.labels)


def next_token_loss(model: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy of the next token, in nats. The labels are those of the next tokens already."""
    loss: Tensor = model(input_ids=batch.input_ids, labels=batch.labels, shift_labels=batch.labels).loss
    return loss


class LMTask(base.RecipeTask):
    """Next-token prediction, as a task for `comera.trainer.loop.fit`."""

    keep_logits = False
    config: LMConfig
    data: LMData

    def __init__(self, config: LMConfig, data: LMData) -> None:
        identity = {"data.block_size": config.data.block_size, "data.separator": data.separator}
        build = partial(build_model, vocab_size=data.vocab_size, separator=data.separator)
        super().__init__(config, data, build, identity=identity)
        self.files = run_files(data.tokenizer, data.separator, config.context)
        self.references = {METRIC: data.ngram_losses(config.train.batch_size, config.train.eval_batches)}

    def eval_batches(self) -> Iterator[Batch]:
        """Held-out blocks, in batches of the training size."""
        return self.data.held_out_batches(self.config.train.batch_size)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return next_token_loss(model, batch)

    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], float, Tensor]:
        """Mean loss per token; its weight; and per row the nats and the bytes of its labels, (B, 2)."""
        nats_BT = token_losses(model, batch)
        rows_B2 = torch.stack([nats_BT.double().sum(1), batch.sizes.double()], 1)
        return {"loss": nats_BT.mean()}, self.weight(batch), rows_B2

    def evaluate_rows(self, rows: Tensor) -> Mapping[str, float]:
        nats, sizes = rows.sum(0).tolist()
        return {METRIC: nats / sizes}

    def tokens(self, batch: Batch) -> int:
        return batch.labels.numel()


def run(config: LMConfig, *, resume: bool = False) -> Summary:
    """Prepare the data, build the model and train it into `config.folder`; raises what `prepare` and `fit` raise."""
    data = prepare(config.data, quiet=not base.is_main(config.train))
    step = estimate(config, [config.method], data.vocab_size)[config.method]  # before the model takes any memory
    if lacking := shortage(step, config.train.device):
        base.log(config, lacking)
    task = LMTask(config, data)
    reached = ", ".join(f"{name} {loss:.4f}" for name, loss in task.references[METRIC].items())
    return base.fit_one(task, resume=resume, lines=[f"held-out nats per byte from frequencies alone: {reached}"])


def estimate(
    config: LMConfig, methods: Sequence[Method] = (), vocab_size: int | None = None
) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step for every installed method, on the meta device: nothing is allocated or
    computed. methods: these alone. The vocabulary is by default the one asked for; a small text can give fewer
    tokens."""
    vocab_size = vocab_size or config.data.expected_vocabulary()
    methods = methods or (METHODS if config.model.family == "llama" else _WITHOUT_LINEAR)
    return base.estimates_by_method(config, meta_step, vocab_size, methods=methods, keep_logits=LMTask.keep_logits)


def architecture(config: LMConfig, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
    """How to rebuild the model of a run."""
    embedding = "transformer.wte" if config.model.family == "gpt2" else "model.embed_tokens"
    vocab_size, separator = stored_rows(checkpoint, embedding), int(identity["data.separator"])
    return transformers_architecture(
        CLASSES[config.model.family],
        lambda: build_model(config, vocab_size, separator)[0],
        {"input_ids": example_ids(vocab_size, config.data.block_size)},
        config.model,
        longest=config.context,
        files=stored_tokenizer(checkpoint.parents[1]),
        vocab_size=vocab_size,
    )
