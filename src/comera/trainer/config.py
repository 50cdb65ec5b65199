"""Configuration of a training run. The docstring under a field is its help text on the command line."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal, get_args, get_origin, get_type_hints

from comera.errors import ConfigError, check_fields
from comera.optim.names import OptimizerName
from comera.rank.objective import EarlyStage, LateStage
from comera.trainer.energy import EnergyConfig
from comera.trainer.trackers import TrackerName

# Fields that a resumed run may change: they decide what is shown, written and measured and how it is computed, but not
# what is learned.
_FREE = {
    *("eval_every", "eval_batches", "save_every", "log_every"),
    *("trackers", "progress", "threads", "device", "mode", "recompute", "energy"),
}


_EVAL_STEPS = 100  # between evaluations, without eval_every and epochs
_log = logging.getLogger(__name__)

# Names under which earlier versions stored fields, in config.yaml and in the identities of checkpoints: present names.
_RENAMED = {"clip": "max_grad_norm"}
_FORMATS = {"format": "tt", "embedding": "ttm"}  # of the recipes of transformers, before they were stored
_ALWAYS = {"lr", "core_lr", "table_lr", "rank_lr"}  # in every stored configuration; a user's file has some of them

# field: (smallest value, whether that value itself is allowed)
_BOUNDS: dict[str, tuple[float, bool]] = {
    **dict.fromkeys(("epochs", "max_seconds", "lr"), (0, False)),
    **dict.fromkeys(("seed", "core_lr", "table_lr", "rank_lr", "weight_decay", "max_grad_norm"), (0, True)),
    **dict.fromkeys(("warmup", "final_lr", "prune_every", "eval_every", "eval_batches", "save_every"), (0, True)),
    **dict.fromkeys(("steps", "batch_size", "accumulation", "rank_multiple", "log_every", "threads"), (1, True)),
}


def upgrade_names(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stored configuration or identity, which an earlier version may have written, by present names.

    Versions that stored a whole configuration without `rates` had flat ones, and without `optimizer` AdamW; those that
    stored a recipe's formats without their names had tensor trains and TT-matrices.
    """
    before: dict[str, Any] = {"rates": "flat", "optimizer": "adamw"} if set(stored) >= _ALWAYS else {}
    if "compress.embedding_order" in stored:
        before |= {f"compress.{name}": value for name, value in _FORMATS.items()}
    stored = dict(stored)
    if stored.pop("tensorboard", False):  # a switch of its own
        before["trackers"] = ["tensorboard"]
    trackers = stored.get("trackers")
    if isinstance(trackers, list) and "csv" in trackers:
        _log.warning("train.trackers: there is no csv any more; metrics.jsonl has all of it")
        stored["trackers"] = [name for name in trackers if name != "csv"]
    return before | {_RENAMED.get(name, name): value for name, value in stored.items()}


def upgrade_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration file, which may be a run's config.yaml from an earlier version, likewise."""
    content, train, compress = dict(content), content.get("train"), content.get("compress")
    if isinstance(train, dict):
        content["train"] = upgrade_names(train)
        if set(train) >= _ALWAYS and isinstance(compress, dict) and "embedding_order" in compress:
            causal = "tie" in (content.get("model") or {})  # whose presets have n-grams, as a run of before has not
            content["compress"] = _FORMATS | ({"ngrams": None} if causal else {}) | compress
    return content


@dataclass(frozen=True)
class TrainConfig:
    """How a run is trained: its length, optimizer, rank adaptation, and what it writes.

    Raises ConfigError for a value out of range, or when none of `steps`, `epochs` and `max_seconds` bounds the run.

    Example:
        >>> import comera
        >>> from comera.trainer import TrainConfig
        >>> config = TrainConfig(epochs=3, batch_size=64, lr=2e-3, late=comera.LateStage(target_size=0.5))
        >>> config.bound(epoch=500), config.schedule
        (1500, 'cosine')
        >>> TrainConfig(steps=10, warmup=2.0)
        Traceback (most recent call last):
        comera.errors.ConfigError: train.warmup must be a fraction of the run, >= 0 and < 1, got 2.0
    """

    steps: int | None = None
    """Optimization steps. Of several bounds, the first one reached ends the run."""
    epochs: float | None = None
    """Passes over the training data, for recipes with finite data."""
    max_seconds: float | None = None
    """Wall-clock seconds of training, without evaluation and saving."""

    seed: int = 0
    """Seed of the initial weights, the order of the data and dropout."""
    batch_size: int = 32
    """Examples per micro-batch and process; a step sees batch_size x accumulation x processes of them."""
    accumulation: int = 1
    """Micro-batches per step, whose gradients are averaged."""

    optimizer: OptimizerName = "adamw"
    """muon: orthogonalized momentum for linear layers, dense or compressed, and AdamW for the rest. smmf: Adam with
    factored moments, a sixtieth of its state. adarankgrad, tensor_galore: AdamW on projected gradients of dense
    weights, at ranks that adapt or by all modes of convolutions. adagrad and sgd update only those rows of dense tables
    that are in the batch (dlrm). momentum: SGD with a momentum of 0.9."""
    lr: float = 1e-3
    """Peak learning rate of the dense parameters."""
    rates: Literal["flat", "spectral"] = "spectral"
    """How the rates of cores follow from lr where none is given. flat: they are lr; spectral: a core moves its weight
    as far as lr moves a dense one, for all but Adagrad and SGD, which have flat rates."""
    core_lr: float | None = None
    """Peak learning rate of the cores of linear layers. Default: as `rates` says."""
    table_lr: float | None = None
    """Peak learning rate of the cores of embedding tables. Default: core_lr; without that, as `rates` says."""
    rank_lr: float | None = None
    """Peak learning rate of the gates (rank parameters). Default: lr."""

    weight_decay: float = 0.0
    """Weight decay, never on biases, norms and gates; decoupled but for Adagrad and SGD."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    max_grad_norm: float = 1.0
    """Largest global norm of the gradient; 0 turns clipping off."""

    warmup: float = 0.05
    """Fraction of the run over which the learning rates rise from zero."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rates fall after the warm-up."""
    final_lr: float = 0.0
    """Learning rates at the end of the run, as a fraction of their peaks."""

    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Precision of forward and backward: bf16 is autocast; fp8 is bf16 with the products of tensor train layers (not
    btt) in FP8, emulated where the device has none; parameters and optimizer stay in float32."""
    device: Literal["auto", "cpu"] = "auto"
    """Where to train: auto uses the accelerator if there is one."""
    mode: Literal["eager", "compile", "graph"] = "eager"
    """How a step runs: eager; compile: forward and loss under torch.compile; graph: whole steps as CUDA graphs, or on a
    CPU forward and backward from recordings, one for each shape of batches. A mode that is not possible, or known to be
    slower, falls back to eager, and the run logs why."""

    fuse: bool = True
    """Fuse the blocks around compressed layers (comera.fuse_): MLPs, attention, residuals with dropout and norm."""
    recompute: bool = False
    """Rebuild hidden activations between compressed layers in the backward instead of keeping them: less memory."""

    early: EarlyStage = field(default_factory=EarlyStage)
    """How strongly training pushes the ranks down."""
    late: LateStage = field(default_factory=LateStage)
    """The size to reach, and when to start reducing the ranks to it."""

    prune_every: int = 0
    """Steps between removals of pruned ranks; 0 for none during the run."""
    prune_at_end: bool = True
    """Remove pruned ranks once more at the end of the run."""
    rank_multiple: int = 1
    """Pruning keeps ranks at multiples of this: 8 or 16 suit tensor cores."""

    eval_every: int | None = None
    """Steps between evaluations on held-out data; 0: only at the end. Default: an epoch, or 100 without epochs."""
    eval_batches: int = 0
    """Held-out batches per evaluation; 0 for all."""
    save_every: int = 500
    """Steps between checkpoints; 0: only at a new best evaluation and at the end."""
    log_every: int = 10
    """Steps between records of training metrics; on a GPU each one synchronizes."""

    energy: EnergyConfig = field(default_factory=EnergyConfig)
    """Watts and grid intensity, from which energy and emissions of the run follow."""

    trackers: tuple[TrackerName, ...] = ()
    """Experiment trackers to log to besides metrics.jsonl: tensorboard, wandb, mlflow, or several, such as
    "[tensorboard, wandb]". Their own environment variables (WANDB_PROJECT, MLFLOW_TRACKING_URI, ...) say where to."""
    progress: bool = True
    """Show a progress bar, or a line per evaluation without a terminal."""
    threads: int | None = None
    """CPU threads for PyTorch. Default: its own choice."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # YAML has lists only
        object.__setattr__(self, "trackers", tuple(self.trackers))
        if self.steps is None and self.epochs is None and self.max_seconds is None:
            raise ConfigError(
                "expected a bound of the run, got none: set train.steps, train.epochs, train.max_seconds or several"
            )
        checks = {}
        for name, (low, allowed) in _BOUNDS.items():
            value = getattr(self, name)
            inside = value is None or low < value < float("inf") or (allowed and value == low)
            checks[name] = inside, f"a number {'>=' if allowed else '>'} {low}"
        for name, hint in get_type_hints(TrainConfig).items():
            if get_origin(hint) is Literal:
                checks[name] = getattr(self, name) in get_args(hint), f"one of {', '.join(get_args(hint))}"
        known = get_args(TrackerName)
        decays = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        checks |= {
            "warmup": (self.warmup < 1, "a fraction of the run, >= 0 and < 1"),
            "final_lr": (self.final_lr <= 1, "a fraction of the peak, >= 0 and <= 1"),
            "betas": (decays, "two numbers >= 0 and < 1"),
            "trackers": (
                set(self.trackers) <= set(known) and len(set(self.trackers)) == len(self.trackers),
                f"different ones of {', '.join(known)}",
            ),
        }
        check_fields(self, "train.", checks)

    def bound(self, epoch: int | None) -> int | None:
        """Steps after which the run ends, None if only the clock ends it; epoch: steps per epoch, if there are epochs.

        Raises ConfigError for `epochs` with data that has no end.
        """
        if self.epochs is None:
            return self.steps
        if epoch is None:
            raise ConfigError(
                f"train.epochs is {self.epochs}, but this recipe's data has no end: set train.steps or "
                "train.max_seconds instead"
            )
        steps = max(1, ceil(self.epochs * epoch - 1e-6))  # 0.07 epochs of 100 steps are 7.000000000000001 steps
        return steps if self.steps is None else min(steps, self.steps)

    def eval_steps(self, epoch: int | None) -> int:
        """Steps between evaluations, 0 for one at the end only; epoch: steps per epoch, if there are epochs."""
        return (epoch or _EVAL_STEPS) if self.eval_every is None else self.eval_every

    def identity(self) -> dict[str, Any]:
        """The fields that decide what is learned, JSON-ready. A run resumes only with equal ones."""
        fields = dataclasses.asdict(self)
        fields["betas"] = list(self.betas)
        # If evaluations decide when the late stage begins, they decide what is learned.
        free = _FREE if self.late.plateau is None else _FREE - {"eval_every", "eval_batches"}
        return {name: value for name, value in fields.items() if name not in free}
