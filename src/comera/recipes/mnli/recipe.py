"""Natural-language inference on MNLI: trains the published six-encoder transformer from scratch, compressed or not.

Runs in stages, see `comera.recipes.stages`; what is learned is in `comera.recipes.classify.task`.
B batch, T tokens of the longest pair in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import BertForSequenceClassification

from comera.baselines import (
    LINEAR_METHODS,
    BaselineConfig,
    Conversion,
    Method,
    apply_method_,
    check_method,
    rates_by_method,
)
from comera.convert import TensorizeConfig
from comera.errors import check_fields
from comera.rank.objective import EarlyStage, LateStage
from comera.recipes import narrow
from comera.recipes.architectures import check_length, example_ids, stored_rows, transformers_architecture
from comera.recipes.bert import BertFormats, ModelConfig
from comera.recipes.classify.prepared import PreparedExamples
from comera.recipes.classify.task import ClassificationTask, example_loss, meta_batch, write_results
from comera.recipes.interface import Architecture
from comera.recipes.mnli.data import MNLIDataConfig, find_vocabulary, prepare
from comera.recipes.mnli.files import LABELS
from comera.recipes.paths import typed_path
from comera.recipes.stages import check_stages, fit_stages, is_main, log, refuse_existing
from comera.recipes.stages import runs as runs
from comera.recipes.task import estimates_by_method, runs_folder
from comera.recipes.tokenizer_files import stored_tokenizer
from comera.recipes.tokenizers import parse_vocabulary
from comera.trainer.config import TrainConfig
from comera.trainer.memory import MemoryEstimate, count_flops
from comera.trainer.metrics import Summary

NAME = "mnli"
_LABELS = "data.label_names"  # in a run's identity, if they are not MNLI's
Preset = Literal["tuned", "published", "short", "small"]

# The published modes of BERT's token embedding; for linear layers, balanced modes already give the published ones.
_TABLE = (30_522, 768)
_TABLE_ROWS, _TABLE_COLUMNS = (16, 20, 10, 10), (4, 4, 8, 6)


@dataclass(frozen=True)
class CompressConfig(BertFormats):
    """Formats of the compressed layers; only the method comera uses them. The defaults are the published ones."""

    def tensorize(self, vocab_size: int, hidden: int) -> TensorizeConfig:
        """The conversion; position and segment tables and the classifier stay dense, as published."""
        table = self.table
        published = (vocab_size, hidden) == _TABLE and self.embedding_order == len(_TABLE_ROWS)
        if published and self.embedding == "ttm":
            table = replace(table, row_modes=_TABLE_ROWS, col_modes=_TABLE_COLUMNS)
        dense = ("*.position_embeddings", "*.token_type_embeddings", "classifier")
        return TensorizeConfig(linear=self.linear, embedding=table, overrides=dict.fromkeys(dense))


# docs/method.md §9: AdamW without weight decay, batches of 32 to 128, ranks shrunk by the size's surrogate.
_PUBLISHED = TrainConfig(
    epochs=6, batch_size=64, lr=5e-5, core_lr=1e-4, rank_lr=1e-3, prune_every=100, late=LateStage(shrink="surrogate")
)
# The token embedding's cores at ten times the rate of the other cores: it learns far faster (docs/log.md).
_TUNED = replace(_PUBLISHED, table_lr=1e-3, late=LateStage())
# Six encoders on two CPU cores: small batches, as escaping the majority class takes steps rather than pairs.
_SHORT = replace(_TUNED, epochs=1.2, batch_size=16, early=EarlyStage(size_weight=0))
# Two small encoders that learn in minutes on two CPU cores, at measured rates (docs/log.md).
_SMALL = replace(
    _TUNED,
    epochs=2,
    batch_size=32,
    lr=5e-4,
    core_lr=1e-3,
    table_lr=2e-3,
    early=EarlyStage(size_weight=0),
    prune_every=40,
    eval_every=250,
)
_SMALL_MODEL = ModelConfig(hidden=128, layers=2, heads=4, ffn=512, dropout=0.1)


PRESETS: dict[Preset, dict[Method, TrainConfig]] = {
    "tuned": rates_by_method(_TUNED, _TUNED),
    "published": rates_by_method(_PUBLISHED, _PUBLISHED),
    "short": rates_by_method(_SHORT, replace(_SHORT, core_lr=None, table_lr=None)),
    "small": rates_by_method(_SMALL, replace(_SMALL, core_lr=None, table_lr=None)),
}


@dataclass(frozen=True)
class MNLIConfig:
    """Natural-language inference: does one sentence follow from another, contradict it, or neither."""

    method: Method = "comera"
    """comera: compressed, in an early stage and late ones; dense: the uncompressed model, for comparison; narrow: a
    dense model of fewer channels that costs as much as the compressed one; the others: further baselines."""
    preset: Preset = "tuned"
    """Where the defaults come from. published: the paper's learning rates and pruning; tuned: the same rates, ranks
    pruned by sensitivity; short: six encoders on 20,000 pairs, an evening on a CPU; small: two small encoders on the
    same pairs, minutes on a CPU. short and small have learning rates of their own."""
    out: str | None = None
    """Folder of the runs; default: runs/mnli-METHOD."""
    late_targets: tuple[float, ...] = (0.8, 0.5, 0.2)
    """Target sizes, as fractions of the size after the early stage; each gets its own late stage."""
    late_epochs: float = 2.0
    """Passes over the training pairs in each late stage (train.epochs sets those of the early stage). The size shrinks
    during the first half of them, unless train.late.steps is set."""
    data: MNLIDataConfig = field(default_factory=MNLIDataConfig)
    """Sentence pairs, vocabulary and lengths."""
    model: ModelConfig = field(default_factory=lambda: ModelConfig(dropout=0.1))
    """Sizes of the transformer."""
    compress: CompressConfig = field(default_factory=CompressConfig)
    """Formats of the compressed layers."""
    baselines: BaselineConfig = field(default_factory=BaselineConfig)
    """Settings of the other methods."""
    train: TrainConfig = field(default_factory=lambda: _TUNED)
    """Length of the early stage, optimizer, rank adaptation and outputs. Limits in steps and seconds apply to each run.
    If late stages follow, the early stage holds its learning rates after the warm-up; they decay in the late stages."""

    def __post_init__(self) -> None:
        check_method(self.method, LINEAR_METHODS)
        check_fields(self, "", {"preset": (self.preset in PRESETS, f"one of {', '.join(PRESETS)}")})
        check_stages(self)
        check_length("data.max_length", self.data.max_length, self.model.max_positions)

    @property
    def folder(self) -> Path:
        """The folder of all runs."""
        return runs_folder(self.out, NAME, self.method)


def preset(method: Method = "comera", preset: Preset = "small") -> MNLIConfig:
    """The defaults for a method; methods differ in their learning rates."""
    config = MNLIConfig(method=method, preset=preset, train=PRESETS[preset][method])
    if preset == "short":
        return replace(config, data=MNLIDataConfig(max_examples=20_000, buckets=32), late_epochs=1.2)
    if preset == "small":
        formats = CompressConfig(order=4, rank=24, embedding_order=3, embedding_rank=48)
        data = MNLIDataConfig(max_examples=20_000)
        return replace(config, data=data, model=_SMALL_MODEL, compress=formats, late_epochs=1.0)
    return config


def build_model(
    config: MNLIConfig, vocab_size: int, labels: Sequence[str] = LABELS
) -> tuple[BertForSequenceClassification, Conversion]:
    """A stock BertForSequenceClassification, seeded by train.seed and converted by the method, and the report of that;
    the classifier stays dense. labels: their names."""
    sizes = narrow.sizes(config, partial(step_flops, vocab_size=vocab_size))
    torch.manual_seed(config.train.seed)
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: k for k, name in enumerate(labels)}}
    model = BertForSequenceClassification(sizes.bert(vocab_size, type_vocab_size=2, **names))
    if config.method == "narrow":
        return model, None
    formats = config.compress.tensorize(vocab_size, config.model.hidden)
    return model, apply_method_(model, config.method, formats, config.baselines, skip=("classifier",))


def step_flops(config: MNLIConfig, vocab_size: int) -> int:
    """FLOPs of a training step on pairs of maximum length, forward and backward, counted on the meta device."""
    with torch.device("meta"):
        model, _ = build_model(config, vocab_size)
        return count_flops(model, _meta_loss(config, model))


def _meta_loss(config: MNLIConfig, model: nn.Module) -> Callable[[], Tensor]:
    return partial(example_loss, model, meta_batch(config.train.batch_size, config.data.max_length))


class MNLITask(ClassificationTask):
    """Classification of pairs, as a task for `comera.trainer.loop.fit`; first: steps that earlier runs trained."""

    name = NAME
    config: MNLIConfig

    def __init__(self, config: MNLIConfig, data: PreparedExamples, first: int = 0) -> None:
        model, report = build_model(config, data.vocab_size, data.label_names)
        settings = {_LABELS: list(data.label_names)} if data.label_names != LABELS else {}
        super().__init__(config, data, model, report, first, **settings)
        dense = replace(config, method="dense")
        narrow.note(self, model.config.hidden_size, lambda: build_model(dense, data.vocab_size, data.label_names)[0])
        self.files = data.tokenizer.files(config.data.max_length)


def run(config: MNLIConfig, *, resume: bool = False) -> Summary:
    """Prepare the data and train the runs of `config`, one after the other; returns the summary of the last one.
    resume: keep finished runs and continue an interrupted one. An interruption ends the current run and skips the rest.
    Raises ConfigError if a run exists already and `resume` is not set, and what `prepare` and `fit` raise."""
    main = is_main(config.train)
    if not resume:
        refuse_existing(config)
    data = prepare(config.data, quiet=not main)
    log(main, NAME, _about(data))

    def task(first: int) -> MNLITask:
        made = MNLITask(config, data, first)
        if first == 0:
            for line in narrow.about(made):
                log(main, NAME, line)
        return made

    return fit_stages(config, task, resume=resume, finish=write_results)


def _about(data: PreparedExamples) -> str:
    """What was skipped and why, and the accuracy of a model that ignores its input: the one to beat."""
    skipped = {why: count for why, count in data.skipped.items() if count}
    reasons = f" ({', '.join(f'{why}: {count:,}' for why, count in skipped.items())})" if skipped else ""
    label, share = data.most_frequent
    return (
        f"{sum(skipped.values()):,} pairs skipped{reasons}; always answering {label!r} is correct for "
        f"{share:.4f} of the {data.dev_size:,} held-out pairs"
    )


def estimate(config: MNLIConfig) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step on pairs of maximum length for every installed method, on the meta device:
    nothing is allocated or computed, and only the vocabulary is read."""
    vocab_size = _vocab_size(config.data)

    def build(method: Method) -> tuple[nn.Module, Conversion, Callable[[], Tensor]]:
        model, report = build_model(replace(config, method=method), vocab_size)
        return model, report, _meta_loss(config, model)

    return estimates_by_method(build, config.train, LINEAR_METHODS)


def architecture(config: MNLIConfig, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
    """How to rebuild the model of a run."""
    vocab_size = stored_rows(checkpoint, "bert.embeddings.word_embeddings")
    labels, config = identity.get(_LABELS, LABELS), narrow.as_begun(config, identity)
    ids_BT = example_ids(vocab_size, config.data.max_length)
    middle = ids_BT.shape[1] // 2
    segments_BT, mask_BT = torch.zeros_like(ids_BT), torch.ones_like(ids_BT)
    segments_BT[:, middle:] = 1
    mask_BT[1::2, middle + 1 :] = 0  # every other pair is shorter
    return transformers_architecture(
        BertForSequenceClassification,
        lambda: build_model(config, vocab_size, labels)[0],
        {"input_ids": ids_BT, "token_type_ids": segments_BT, "attention_mask": mask_BT},
        config.model,
        longest=config.model.max_positions,
        files=stored_tokenizer(checkpoint.parents[1]),
        vocab_size=vocab_size,
        labels=len(labels),
    )


def _vocab_size(config: MNLIDataConfig) -> int:
    """Size of the vocabulary; BERT's if the data is yet to be downloaded and no vocabulary is named."""
    if config.vocab is None and not typed_path(config.path, "data.path").exists():
        return _TABLE[0]
    file = find_vocabulary(config)
    return max(parse_vocabulary(file.read_bytes(), file).values()) + 1
