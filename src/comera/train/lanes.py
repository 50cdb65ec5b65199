"""Lanes: threads of a CPU that each take a part of every batch of a step, from the forward to the gradient.

A compressed step is thousands of short operations. When each of them is split over the cores, these wait for one
another at the end of each; a lane runs all operations on its part of the examples by itself, and waits once a step.

    batch → parts of its examples → (a lane each) loss, gradients → sums, in the order of the lanes → one gradient

Weights are shared, and merged once for all lanes (`nn/together.py`). A lane draws from a generator of its own, seeded
from torch's global one, so the seed of a run and the number of its lanes fix all numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from comera.errors import DataError, TrainingError
from comera.nn.dropout import drawing_from
from comera.nn.together import merged_once
from comera.train.task import Batch


class Part(NamedTuple):
    """Some examples of a batch, and what they count in the mean over all batches of the step."""

    batch: Batch
    share: float


def refusal(model: nn.Module, device: torch.device) -> str:
    """Why a model cannot be trained in lanes, "" if it can."""
    if device.type != "cpu":
        return f"lanes are threads of a CPU, the model is on {device}"
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        return "batch norm mixes the examples of a batch, which lanes take apart"
    return ""


def split(batches: Sequence[Batch], lanes: int) -> list[Part]:
    """The parts of some batches, up to `lanes` of each, as equal as can be.

    Every tensor of a batch begins with its examples. Raises DataError where they differ in how many, or have none.
    """
    parts = []
    for batch in batches:
        leaves, structure = tree_flatten(batch)
        sizes = {leaf.shape[:1] for leaf in leaves if isinstance(leaf, Tensor)}
        if len(sizes) != 1 or not all(size and size[0] for size in sizes):
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor)) or "none"
            raise DataError(
                "expected a batch whose tensors all begin with the same number of examples, to be taken apart for "
                f"lanes, got shapes {shapes}: train with lanes 1"
            )
        ((examples,),) = sizes
        bounds = [examples * k // lanes for k in range(lanes + 1)]
        for first, last in pairwise(bounds):
            if first < last:
                cut = [leaf[first:last] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                parts.append(Part(tree_unflatten(cut, structure), (last - first) / examples / len(batches)))
    return parts


class Lanes:
    """`count` threads, each with its share of torch's own threads for its operations."""

    def __init__(self, count: int) -> None:
        self.count = count
        threads = torch.get_num_threads()
        ready = threading.Barrier(count)
        self._pool = ThreadPoolExecutor(count, "lane", torch.set_num_threads, (max(1, threads // count),))
        list(self._pool.map(lambda _: ready.wait(), range(count)))  # all of them are there
        torch.set_num_threads(threads)  # once more, as it is also what any other new thread begins with

    def backward(
        self,
        model: nn.Module,
        loss: Callable[[Batch], Tensor],
        parameters: Sequence[nn.Parameter],
        parts: Sequence[Part],
    ) -> Tensor:
        """Set the gradients of `parameters`, and of nothing else, to those of the mean loss, which is returned.

        Raises TrainingError when something drew from torch's global generator: lanes would do so in any order.
        """
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        generators = [torch.Generator().manual_seed(seed) for seed in torch.randint(2**62, (self.count,)).tolist()]
        state = torch.get_rng_state()
        with merged_once(model) as merges:

            def lane(k: int) -> list[_Result]:
                with merges.thread(), drawing_from(generators[k]):
                    return [take(part) for part in parts[k :: self.count]]

            def take(part: Part) -> _Result:
                value = loss(part.batch)
                halves, leaves = zip(*merges.leaves(), strict=True) if merges.leaves() else ((), ())
                grads = torch.autograd.grad(value * part.share, [*wanted, *leaves], allow_unused=True)
                return _Result(value.detach().float() * part.share, [*wanted, *halves], grads)

            futures = [self._pool.submit(lane, k) for k in range(self.count)]
            wait(futures)
            results = [result for future in futures for result in future.result()]
            if not torch.equal(state, torch.get_rng_state()):
                raise TrainingError(
                    "expected layers in lanes to draw from the generators that they are given, as those of fuse_ do, "
                    "but something drew from torch's global one, which lanes do in no fixed order: let train.fuse be "
                    "on, or train with lanes 1"
                )
            _add_up(wanted, results)
        return torch.stack([result.loss for result in results]).sum()


class _Result(NamedTuple):
    """What a part gives: its share of the loss, and the gradients of parameters and merged halves."""

    loss: Tensor
    of: Sequence[Tensor]
    grads: Sequence[Tensor | None]


def _add_up(parameters: Sequence[nn.Parameter], results: Sequence[_Result]) -> None:
    """Sum the gradients in the order of `results`; those of halves go on to the cores."""
    found: dict[Tensor, list[Tensor]] = {}
    for result in results:
        for tensor, grad in zip(result.of, result.grads, strict=True):
            if grad is not None:
                found.setdefault(tensor, []).append(grad)
    sums = {tensor: reduce(torch.add, grads) if len(grads) > 1 else grads[0].clone() for tensor, grads in found.items()}
    for parameter in parameters:
        parameter.grad = sums.pop(parameter, None)
    if sums:
        torch.autograd.backward(list(sums), list(sums.values()))
