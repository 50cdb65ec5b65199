"""The encoder of a classifier: a BERT of given sizes, or any model of transformers for the classification of sequences,
from its configuration or from trained weights; and how it is compressed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from comera.baselines import BaselineConfig, Conversion, Method, apply_method_
from comera.convert import TensorizeConfig, tensorize_
from comera.convert.registry import converters
from comera.errors import CheckpointError, ConfigError, ConversionError, check_fields
from comera.files import typed_path
from comera.nn.tensor_train import CompressedLayer
from comera.recipes.bert import ModelConfig
from comera.recipes.config import Format, Formats

CONFIG = "config.json"  # of transformers; in a run's folder, so that its model can be built without the checkpoint
SEGMENTS = 2
# The published modes of BERT's token embedding; for linear layers, balanced modes already give the published ones.
_TABLE = (30_522, 768)
_TABLE_ROWS, _TABLE_COLUMNS = (16, 20, 10, 10), (4, 4, 8, 6)


@dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """The encoder: sizes of a BERT, or a model of transformers instead."""

    config: str | None = None
    """Folder with a config.json of transformers, or a model's name on the hub: any encoder of transformers with fresh
    weights, in place of a BERT of the sizes here."""
    checkpoint: str | None = None
    """Folder of a trained model, as save_pretrained wrote it, or a name on the hub: its weights are where training
    starts. A head for these labels is kept, another one begins anew."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config is not None and self.checkpoint is not None:
            raise ConfigError(
                f"expected model.config or model.checkpoint, got both ({self.config}, {self.checkpoint}): a checkpoint "
                "has its own config.json"
            )

    @property
    def source(self) -> str | None:
        """Where the configuration of transformers comes from; None for a BERT of the sizes here."""
        return self.checkpoint or self.config

    @property
    def option(self) -> str:
        """The option that names it."""
        return "model.checkpoint" if self.checkpoint else "model.config"


@dataclass(frozen=True)
class CompressConfig(Formats):
    """Formats of the compressed layers; only the method comera uses them. What is outside of the encoder stays dense,
    the classification head, and so do tables besides that of the tokens."""

    ratio: float | None = 5.0
    """How many times smaller the whole model becomes, at the start, before a table of n-grams is added; none with
    ranks."""
    format: Format | None = None
    """Format of linear layers. btt, a block tensor train, learns most for what it costs; tt, a tensor train, goes to
    much smaller sizes; dense leaves them as they are. Default: btt; tt for decomposed weights, of which two factors
    keep most."""
    order: int | None = None
    """Cores in the tensor train of a linear layer; tt only. Default: 4, 2 for decomposed weights."""
    rank: int | tuple[int, ...] | None = None
    """Initial rank of linear layers, in place of a ratio: one value, clipped where the modes or blocks allow less, or
    for tt all order + 1, ones at both ends."""
    embedding: Literal["ttm", "low_rank"] = "ttm"
    embedding_order: int | None = None
    """Cores in the TT-matrix of the token embedding; ttm only. Default: 3, 2 for decomposed weights."""
    embedding_rank: int | tuple[int, ...] | None = None
    """Initial TT-rank of the token embedding, in place of a ratio."""
    init: Literal["random", "decompose"] | None = None
    """Start from random cores, or from the decomposed weights of a checkpoint. Default: decompose with
    model.checkpoint, else random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = (self.rank, self.embedding_rank)
        checks = {
            "ratio": (self.ratio is None or 1 < self.ratio < float("inf"), "a number > 1, or none with ranks"),
            "init": (self.init in (None, "random", "decompose"), "random or decompose"),
        }
        check_fields(self, "compress.", checks)
        if (self.ratio is None) == (None in ranks) or (self.ratio is not None and ranks != (None, None)):
            raise ConfigError(
                "expected compress.ratio, or compress.rank and compress.embedding_rank, got "
                f"{self.ratio}, {self.rank} and {self.embedding_rank}: set compress.ratio to null for ranks"
            )
        self.tensorize(())  # refuses what no layer can have

    def tensorize(self, kept: tuple[str, ...], trained: bool = False) -> TensorizeConfig:
        """The conversion; kept: names of the layers that stay dense; trained: the weights are those of a checkpoint."""
        init = self.init or ("decompose" if trained else "random")
        usual: Format = "tt" if init == "decompose" else "btt"
        order, table_order = (2, 2) if init == "decompose" else (4, 3)
        own = Formats(
            self.format or usual,
            order if self.order is None else self.order,
            embedding=self.embedding,
            embedding_order=table_order if self.embedding_order is None else self.embedding_order,
            embedding_rank=self.embedding_rank,
        )
        linear = own.linear(self.rank, self.blocks)
        return TensorizeConfig(linear=linear, embedding=own.table(), overrides=dict.fromkeys(kept), init=init)


def labels_of(names: tuple[str, ...]) -> dict[str, Any]:
    """The names of the labels, as fields of a configuration of transformers."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: k for k, name in enumerate(names)}}


def dense_config(model: EncoderConfig, vocab_size: int, pad: int, labels: tuple[str, ...]) -> PretrainedConfig:
    """The configuration of the dense model for these labels and tokens. Raises ConfigError for one that transformers
    does not know, and for a checkpoint that has fewer tokens than the tokenizer."""
    if model.source is None:
        return model.bert(vocab_size, type_vocab_size=SEGMENTS, pad_token_id=pad, **labels_of(labels))
    path = typed_path(model.source, model.option)
    try:
        about = AutoConfig.from_pretrained(str(path), **labels_of(labels))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{model.option}: expected a folder with a {CONFIG} of transformers, or a model's name on the hub, got "
            f"{path} ({' '.join(str(error).split())[:200]})"
        ) from None
    about.problem_type = "single_label_classification"
    if model.checkpoint is None:
        about.vocab_size, about.pad_token_id = vocab_size, pad
        about.architectures = None
    elif vocab_size > about.vocab_size:
        raise ConfigError(
            f"data.tokenizer: expected one with up to the {about.vocab_size:,} tokens of {model.checkpoint}, got "
            f"{vocab_size:,}: take the checkpoint's own tokenizer"
        )
    return about  # type: ignore[no-any-return]


def fresh_model(about: PretrainedConfig, option: str = "model.config") -> PreTrainedModel:
    """A dense model with fresh weights. Raises ConfigError for a configuration of models that do not classify."""
    try:
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(about)
    except ValueError as error:
        raise ConfigError(
            f"{option}: expected the configuration of a model that transformers classifies sequences with, got one of "
            f"{about.model_type!r} ({' '.join(str(error).split())[:120]})"
        ) from None
    return model


def trained_model(checkpoint: str, about: PretrainedConfig) -> tuple[PreTrainedModel, list[str]]:
    """A dense model with the weights of a checkpoint, and the names of the parameters outside of the encoder that begin
    anew. Raises CheckpointError for a folder without weights, or with those of another architecture."""
    path = typed_path(checkpoint, "model.checkpoint")
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            str(path), config=about, ignore_mismatched_sizes=True, output_loading_info=True, dtype=torch.float32
        )
    except Exception as error:  # of many kinds, from a missing file to a damaged one
        raise CheckpointError(
            f"model.checkpoint: expected a folder that save_pretrained of transformers wrote, got {path} "
            f"({' '.join(str(error).split())[:200]})"
        ) from None
    if any(isinstance(module, CompressedLayer) for module in model.modules()):
        raise CheckpointError(
            f"model.checkpoint: expected dense weights, got compressed ones in {path}: export them with `comera export "
            "RUN --to safetensors --dense`"
        )
    mismatched = (entry if isinstance(entry, str) else entry[0] for entry in found["mismatched_keys"])
    begun = {*map(str, found["missing_keys"]), *map(str, mismatched)}
    inside = sorted(name for name in begun if name.startswith(f"{model.base_model_prefix}.") and ".pooler." not in name)
    if inside:
        raise CheckpointError(
            f"model.checkpoint: expected all weights of a {type(model).__name__}, got {path} without {len(inside)} of "
            f"them, such as {inside[0]}, or with other shapes: are they of another architecture than its {CONFIG} says?"
        )
    return model, sorted(begun)


def outside(model: PreTrainedModel) -> tuple[str, ...]:
    """The layers that stay dense: all outside of the encoder, and tables besides that of the tokens."""
    inside, table = f"{model.base_model_prefix}.", model.get_input_embeddings()
    found = []
    for name, layer in model.named_modules():
        converter = converters().get(type(layer))
        if converter is None or converter.convolution is not None or layer is table:
            continue
        if converter.table is not None or not name.startswith(inside):
            found.append(name)
    return tuple(found)


def convert_(
    model: PreTrainedModel,
    method: Method,
    compress: CompressConfig,
    baselines: BaselineConfig,
    *,
    trained: bool,
    empty: bool = False,
    published: bool = False,
) -> Conversion:
    """Convert a dense model in place, as the method does; returns the report of that. trained: its weights are those
    of a checkpoint; empty: they are not there yet, as before a run's own are loaded, so that nothing is decomposed.
    published: as in the paper, BERT's token embedding has the modes of there, and baselines keep the classifier
    alone."""
    if method == "narrow":
        return None
    kept = outside(model)
    formats = compress.tensorize(kept, trained)
    if published:
        table: Any = model.get_input_embeddings()
        if (*table.weight.shape, compress.embedding, compress.embedding_order) == (*_TABLE, "ttm", len(_TABLE_ROWS)):
            modes = replace(formats.embedding, row_modes=_TABLE_ROWS, col_modes=_TABLE_COLUMNS)  # type: ignore[type-var]
            formats = replace(formats, embedding=modes)
        kept = ("classifier",)
    formats = replace(formats, init="random") if empty else formats
    if method == "comera" and compress.ratio is not None:
        try:
            report: Conversion = tensorize_(model, formats, ratio=compress.ratio)
        except ConversionError as error:
            raise ConversionError(
                f"{error}: lower compress.ratio, or take compress.format tt with compress.order 4"
            ) from None
    else:
        report = apply_method_(model, method, formats, baselines, skip=kept)
    if method == "comera":
        compress.add_ngrams_(model)
    return report


def longest_text(model: nn.Module) -> int | None:
    """The longest text that a model of transformers reads, in tokens; None if its configuration sets no limit."""
    limit = getattr(model.config, "max_position_embeddings", None)
    for name, layer in model.named_modules():  # RoBERTa's positions begin after that of the padding
        if name.endswith("position_embeddings") and getattr(layer, "padding_idx", None) is not None:
            limit = layer.num_embeddings - layer.padding_idx - 1
    return limit  # type: ignore[no-any-return]


def stored_config(run: Path) -> PretrainedConfig:
    """The configuration of transformers in a run's folder; raises CheckpointError if it is missing."""
    try:
        return AutoConfig.from_pretrained(str(run / CONFIG))  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"expected the configuration of the run's model in {run / CONFIG}, got none "
            f"({' '.join(str(error).split())[:120]}): put it back"
        ) from None
