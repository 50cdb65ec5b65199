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
from comera.rank.objective import EarlyStage
from comera.recipes import narrow
from comera.recipes.architectures import check_length, example_ids, transformers_architecture
from comera.recipes.classify.data import ClassifyDataConfig, find_tokenizer, prepare
from comera.recipes.classify.model import (
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
from comera.recipes.classify.prepared import PreparedExamples
from comera.recipes.classify.task import ClassificationTask, Reads, example_loss, meta_batch, write_results
from comera.recipes.interface import Architecture
from comera.recipes.stages import check_stages, fit_stages, is_main, log, refuse_existing
from comera.recipes.stages import runs as runs
from comera.recipes.task import estimates_by_method, runs_folder
from comera.recipes.tokenizer_files import stored_tokenizer
from comera.trainer.config import TrainConfig
from comera.trainer.memory import MemoryEstimate, count_flops
from comera.trainer.metrics import Summary

NAME = "classify"
Preset = Literal["small", "base"]
MODELS: dict[Preset, EncoderConfig] = {
    "small": EncoderConfig(hidden=128, layers=2, heads=4, ffn=512, dropout=0.1, max_positions=128),
    "base": EncoderConfig(hidden=768, layers=12, heads=12, ffn=3072, dropout=0.1),
}
# One rate, that of dense weights: those of the cores follow from it.
_TRAIN = TrainConfig(epochs=3, batch_size=32, lr=5e-4, early=EarlyStage(size_weight=0), prune_every=100)
_BASE = replace(_TRAIN, batch_size=64, lr=1e-4)
PRESETS: dict[Preset, dict[Method, TrainConfig]] = {
    "small": rates_by_method(_TRAIN, _TRAIN),
    "base": rates_by_method(_BASE, _BASE),
}
_LABELS = ("0", "1")  # for estimates, which read no rows


@dataclass(frozen=True)
class ClassifyConfig:
    """Classification of texts or pairs of texts."""

    method: Method = "comera"
    """comera: compressed, in an early stage and late ones; dense: the uncompressed model, for comparison; narrow: a
    dense model of fewer channels that costs as much as the compressed one; the others: further baselines."""
    preset: Preset = "base"
    """Where the defaults come from. small: two small encoders, minutes on two CPU cores; base: BERT's twelve, for a
    GPU."""
    out: str | None = None
    """Folder of the runs; default: runs/classify-METHOD."""
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
    def folder(self) -> Path:
        """The folder of all runs."""
        return runs_folder(self.out, NAME, self.method)


def preset(method: Method = "comera", preset: Preset = "small") -> ClassifyConfig:
    """The defaults for a method; methods differ in their learning rates."""
    return ClassifyConfig(method=method, preset=preset, model=MODELS[preset], train=PRESETS[preset][method])


def build_dense(config: ClassifyConfig, vocab_size: int, pad: int, labels: tuple[str, ...]) -> PretrainedConfig:
    """The configuration of the dense model; of the method narrow, of its narrower one."""

    def flops(own: ClassifyConfig) -> int:
        with torch.device("meta"):
            built, _ = build_model(own, dense_config(own.model, vocab_size, pad, labels))
            return count_flops(built, _meta_loss(own, built))

    return dense_config(narrow.sizes(config, flops), vocab_size, pad, labels)


def build_model(config: ClassifyConfig, about: PretrainedConfig) -> tuple[PreTrainedModel, Conversion]:
    """A stock model of transformers with fresh weights, seeded by train.seed and converted by the method, and the
    report of that."""
    torch.manual_seed(config.train.seed)
    model = fresh_model(about, config.model.option)
    trained = config.model.checkpoint is not None
    return model, convert_(model, config.method, config.compress, config.baselines, trained=trained, empty=True)


def _meta_loss(config: ClassifyConfig, model: PreTrainedModel) -> Callable[[], Tensor]:
    batch = meta_batch(config.train.batch_size, config.data.max_length)
    return partial(example_loss, model, batch, Reads.of(model))


class ClassifyTask(ClassificationTask):
    """Classification, as a task for `comera.trainer.loop.fit`; first: steps that earlier runs trained. begun:
    parameters of a checkpoint's model that are not in it."""

    name = NAME
    config: ClassifyConfig

    def __init__(self, config: ClassifyConfig, data: PreparedExamples, first: int = 0) -> None:
        about = build_dense(config, data.vocab_size, data.tokenizer.pad, data.label_names)
        self.begun: list[str] = []
        if config.model.checkpoint is None:
            model, report = build_model(config, about)
        else:
            torch.manual_seed(config.train.seed)
            model, self.begun = trained_model(config.model.checkpoint, about)
            report = convert_(model, config.method, config.compress, config.baselines, trained=True)
        longest = longest_text(model)
        if longest is not None:
            check_length("data.max_length", config.data.max_length, longest)
        super().__init__(config, data, model, report, first)
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
                log(main, NAME, line)
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
    nothing is allocated or computed. The vocabulary is the one asked for, and there are two labels."""
    given = find_tokenizer(config.data, config.model.source)
    vocab_size = given.size if given else config.data.vocab_size

    def build(method: Method) -> tuple[nn.Module, Conversion, Callable[[], Tensor]]:
        own = replace(config, method=method)
        model, report = build_model(own, build_dense(own, vocab_size, 0, _LABELS))
        return model, report, _meta_loss(own, model)

    methods = LINEAR_METHODS if config.model.source is None else COMMON_METHODS
    return estimates_by_method(build, config.train, methods)


def architecture(config: ClassifyConfig, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
    """How to rebuild the model of a run."""
    run = checkpoint.parents[1]
    about = stored_config(run)
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
