"""Classification of texts or pairs, with any encoder of transformers, from scratch or from trained weights.

Runs in stages, see `comera.recipes.stages`; what is learned is in `comera.recipes.classify.task`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from comera.baselines import (
    COMMON_METHODS,
    LINEAR_METHODS,
    BaselineConfig,
    Conversion,
    Method,
    check_method,
    rates_by_method,
)
from comera.errors import ConfigError, check_fields
from comera.files import typed_path
from comera.memory.estimate import MemoryEstimate, count_flops
from comera.rank.objective import EarlyStage, LateStage
from comera.recipes import narrow
from comera.recipes.architectures import check_length, example_ids, stored_rows, transformers_architecture
from comera.recipes.classify.data import (
    MNLI,
    MNLI_LABELS,
    ClassifyDataConfig,
    PreparedExamples,
    find_tokenizer,
    prepare,
)
from comera.recipes.classify.model import (
    CONFIG,
    CompressConfig,
    EncoderConfig,
    config_files,
    convert_,
    dense_config,
    fresh_model,
    longest_text,
    stored_config,
    trained_model,
)
from comera.recipes.classify.task import ClassificationTask, Reads, example_loss, meta_batch, write_results
from comera.recipes.data.tokenizer import stored_tokenizer
from comera.recipes.interface import Architecture
from comera.recipes.stages import check_stages, fit_stages, is_main, log, refuse_existing
from comera.recipes.stages import runs as runs
from comera.recipes.task import estimates_by_method, runs_folder
from comera.trainer.config import TrainConfig
from comera.trainer.metrics import Summary

NAME = "classify"
Preset = Literal["small", "base", "mnli", "mnli-published", "mnli-short", "mnli-small"]
_MODEL = EncoderConfig(dropout=0.1)
_SMALL_MODEL = EncoderConfig(hidden=128, layers=2, heads=4, ffn=512, dropout=0.1)
MODELS: dict[Preset, EncoderConfig] = {
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
_RANKS = CompressConfig(ratio=None, format="tt", order=6, rank=30, embedding_order=4, embedding_rank=30)
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
class ClassifyConfig:
    """Classification of texts or pairs of texts."""

    method: Method = "comera"
    """comera: compressed, in an early stage and late ones; dense: the uncompressed model, for comparison; narrow: a
    dense model of fewer channels that costs as much as the compressed one; the others: further baselines."""
    preset: Preset = "base"
    """Where the defaults come from. small: two small encoders, minutes on two CPU cores; base: BERT's twelve, for a
    GPU. Of MNLI, six encoders: mnli-published: the paper's learning rates and pruning; mnli: the same rates, ranks
    pruned by sensitivity; mnli-short: on 20,000 pairs, an evening on a CPU; mnli-small: two small encoders on the same
    pairs, minutes on a CPU."""
    out: str | None = None
    """Folder of the runs; default: runs/classify-METHOD, or runs/mnli-METHOD."""
    late_targets: tuple[float, ...] = ()
    """Target sizes, as fractions of the size after the early stage; each gets its own late stage."""
    late_epochs: float = 1.0
    """Passes over the training examples in each late stage (train.epochs sets those of the early stage). The size
    shrinks during the first half of them, unless train.late.steps is set."""
    data: ClassifyDataConfig = field(default_factory=ClassifyDataConfig)
    """Texts, labels, tokenizer and lengths."""
    model: EncoderConfig = field(default_factory=lambda: MODELS["base"])
    """The encoder."""
    compress: CompressConfig = field(default_factory=CompressConfig)
    """Formats of the compressed layers."""
    baselines: BaselineConfig = field(default_factory=BaselineConfig)
    """Settings of the other methods."""
    train: TrainConfig = field(default_factory=lambda: _BASE)
    """Length of the early stage, optimizer, rank adaptation and outputs. Limits in steps and seconds apply to each run.
    If late stages follow, the early stage holds its learning rates after the warm-up; they decay in the late stages."""

    def __post_init__(self) -> None:
        check_method(self.method, LINEAR_METHODS)
        check_fields(self, "", {"preset": (self.preset in PRESETS, f"one of {', '.join(PRESETS)}")})
        check_stages(self)
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

    @property
    def folder(self) -> Path:
        """The folder of all runs."""
        return runs_folder(self.out, self.name, self.method)


def preset(method: Method = "comera", preset: Preset = "small") -> ClassifyConfig:
    """The defaults for a method; methods differ in their learning rates."""
    train = PRESETS[preset][method]
    return ClassifyConfig(method=method, preset=preset, model=MODELS[preset], train=train, **_OTHERS[preset])


def build_dense(config: ClassifyConfig, vocab_size: int, pad: int, labels: tuple[str, ...]) -> PretrainedConfig:
    """The configuration of the dense model; of the method narrow, of its narrower one."""

    flops = partial(step_flops, vocab_size=vocab_size, pad=pad, labels=labels)
    return dense_config(narrow.sizes(config, flops), vocab_size, pad, labels)


def build_model(config: ClassifyConfig, about: PretrainedConfig) -> tuple[PreTrainedModel, Conversion]:
    """A stock model of transformers with fresh weights, seeded by train.seed and converted by the method, and the
    report of that."""
    torch.manual_seed(config.train.seed)
    model = fresh_model(about, config.model.option)
    return model, _convert_(config, model, empty=True)


def _convert_(config: ClassifyConfig, model: PreTrainedModel, *, empty: bool = False) -> Conversion:
    own = {"trained": config.model.checkpoint is not None, "published": config.name == "mnli"}
    return convert_(model, config.method, config.compress, config.baselines, **own, empty=empty)


def untrained(
    config: ClassifyConfig, vocab_size: int, pad: int = 0, labels: tuple[str, ...] = MNLI_LABELS
) -> tuple[PreTrainedModel, Conversion]:
    """The model of a configuration with fresh weights, for so many tokens and these labels; and the report of its
    conversion."""
    return build_model(config, build_dense(config, vocab_size, pad, labels))


def step_flops(config: ClassifyConfig, vocab_size: int, pad: int = 0, labels: tuple[str, ...] = MNLI_LABELS) -> int:
    """FLOPs of a training step on examples of maximum length, forward and backward, counted on the meta device."""
    with torch.device("meta"):
        built, _ = build_model(config, dense_config(config.model, vocab_size, pad, labels))
        return count_flops(built, _meta_loss(config, built))


def _meta_loss(config: ClassifyConfig, model: PreTrainedModel) -> Callable[[], Tensor]:
    batch = meta_batch(config.train.batch_size, config.data.max_length)
    return partial(example_loss, model, batch, Reads.of(model))


class ClassifyTask(ClassificationTask):
    """Classification, as a task for `comera.trainer.loop.fit`; first: steps that earlier runs trained. begun:
    parameters of a checkpoint's model that are not in it."""

    config: ClassifyConfig

    def __init__(self, config: ClassifyConfig, data: PreparedExamples, first: int = 0) -> None:
        self.name = config.name
        about = build_dense(config, data.vocab_size, data.tokenizer.pad, data.label_names)
        self.begun: list[str] = []
        if config.model.checkpoint is None:
            model, report = build_model(config, about)
        else:
            torch.manual_seed(config.train.seed)
            model, self.begun = trained_model(config.model.checkpoint, about)
            report = _convert_(config, model)
        longest = longest_text(model)
        if longest is not None:
            check_length("data.max_length", config.data.max_length, longest)
        named = config.name == "mnli" and data.label_names != MNLI_LABELS
        super().__init__(config, data, model, report, first, **{_LABELS: list(data.label_names)} if named else {})
        dense = partial(dense_config, config.model, data.vocab_size, data.tokenizer.pad, data.label_names)
        narrow.note(self, getattr(about, "hidden_size", None), lambda: fresh_model(dense()))
        self.files = {**data.tokenizer.files(config.data.max_length, *self.reads.inputs), **config_files(about)}


def run(config: ClassifyConfig, *, resume: bool = False) -> Summary:
    """Prepare the data and train the runs of `config`, one after the other; returns the summary of the last one. Each
    finished run also writes confusion.json, and with test rows test.json. resume: keep finished runs and continue an
    interrupted one. An interruption ends the current run and skips the rest. Raises ConfigError if a run exists already
    and `resume` is not set, and what `prepare` and `fit` raise."""
    main = is_main(config.train)
    if not resume:
        refuse_existing(config)
    data = prepare(config.data, config.model.source, quiet=not main)

    def task(first: int) -> ClassifyTask:
        made = ClassifyTask(config, data, first)
        if first == 0:
            for line in _about(made):
                log(main, config.name, line)
        return made

    return fit_stages(config, task, resume=resume, finish=write_results)


def _about(task: ClassifyTask) -> list[str]:
    """What became of the model, in lines to print."""
    config, (label, share) = task.config, task.data.most_frequent
    lines = [f"always answering {label!r} is correct for {share:.4f} of the {task.data.dev_size:,} held-out examples"]
    if config.model.checkpoint:
        begun = ", ".join(task.begun) or "nothing"
        lines.append(f"weights of {config.model.checkpoint}; not in it, begun anew: {begun}")
    return lines + narrow.about(task)


def estimate(config: ClassifyConfig) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step on examples of maximum length for every installed method, on the meta device:
    nothing is allocated or computed. The vocabulary is the one asked for, and there are two labels, or MNLI's three."""
    known = config.data.form == "rows" or config.data.tokenizer is not None
    known = known or typed_path(str(config.data.path), "data.path").exists()  # not yet to be downloaded
    given = find_tokenizer(config.data, config.model.source) if known else None
    vocab_size = given.size if given else config.data.vocab_size
    labels = MNLI_LABELS if config.name == "mnli" else ("0", "1")

    def build(method: Method) -> tuple[nn.Module, Conversion, Callable[[], Tensor]]:
        own = replace(config, method=method)
        model, report = untrained(own, vocab_size, labels=labels)
        return model, report, _meta_loss(own, model)

    methods = LINEAR_METHODS if config.model.source is None else COMMON_METHODS
    return estimates_by_method(build, config.train, methods)


def architecture(config: ClassifyConfig, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
    """How to rebuild the model of a run."""
    run = checkpoint.parents[1]
    about = (
        stored_config(run)
        if (run / CONFIG).is_file() or config.name != "mnli"
        else _before(config, identity, checkpoint)
    )
    with torch.device("meta"):
        dense = fresh_model(about)
    reads, longest = Reads.of(dense), longest_text(dense) or config.data.max_length
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
    return build_dense(narrow.as_begun(config, identity), rows, 0, tuple(labels))
