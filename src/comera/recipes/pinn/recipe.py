"""Trains a network to solve an equation, by back-propagation or from forward passes alone: compressed, dense or narrow.

The loss is the mean square of the residual at points drawn in each step; there is no data. What a run is judged by is
the relative L2 error against the known solution at held-out points. A forward pass is one row that goes through the
network: a point, or with exact derivatives one of its tangents (`model`).
B points, I inputs, K nodes of the derivatives' estimate."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comera.baselines import Conversion, Method
from comera.convert import tensorize_
from comera.memory.estimate import MemoryEstimate, count_flops
from comera.optim.zeroth_order import ZerothOrder
from comera.recipes import narrow
from comera.recipes.interface import Architecture
from comera.recipes.pinn.config import METHODS, NAME, PRESETS, PinnConfig, preset
from comera.recipes.pinn.derivatives import drawn_nodes, sparse_grid, stein_derivatives
from comera.recipes.pinn.equation import HJB, Derivatives
from comera.recipes.pinn.model import PINN
from comera.recipes.stages import is_main, log, resolved
from comera.recipes.task import estimates_by_method, set_from_conversion
from comera.trainer.loop import fit
from comera.trainer.metrics import Summary
from comera.trainer.task import Task

__all__ = ["PRESETS", "PinnConfig", "PinnTask", "architecture", "estimate", "preset", "run", "runs"]

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
    sizes = narrow.sizes(config, _backward_flops)
    torch.manual_seed(config.train.seed)
    model = PINN(sizes, HJB(config.dimension))
    return model, tensorize_(model, config.compress.tensorize()) if config.method == "comera" else None


def _backward_flops(config: PinnConfig) -> int:
    """FLOPs of the loss and its backward, counted on the meta device."""
    own = replace(config, gradients="backward")
    with torch.device("meta"):
        model, _ = build_model(own)
        return count_flops(model, _meta_loss(own, model))


def _meta_loss(config: PinnConfig, model: nn.Module) -> Callable[[], Tensor]:
    with torch.device("cpu"):
        batch = draw(config, 0, config.zeroth_order.queries_at(0))
    points, nodes, weights, *rest = batch
    batch = Batch(points.to("meta"), nodes.to("meta"), weights.to("meta"), *rest)
    return lambda: step_loss(config, model, batch)


class PinnTask(Task):
    """The equation as a task for `comera.trainer.loop.fit`. `tokens` counts forward passes."""

    name = NAME
    counted = "forward passes"

    def __init__(self, config: PinnConfig) -> None:
        self.config, self.method = config, config.method
        self.model, report = build_model(config)
        set_from_conversion(self, report)
        settings = asdict(config)
        groups = ("model", "compress", "stein", "zeroth_order")
        self.identity = {name: settings[name] for name in ("dimension", "derivatives", "gradients")}
        self.identity |= {f"{group}.{name}": value for group in groups for name, value in settings[group].items()}
        narrow.note(self, self.model.head.in_features, lambda: build_model(replace(config, method="dense"))[0])
        alone = HJB(config.dimension).points(_HELD_OUT_POINTS * _HELD_OUT_BATCHES, _generator(0, _HELD_OUT))
        self.held_out = alone.split(_HELD_OUT_POINTS)
        known = torch.cat([self.model.equation.exact(points) for points in self.held_out])
        missed = torch.cat([self.model.equation.solution(p, p.new_zeros(len(p))) for p in self.held_out]) - known
        self.references = {METRIC: {"network 0": float(missed.norm() / known.norm())}}

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

    def examples(self, batch: Batch) -> int:
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
    main, task = is_main(config.train), PinnTask(config)
    passes = task.tokens(task.train_batch(0, 0, 0, 1)) * config.train.accumulation
    log(main, NAME, f"{HJB(config.dimension).inputs} inputs; the first step takes {passes:,} forward passes")
    for line in narrow.about(task):
        log(main, NAME, line)
    return fit(task, config.train, config.folder, resume=resume, resolved=resolved(config))


def runs(config: PinnConfig) -> dict[str, Path]:
    """The folder of the only run, by its method."""
    return {config.method: config.folder}


def estimate(config: PinnConfig) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step by method, on the meta device: nothing is allocated or computed."""

    def build(method: Method) -> tuple[nn.Module, Conversion, Callable[[], Tensor]]:
        own = replace(config, method=method)
        model, report = build_model(own)
        return model, report, _meta_loss(own, model)

    return estimates_by_method(build, config.train, METHODS)


def architecture(config: PinnConfig, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
    """How to rebuild the model of a run: points (B, I) -> u (B,)."""
    config = narrow.as_begun(config, identity)
    equation = HJB(config.dimension)
    return Architecture(
        build=lambda: build_model(config)[0],
        dense=lambda folder: build_model(replace(config, method="dense"))[0],
        inputs={"points": equation.points(_HELD_OUT_POINTS, _generator(0, _HELD_OUT))},
        dynamic={"points": {0: torch.export.Dim("batch")}},
        about={"dimension": config.dimension, "model": asdict(config.model)},
    )
