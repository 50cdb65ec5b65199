"""Configuration of the recipe. The docstring under a field is its help text on the command line."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from comera.baselines import Method, check_method
from comera.baselines.narrow import Narrow
from comera.errors import ConfigError, check_fields
from comera.optim.zeroth_order import LAYOUTS, Layout, adaptive_queries
from comera.rank.objective import EarlyStage
from comera.recipes.pinn.model import CompressConfig, ModelConfig
from comera.recipes.task import runs_folder
from comera.trainer.config import TrainConfig

NAME = "pinn"
Preset = Literal["backward", "forward"]
Rule = Literal["sparse-grid", "monte-carlo"]
METHODS: tuple[Method, ...] = ("comera", "dense", "narrow")


@dataclass(frozen=True)
class SteinConfig:
    """Derivatives from values of the network (derivatives stein)."""

    rule: Rule = "sparse-grid"
    """Where the network is evaluated around each point. sparse-grid: 2n² + 2n + 1 places for n inputs, always the same
    ones; monte-carlo: places drawn in each step."""
    sigma: float = 0.1
    """Standard deviation of the Gaussian that smooths the network."""
    samples: int = 64
    """Places of the rule monte-carlo, an even number."""

    def __post_init__(self) -> None:
        checks = {
            "rule": (self.rule in get_args(Rule), f"one of {', '.join(get_args(Rule))}"),
            "sigma": (0 < self.sigma < float("inf"), "a number > 0"),
            "samples": (self.samples >= 2 and self.samples % 2 == 0, "an even number >= 2"),
        }
        check_fields(self, "stein.", checks)


@dataclass(frozen=True)
class ZerothOrderConfig:
    """Gradients from values of the loss (gradients zeroth-order)."""

    eps: float = 1e-3
    """How far each parameter is moved."""
    queries: float = 8
    """Random directions of a step, each with two values of the loss; with growth > 0 the factor of their number."""
    growth: float = 0.0
    """Power with which queries grow with the epoch e, as in AdaZeta: min(queries x e^growth, max_queries)."""
    max_queries: int = 32
    """The most directions of a step."""
    epoch: int = 100
    """Steps that count as an epoch of this schedule."""
    layout: Layout = "whole"
    """whole: all parameters are moved together; tensors: one core or bias at a time, for as many queries each."""

    def __post_init__(self) -> None:
        checks = {
            "eps": (0 < self.eps < float("inf"), "a number > 0"),
            "queries": (1 <= self.queries < float("inf"), "a number >= 1"),
            "growth": (0 <= self.growth < float("inf"), "a number >= 0"),
            "max_queries": (self.max_queries >= 1, "at least 1"),
            "epoch": (self.epoch >= 1, "at least 1 step"),
            "layout": (self.layout in LAYOUTS, f"one of {', '.join(LAYOUTS)}"),
        }
        check_fields(self, "zeroth_order.", checks)

    def queries_at(self, step: int) -> int:
        """Directions of a step, from 0."""
        epoch = step // self.epoch + 1
        return adaptive_queries(epoch, alpha=self.queries, beta=self.growth, maximum=self.max_queries)


_BACKWARD = TrainConfig(
    steps=1000,
    batch_size=64,
    lr=1e-2,
    eval_batches=16,
    early=EarlyStage(size_weight=0),
)
_FORWARD = replace(_BACKWARD, steps=400, batch_size=16)
PRESETS: dict[Preset, TrainConfig] = {"backward": _BACKWARD, "forward": _FORWARD}


@dataclass(frozen=True)
class BaselineConfig:
    """Settings of the other methods."""

    narrow: Narrow = field(default_factory=Narrow)
    """A dense network of fewer channels."""


@dataclass(frozen=True)
class PinnConfig:
    """A physics-informed network for the Hamilton-Jacobi-Bellman equation, whose solution is known."""

    method: Method = "comera"
    """comera: hidden layers as tensor trains, with adaptive ranks; dense: uncompressed; narrow: a dense network of
    fewer channels that costs as much as the compressed one."""
    preset: Preset = "backward"
    """Where the defaults come from. backward: exact derivatives and back-propagation; forward: both from values alone,
    for devices that can do nothing else."""
    out: str | None = None
    """Folder of the run; default: runs/pinn-METHOD."""
    dimension: int = 20
    """Dimensions of space in the equation; time is one more input."""
    derivatives: Literal["exact", "stein"] = "exact"
    """Those in the equation. exact: carried forward through the layers; stein: from values of the network around each
    point."""
    gradients: Literal["backward", "zeroth-order"] = "backward"
    """Those of the loss. backward: back-propagation; zeroth-order: from values of the loss at moved parameters."""
    stein: SteinConfig = field(default_factory=SteinConfig)
    """Derivatives from values."""
    zeroth_order: ZerothOrderConfig = field(default_factory=ZerothOrderConfig)
    """Gradients from values."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Sizes of the network."""
    compress: CompressConfig = field(default_factory=CompressConfig)
    """Formats of the compressed layers."""
    baselines: BaselineConfig = field(default_factory=BaselineConfig)
    """Settings of the other methods."""
    train: TrainConfig = field(default_factory=lambda: _BACKWARD)
    """Length, optimizer, rank adaptation and outputs."""

    def __post_init__(self) -> None:
        check_method(self.method, METHODS)
        checks = {
            "preset": (self.preset in PRESETS, f"one of {', '.join(PRESETS)}"),
            "dimension": (self.dimension >= 1, "at least 1"),
            "derivatives": (self.derivatives in ("exact", "stein"), "one of exact, stein"),
            "gradients": (self.gradients in ("backward", "zeroth-order"), "one of backward, zeroth-order"),
        }
        check_fields(self, "", checks)
        if self.derivatives == "exact" and self.gradients == "backward":
            return
        if self.train.precision != "fp32":
            raise ConfigError(
                f"train.precision: differences of values need fp32, got {self.train.precision!r}: take fp32, or "
                "derivatives exact with gradients backward"
            )
        if self.gradients == "zeroth-order" and self.train.mode != "eager":
            raise ConfigError(
                f"train.mode: estimates of gradients draw random numbers on the host, got {self.train.mode!r}: take "
                "eager, or gradients backward"
            )

    @property
    def folder(self) -> Path:
        """The run folder."""
        return runs_folder(self.out, NAME, self.method)


def preset(method: Method = "comera", preset: Preset = "backward") -> PinnConfig:
    """The defaults for a method; all methods have the same ones."""
    config = PinnConfig(method=method, preset=preset, train=PRESETS.get(preset, _BACKWARD))
    if preset == "forward":
        # drawn places: the grid's 925 values a point give about the same error for 14 times the passes
        stein = SteinConfig(rule="monte-carlo")
        model = ModelConfig(hidden=64)
        return replace(config, derivatives="stein", stein=stein, gradients="zeroth-order", model=model)
    return config
