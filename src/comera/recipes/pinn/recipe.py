"""Trains a network to solve an equation, by back-propagation or from forward passes alone: compressed, dense or narrow.

The loss is the mean square of the residual at points drawn in each step; there is no data. What a run is judged by is
the relative L2 error against the known solution at held-out points. A forward pass is one row that goes through the
network: a point, or with exact derivatives one of its tangents (`model`).
B points, I inputs, K nodes of the derivatives' estimate."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from comera.baselines import Conversion, Method
from comera.baselines.narrow import Narrow
from comera.convert import tensorize_
from comera.errors import ConfigError, check_fields
from comera.memory.estimate import MemoryEstimate
from comera.optim.zeroth_order import LAYOUTS, Layout, ZerothOrder, adaptive_queries
from comera.rank.objective import EarlyStage
from comera.recipes import base
from comera.recipes.base import runs
from comera.recipes.config import RecipeConfig
from comera.recipes.pinn.equation import HJB, Derivatives, drawn_nodes, sparse_grid, stein_derivatives
from comera.recipes.pinn.model import PINN, CompressConfig, ModelConfig
from comera.recipes.trained import Architecture
from comera.trainer.config import TrainConfig
from comera.trainer.metrics import Summary

__all__ = ["PRESETS", "PinnConfig", "PinnTask", "architecture", "estimate", "preset", "run", "runs"]

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


_BACKWARD = TrainConfig(steps=1000, batch_size=64, lr=1e-2, eval_batches=16, early=EarlyStage(size_weight=0))
_FORWARD = replace(_BACKWARD, steps=400, batch_size=16)
PRESETS: dict[Preset, TrainConfig] = {"backward": _BACKWARD, "forward": _FORWARD}


@dataclass(frozen=True)
class Baselines:
    """Settings of the other methods."""

    narrow: Narrow = field(default_factory=Narrow)
    """A dense network of fewer channels."""


@dataclass(frozen=True)
class PinnConfig(RecipeConfig):
    """A physics-informed network for the Hamilton-Jacobi-Bellman equation, whose solution is known."""

    method: Method = "comera"
    """comera: hidden layers as tensor trains, with adaptive ranks; dense: uncompressed; narrow: a dense network of
    fewer channels that costs as much as the compressed one."""
    preset: Preset = "backward"
    """Where the defaults come from. backward: exact derivatives and back-propagation; forward: both from values alone,
    for devices that can do nothing else."""
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
    baselines: Baselines = field(default_factory=Baselines)
    """Settings of the other methods."""
    train: TrainConfig = field(default_factory=lambda: _BACKWARD)
    """Length, optimizer, rank adaptation and outputs."""

    recipe, methods, presets = NAME, METHODS, tuple(PRESETS)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = {
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


def preset(method: Method = "comera", preset: Preset = "backward") -> PinnConfig:
    """The defaults for a method; all methods have the same ones."""
    config = PinnConfig(method=method, preset=preset, train=PRESETS.get(preset, _BACKWARD))
    if preset == "forward":
        # drawn places: the grid's 925 values a point give about the same error for 14 times the passes
        stein = SteinConfig(rule="monte-carlo")
        model = ModelConfig(hidden=64)
        return replace(config, derivatives="stein", stein=stein, gradients="zeroth-order", model=model)
    return config


METRIC = "relative_l2"
_HELD_OUT_BATCHES, _HELD_OUT_POINTS = 16, 256
_HELD_OUT = -1  # in place of a batch's number


class Batch(NamedTuple):
    """Points (B, I). nodes (K, I), weights (K,): where an estimate of derivatives evaluates the network around each of
    them, empty for exact ones. number: of the batch in the whole run; queries: of an estimate of gradients."""

    points: Tensor
    nodes: Tensor
    weights: Tensor
    number: int = 0
    queries: int = 1


def draw(config: PinnConfig, number: int, queries: int = 1) -> Batch:
    """Batch `number` of a run, from 0."""
    inputs = HJB(config.dimension).inputs
    generator = _generator(config.train.seed, number)
    points_BI = HJB(config.dimension).points(config.train.batch_size, generator)
    nodes_KI, weights_K = torch.empty(0, inputs), torch.empty(0)
    if config.derivatives == "stein":
        grid = config.stein.rule == "sparse-grid"
        made = sparse_grid(inputs) if grid else drawn_nodes(inputs, config.stein.samples, generator)
        nodes_KI, weights_K = (each.float() for each in made)
    return Batch(points_BI, nodes_KI, weights_K, number, queries)


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(Random(f"{seed} {number}").getrandbits(63))


def residual_loss(config: PinnConfig, model: Any, batch: Batch) -> Tensor:
    """Mean square of the residual, with derivatives as configured."""
    if config.derivatives == "stein":
        f = stein_derivatives(model.network, batch.points, batch.nodes, batch.weights, config.stein.sigma)
    else:
        f = model.derivatives(batch.points)
    return _residual(model, batch.points, f).square().mean()


def _residual(model: Any, points_BI: Tensor, f: Derivatives) -> Tensor:
    residual_B: Tensor = model.equation.residual(model.equation.derivatives(points_BI, f))
    return residual_B


def step_loss(config: PinnConfig, model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a training step, whose backward gives its gradients as configured."""
    if config.gradients == "backward":
        return residual_loss(config, model, batch)
    # A pure function of the batch, as its estimates depend on seed and number alone: nothing to save or to resume.
    settings, seed = config.zeroth_order, config.train.seed
    estimator = ZerothOrder(model.parameters(), eps=settings.eps, layout=settings.layout, seed=seed)
    estimator.queries, estimator.step = batch.queries, batch.number
    return estimator.surrogate(lambda: residual_loss(config, model, batch))


def rows_of_loss(config: PinnConfig, batch: Batch) -> int:
    """Forward passes that one value of the loss takes."""
    each = 1 + len(batch.nodes) if config.derivatives == "stein" else HJB(config.dimension).inputs + 2
    return each * len(batch.points)


def build_model(config: PinnConfig) -> tuple[PINN, Conversion]:
    """The method's network, seeded by train.seed, and the report of its conversion."""
    sizes = base.sizes_of(replace(config, gradients="backward"), meta_step)
    torch.manual_seed(config.train.seed)
    model = PINN(sizes, HJB(config.dimension))
    return model, tensorize_(model, config.compress.tensorize()) if config.method == "comera" else None


def meta_step(config: PinnConfig) -> base.Step:
    """A method's network, the report of its conversion, and the loss of a step."""
    model, report = build_model(config)
    with torch.device("cpu"):
        batch = draw(config, 0, config.zeroth_order.queries_at(0))
    points, nodes, weights, *rest = batch
    batch = Batch(points.to("meta"), nodes.to("meta"), weights.to("meta"), *rest)
    return model, report, lambda: step_loss(config, model, batch)


class PinnTask(base.RecipeTask):
    """The equation as a task for `comera.trainer.loop.fit`. `tokens` counts forward passes."""

    counted = "forward passes"
    config: PinnConfig
    model: PINN

    def __init__(self, config: PinnConfig) -> None:
        identity = {name: getattr(config, name) for name in ("dimension", "derivatives", "gradients")}
        groups = ("model", "compress", "stein", "zeroth_order")
        super().__init__(config, None, build_model, groups=groups, identity=identity)
        equation = self.model.equation
        alone = HJB(config.dimension).points(_HELD_OUT_POINTS * _HELD_OUT_BATCHES, _generator(0, _HELD_OUT))
        self.held_out = alone.split(_HELD_OUT_POINTS)
        known = torch.cat([equation.exact(points) for points in self.held_out])
        missed = torch.cat([equation.solution(p, p.new_zeros(len(p))) for p in self.held_out]) - known
        self.references = {METRIC: {"network 0": float(missed.norm() / known.norm())}}

    def width(self) -> int:
        return self.model.head.in_features

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Batch:
        """Points of a single sequence that all micro-batches and processes share."""
        number = (step * self.config.train.accumulation + micro) * world + rank
        return draw(self.config, number, self.config.zeroth_order.queries_at(step))

    def eval_batches(self) -> Iterator[Batch]:
        """The held-out points, which no seed changes."""
        return (Batch(points, torch.empty(0), torch.empty(0)) for points in self.held_out)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return step_loss(self.config, model, batch)

    def evaluate(self, model: Any, batch: Batch) -> tuple[dict[str, Tensor], int, Tensor]:
        """Mean square of the residual with exact derivatives, whatever training has; the number of points; and for each
        of them the squares of the error and of the solution (B, 2)."""
        residual_B = _residual(model, batch.points, model.derivatives(batch.points))
        exact_B = model.equation.exact(batch.points)
        squares_B2 = torch.stack([model(batch.points) - exact_B, exact_B], 1).double().square()
        return {"loss": residual_B.square().mean()}, len(batch.points), squares_B2

    def evaluate_rows(self, rows: Tensor) -> Mapping[str, float]:
        """The relative L2 error."""
        error, exact = rows.sum(0).sqrt().tolist()
        return {METRIC: error / exact}

    def weight(self, batch: Batch) -> int:
        return len(batch.points)

    def tokens(self, batch: Batch) -> int:
        """Forward passes of a step's share."""
        rows = rows_of_loss(self.config, batch)
        if self.config.gradients == "backward":
            return rows
        tensors = 1 if self.config.zeroth_order.layout == "whole" else len(list(self.model.parameters()))
        return 2 * batch.queries * tensors * rows


def run(config: PinnConfig, *, resume: bool = False) -> Summary:
    """Build the network and train it into `config.folder`; raises what `fit` raises."""
    task = PinnTask(config)
    passes = task.tokens(task.train_batch(0, 0, 0, 1)) * config.train.accumulation
    inputs = HJB(config.dimension).inputs
    return base.fit_one(task, resume=resume, lines=[f"{inputs} inputs; the first step takes {passes:,} forward passes"])


def estimate(config: PinnConfig) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step by method."""
    return base.estimates_by_method(config, meta_step)


def architecture(config: PinnConfig, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
    """How to rebuild the model of a run: points (B, I) -> u (B,)."""
    equation = HJB(config.dimension)
    return Architecture(
        build=lambda: build_model(config)[0],
        dense=lambda folder: build_model(replace(config, method="dense"))[0],
        inputs={"points": equation.points(_HELD_OUT_POINTS, _generator(0, _HELD_OUT))},
        dynamic={"points": {0: torch.export.Dim("batch")}},
        about={"dimension": config.dimension, "model": asdict(config.model)},
    )
