"""Classification of texts or pairs, with any encoder of transformers, from scratch or from trained weights.

Runs in stages, see `comera.recipes.base`; what is learned is in `comera.recipes.classify.task`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from comera.baselines import COMMON_METHODS, LINEAR_METHODS, BaselineConfig, Conversion, Method, rates_by_method
from comera.errors import ConfigError
from comera.files import replace_file, typed_path
from comera.memory.estimate import MemoryEstimate
from comera.rank.objective import EarlyStage, LateStage
from comera.recipes import base
from comera.recipes.base import runs
from comera.recipes.classify import model as encoder
from comera.recipes.classify.data import (
    COLUMNS,
    MNLI,
    MNLI_LABELS,
    ClassifyDataConfig,
    PreparedExamples,
    columns,
    find_tokenizer,
    prepare,
)
from comera.recipes.classify.task import Reads, confusion_matrix, example_loss, macro_f1, meta_batch, scores
from comera.recipes.config import StagedConfig
from comera.recipes.data.prepared import ExampleBatch
from comera.recipes.data.tokenizer import stored_tokenizer
from comera.recipes.trained import Architecture, check_length, example_ids, stored_rows, transformers_architecture
from comera.trainer.config import TrainConfig
from comera.trainer.metrics import Summary, to_json

__all__ = ["PRESETS", "ClassifyConfig", "ClassifyTask", "architecture", "estimate", "preset", "run", "runs"]

NAME = "classify"
CONFUSION = "confusion.json"  # in a run's folder; reports draw it
Preset = Literal["small", "base", "mnli", "mnli-published", "mnli-short", "mnli-small"]
_MODEL = encoder.EncoderConfig(dropout=0.1)
_SMALL_MODEL = encoder.EncoderConfig(hidden=128, layers=2, heads=4, ffn=512, dropout=0.1)
MODELS: dict[Preset, encoder.EncoderConfig] = {
    "small": replace(_SMALL_MODEL, max_positions=128),
    "base": replace(_MODEL, layers=12),
    **dict.fromkeys(("mnli", "mnli-published", "mnli-short"), _MODEL),
    "mnli-small": _SMALL_MODEL,
}
# One rate, that of dense weights: those of the cores follow from it.
_TRAIN = TrainConfig(epochs=3, batch_size=32, lr=5e-4, early=EarlyStage(size_weight=0), prune_every=100)
_BASE = replace(_TRAIN, batch_size=64, lr=1e-4)
# docs/method.md §9: AdamW without weight decay, batches of 32 to 128, ranks shrunk by the size's surrogate.
_PUBLISHED = TrainConfig(
    epochs=6, batch_size=64, lr=5e-5, core_lr=1e-4, rank_lr=1e-3, prune_every=100, late=LateStage(shrink="surrogate")
)
# The token embedding's cores at ten times the rate of the other cores: it learns far faster (docs/log.md).
_TUNED = replace(_PUBLISHED, table_lr=1e-3, late=LateStage())
# Six encoders on two CPU cores: small batches, as escaping the majority class takes steps rather than pairs.
_SHORT = replace(_TUNED, epochs=1.2, batch_size=16, early=EarlyStage(size_weight=0))
# Two small encoders that learn in minutes on two CPU cores, at measured rates (docs/log.md).
_SMALL = replace(_SHORT, epochs=2, batch_size=32, lr=5e-4, core_lr=1e-3, table_lr=2e-3, prune_every=40, eval_every=250)
PRESETS: dict[Preset, dict[Method, TrainConfig]] = {
    "small": rates_by_method(_TRAIN, _TRAIN),
    "base": rates_by_method(_BASE, _BASE),
    "mnli": rates_by_method(_TUNED, _TUNED),
    "mnli-published": rates_by_method(_PUBLISHED, _PUBLISHED),
    "mnli-short": rates_by_method(_SHORT, replace(_SHORT, core_lr=None, table_lr=None)),
    "mnli-small": rates_by_method(_SMALL, replace(_SMALL, core_lr=None, table_lr=None)),
}
_RANKS = encoder.CompressConfig(ratio=None, format="tt", order=6, rank=30, embedding_order=4, embedding_rank=30)
# what else differs from the defaults, for every preset of MNLI and for some
_MNLI: dict[str, Any] = {"late_targets": (0.8, 0.5, 0.2), "late_epochs": 2.0, "data": MNLI, "compress": _RANKS}
_OTHERS: dict[Preset, dict[str, Any]] = {
    "small": {},
    "base": {},
    "mnli": _MNLI,
    "mnli-published": _MNLI,
    "mnli-short": _MNLI | {"late_epochs": 1.2, "data": replace(MNLI, max_examples=20_000, buckets=32)},
    "mnli-small": _MNLI
    | {
        "late_epochs": 1.0,
        "data": replace(MNLI, max_examples=20_000),
        "compress": replace(_RANKS, order=4, rank=24, embedding_order=3, embedding_rank=48),
    },
}
_LABELS = "data.label_names"  # in a run's identity, if they are not MNLI's


@dataclass(frozen=True)
class ClassifyConfig(StagedConfig):
    """Classification of texts or pairs of texts."""

    method: Method = "comera"
    """comera: compressed, in an early stage and late ones; dense: the uncompressed model, for comparison; narrow: a
    dense model of fewer channels that costs as much as the compressed one; the others: further baselines."""
    preset: Preset = "base"
    """Where the defaults come from. small: two small encoders, minutes on two CPU cores; base: BERT's twelve, for a
    GPU. Of MNLI, six encoders: mnli-published: the paper's learning rates and pruning; mnli: the same rates, ranks
    pruned by sensitivity; mnli-short: on 20,000 pairs, an evening on a CPU; mnli-small: two small encoders on the same
    pairs, minutes on a CPU."""
    data: ClassifyDataConfig = field(default_factory=ClassifyDataConfig)
    """Texts, labels, tokenizer and lengths."""
    model: encoder.EncoderConfig = field(default_factory=lambda: MODELS["base"])
    """The encoder."""
    compress: encoder.CompressConfig = field(default_factory=encoder.CompressConfig)
    """Formats of the compressed layers."""
    baselines: BaselineConfig = field(default_factory=BaselineConfig)
    """Settings of the other methods."""
    train: TrainConfig = field(default_factory=lambda: _BASE)
    """Length of the early stage, optimizer, rank adaptation and outputs. Limits in steps and seconds apply to each run.
    If late stages follow, the early stage holds its learning rates after the warm-up; they decay in the late stages."""

    recipe, methods, presets = NAME, LINEAR_METHODS, tuple(PRESETS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.source is None:
            check_length("data.max_length", self.data.max_length, self.model.max_positions)
        else:
            self._check_source()
        if self.compress.init == "decompose" and self.model.checkpoint is None:
            raise ConfigError("compress.init decompose needs trained weights: set model.checkpoint, or take random")

    def _check_source(self) -> None:
        """Raise ConfigError for sizes beside a model that has its own."""
        sizes = MODELS[self.preset]
        for name in ("hidden", "layers", "heads", "ffn", "dropout", "max_positions"):
            if getattr(self.model, name) != getattr(sizes, name):
                raise ConfigError(
                    f"model.{name}: expected the sizes of {self.model.option} {self.model.source} alone, got "
                    f"{getattr(self.model, name)}: change its config.json, or leave out {self.model.option}"
                )
        if self.method == "narrow":
            raise ConfigError(
                f"method narrow: expected a BERT of sizes that can be lowered, got {self.model.option}: leave that "
                "out, or take another method"
            )

    @property
    def name(self) -> str:
        """The name under which its runs are known: mnli, once a recipe of its own, for form mnli."""
        return "mnli" if self.data.form == "mnli" else NAME


def preset(method: Method = "comera", preset: Preset = "small") -> ClassifyConfig:
    """The defaults for a method; methods differ in their learning rates."""
    train = PRESETS[preset][method]
    return ClassifyConfig(method=method, preset=preset, model=MODELS[preset], train=train, **_OTHERS[preset])


def build_dense(config: ClassifyConfig, vocab_size: int, pad: int, labels: tuple[str, ...]) -> PretrainedConfig:
    """The configuration of the dense model; of the method narrow, of its narrower one."""
    sizes = (vocab_size, pad, labels)
    return encoder.dense_config(base.sizes_of(config, meta_step, *sizes), *sizes)


def build_model(config: ClassifyConfig, about: PretrainedConfig) -> tuple[PreTrainedModel, Conversion]:
    """A stock model of transformers with fresh weights, seeded by train.seed and converted by the method, and the
    report of that."""
    torch.manual_seed(config.train.seed)
    model = encoder.fresh_model(about, config.model.option)
    return model, _convert_(config, model, empty=True)


def _convert_(config: ClassifyConfig, model: PreTrainedModel, *, empty: bool = False) -> Conversion:
    own = {"trained": config.model.checkpoint is not None, "published": config.name == "mnli"}
    return encoder.convert_(model, config.method, config.compress, config.baselines, **own, empty=empty)


def untrained(
    config: ClassifyConfig, vocab_size: int, pad: int = 0, labels: tuple[str, ...] = MNLI_LABELS
) -> tuple[PreTrainedModel, Conversion]:
    """The model of a configuration with fresh weights, for so many tokens and these labels; and the report of its
    conversion."""
    return build_model(config, build_dense(config, vocab_size, pad, labels))


def meta_step(
    config: ClassifyConfig, vocab_size: int, pad: int = 0, labels: tuple[str, ...] = MNLI_LABELS
) -> base.Step:
    """A method's model, the report of its conversion, and the loss of a step on examples of maximum length."""
    model, report = untrained(config, vocab_size, pad, labels)
    batch = meta_batch(config.train.batch_size, config.data.max_length)
    return model, report, partial(example_loss, model, batch, Reads.of(model))


class ClassifyTask(base.RecipeTask):
    """Classification, as a task for `comera.trainer.loop.fit`. first: steps that earlier runs trained. part: of the
    data to evaluate on. confusion: of the last evaluation. begun: parameters of a checkpoint's model that are not in
    it."""

    part: Literal["dev", "test"] = "dev"
    confusion: Tensor | None = None
    config: ClassifyConfig
    data: PreparedExamples

    def __init__(self, config: ClassifyConfig, data: PreparedExamples, first: int = 0) -> None:
        sizes = (data.vocab_size, data.tokenizer.pad, data.label_names)
        about = build_dense(config, *sizes)
        self.begun: list[str] = []
        identity: dict[str, Any] = {"data.first_step": first}
        if config.name == "mnli" and data.label_names != MNLI_LABELS:
            identity[_LABELS] = list(data.label_names)

        def build(own: ClassifyConfig) -> tuple[PreTrainedModel, Conversion]:
            if config.model.checkpoint is None:
                return build_model(own, about if own is config else build_dense(own, *sizes))
            torch.manual_seed(config.train.seed)
            model, self.begun = encoder.trained_model(config.model.checkpoint, about)
            return model, _convert_(config, model)

        super().__init__(config, data, build, first, identity=identity)
        longest = encoder.longest_text(self.model)
        if longest is not None:
            check_length("data.max_length", config.data.max_length, longest)
        self.reads = Reads.of(self.model)
        self.steps_per_epoch = self.epoch_length()
        label, share = data.most_frequent
        self.references = {"accuracy": {f"always {label}": share}}
        tokenizer = data.tokenizer.files(config.data.max_length, *self.reads.inputs)
        read = json.dumps(columns(data, config.data))
        self.files = {**tokenizer, encoder.CONFIG: about.to_json_string(use_diff=True), COLUMNS: read}

    def about(self) -> list[str]:
        """What became of the model, in lines to print."""
        (label, share), size = self.data.most_frequent, self.data.dev_size
        lines = [f"always answering {label!r} is correct for {share:.4f} of the {size:,} held-out examples"]
        if self.config.model.checkpoint:
            begun = ", ".join(self.begun) or "nothing"
            lines.append(f"weights of {self.config.model.checkpoint}; not in it, begun anew: {begun}")
        return lines + super().about()

    def eval_batches(self) -> Iterator[ExampleBatch]:
        """The held-out or test examples in batches of the training size; always the same, in the same order."""
        part = self.data.test if self.part == "test" else self.data.dev
        assert part is not None
        batches = list(part.sorted(self.config.train.batch_size))
        Random(0).shuffle(batches)  # sorted by length before: so the first few represent all
        return iter(batches)

    def loss(self, model: nn.Module, batch: ExampleBatch) -> Tensor:
        return example_loss(model, batch, self.reads)

    def evaluate(self, model: nn.Module, batch: ExampleBatch) -> tuple[dict[str, Tensor], int, Tensor]:
        """Loss and accuracy, means over the batch; its number of examples; their answers and labels (B, 2)."""
        logits = scores(model, batch, self.reads)
        answers = logits.argmax(-1)
        means = {"loss": F.cross_entropy(logits, batch.labels), "accuracy": (answers == batch.labels).float().mean()}
        return means, len(batch.labels), torch.stack([answers, batch.labels], 1)

    def evaluate_rows(self, rows: Tensor) -> dict[str, float]:
        """Macro F1; the confusion matrix is kept for the end of the run."""
        self.confusion = confusion_matrix(rows[:, 0], rows[:, 1], len(self.data.label_names))
        return {"f1": macro_f1(self.confusion)}

    def weight(self, batch: ExampleBatch) -> int:
        return len(batch.labels)

    def tokens(self, batch: ExampleBatch) -> int:
        """Tokens that the model reads; padding does not count."""
        return int(batch.attention_mask.sum())

    def finish(self, folder: Path, summary: Summary) -> None:
        """Write confusion.json of a finished run, and test.json where there are test examples, unless they are
        there."""
        path = folder / CONFUSION
        if not summary.finished or path.exists():
            return
        if self.confusion is None:  # an earlier call finished the run
            base.evaluate_last(self, folder)
        matrices = {"held-out": self.confusion}
        if self.data.test is not None:
            self.part = "test"
            base.write_test(self, folder)
            matrices["test"] = self.confusion
        if base.is_main(self.config.train):
            counts = {part: matrix.tolist() for part, matrix in matrices.items() if matrix is not None}
            replace_file(path, to_json({"labels": list(self.data.label_names), "counts": counts}) + "\n")
            label, share = self.data.most_frequent
            values = ", ".join(f"{name} {value:.4f}" for name, value in summary.metrics.items())
            base.log(self.config, f"held-out: {values}; always answering {label!r} has accuracy {share:.4f}")


def run(config: ClassifyConfig, *, resume: bool = False) -> Summary:
    """Prepare the data and train the runs of `config`, one after the other; returns the summary of the last one. Each
    finished run also writes confusion.json, and with test rows test.json. resume: keep finished runs and continue an
    interrupted one. An interruption ends the current run and skips the rest. Raises ConfigError if a run exists already
    and `resume` is not set, and what `prepare` and `fit` raise."""
    if not resume:
        base.refuse_existing(config)
    data = prepare(config.data, config.model.source, quiet=not base.is_main(config.train))

    def task(first: int) -> ClassifyTask:
        made = ClassifyTask(config, data, first)
        if first == 0:
            base.log(config, *made.about())
        return made

    return base.fit_stages(config, task, resume=resume)


def estimate(config: ClassifyConfig) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step on examples of maximum length for every installed method, on the meta device:
    nothing is allocated or computed. The vocabulary is the one asked for, and there are two labels, or MNLI's three."""
    known = config.data.form == "rows" or config.data.tokenizer is not None
    known = known or typed_path(str(config.data.path), "data.path").exists()  # not yet to be downloaded
    given = find_tokenizer(config.data, config.model.source) if known else None
    vocab_size = given.size if given else config.data.vocab_size
    labels = MNLI_LABELS if config.name == "mnli" else ("0", "1")
    methods = LINEAR_METHODS if config.model.source is None else COMMON_METHODS
    return base.estimates_by_method(config, meta_step, vocab_size, 0, labels, methods=methods)


def architecture(config: ClassifyConfig, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
    """How to rebuild the model of a run."""
    run = checkpoint.parents[1]
    about = (
        encoder.stored_config(run)
        if (run / encoder.CONFIG).is_file() or config.name != "mnli"
        else _before(config, identity, checkpoint)
    )
    with torch.device("meta"):
        dense = encoder.fresh_model(about)
    reads, longest = Reads.of(dense), encoder.longest_text(dense) or config.data.max_length
    ids_BT = example_ids(about.vocab_size, config.data.max_length)
    middle = ids_BT.shape[1] // 2
    segments_BT, mask_BT = torch.zeros_like(ids_BT), torch.ones_like(ids_BT)
    segments_BT[:, middle:] = 1
    mask_BT[1::2, middle + 1 :] = 0  # every other example is shorter
    inputs = {"input_ids": ids_BT, "token_type_ids": segments_BT, "attention_mask": mask_BT}
    return transformers_architecture(
        type(dense),
        lambda: build_model(config, about)[0],
        {name: inputs[name] for name in reads.inputs},
        config.model,
        longest=longest,
        files=stored_tokenizer(run),
        vocab_size=about.vocab_size,
        labels=len(about.id2label or {}),
    )


def _before(config: ClassifyConfig, identity: Mapping[str, Any], checkpoint: Path) -> PretrainedConfig:
    """The configuration of a run of mnli from before runs stored it."""
    rows, labels = stored_rows(checkpoint, "bert.embeddings.word_embeddings"), identity.get(_LABELS, MNLI_LABELS)
    return build_dense(config, rows, 0, tuple(labels))
