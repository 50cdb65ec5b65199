"""The operations of merge.cpp, on the parameters of many tensor trains in a row."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from comera.kernels.cpp.library import call, floats, on_cpu, operation, words

T = TypeVar("T", Tensor, Tensor | None)

_nbytes, _is_cpu = map(attrgetter, ("nbytes", "is_cpu"))


class _Layout(NamedTuple):
    """The sizes of a layout that kernels and checks need."""

    words: bytes
    sizes: list[int]  # bytes of the cores and then the gates of each train
    factors: list[tuple[int, int, int]]  # rank, in_features, out_features of each train


def _trains(layout: Sequence[int]) -> Iterator[Sequence[int]]:
    """The integers of one train after the other: order, split, in_features, out_features, modes, ranks."""
    start = 0
    while start < len(layout):
        end = start + 5 + 2 * layout[start]
        yield layout[start:end]
        start = end


@lru_cache(maxsize=64)
def _described(layout: tuple[int, ...]) -> _Layout:
    """Raises RuntimeError unless `layout` describes tensor trains."""
    sizes, factors = [], []
    for train in _trains(layout):
        order, split, inputs, outputs, *rest = train
        modes, ranks = rest[:order], rest[order:]
        fits = 0 < split < order and len(ranks) == order + 1 and ranks[0] == ranks[-1] == 1 and min(ranks) >= 0
        if not (fits and min(modes) > 0 and inputs <= prod(modes[:split]) and outputs <= prod(modes[split:])):
            raise RuntimeError(f"expected order, split, features, modes and ranks of a tensor train, got {train}")
        sizes += [4 * left * mode * right for left, mode, right in zip(ranks, modes, ranks[1:], strict=False)]
        sizes += [4 * rank for rank in ranks[1:-1]]
        factors.append((ranks[split], inputs, outputs))
    return _Layout(words(layout), sizes, factors)


def _checked(name: str, tensors: Sequence[T], sizes: Sequence[int]) -> Sequence[T]:
    """`tensors` as the kernels read them. Raises RuntimeError unless they have `sizes` in bytes and are on the CPU."""
    if len(tensors) != len(sizes):
        raise RuntimeError(f"expected {len(sizes)} {name}, as the layout says, got {len(tensors)}")
    present: list[Tensor] = [tensor for tensor in tensors if tensor is not None]
    if len(present) < len(tensors):
        sizes = [size for tensor, size in zip(tensors, sizes, strict=True) if tensor is not None]
    if list(map(_nbytes, present)) != sizes or not (all(map(_is_cpu, present)) or all(map(on_cpu, present))):
        given = [f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}" for tensor in present]
        raise RuntimeError(f"expected {name} of {sizes} bytes of float32 on the CPU, as the layout says, got {given}")
    if all(map(Tensor.is_contiguous, present)) and not any(map(Tensor.is_neg, present)):
        return tensors
    return [None if t is None else floats(name, t) for t in tensors]


def _operands(
    parameters: Sequence[Tensor], biases: Sequence[Tensor | None], layout: Sequence[int]
) -> tuple[_Layout, Sequence[Tensor], Sequence[Tensor | None]]:
    described = _described(tuple(layout))
    sizes = [4 * outputs for _, _, outputs in described.factors]
    return described, _checked("parameters", parameters, described.sizes), _checked("biases", biases, sizes)


def _call(name: str, layout: _Layout, tensors: Sequence[Tensor | None], threshold: float) -> None:
    memory = words([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
    call(name, len(layout.factors), layout.words, memory, threshold)


def _products(layout: Sequence[int]) -> Iterator[list[int]]:
    """FLOPs of the products that make each factor, from the outer end of the train to its split."""
    for order, split, _, _, *rest in _trains(layout):
        cores = list(zip(rest[order:-1], rest[:order], rest[order + 1 :], strict=True))
        for side in (cores[:split], cores[: split - 1 : -1]):
            done, flops = side[0][1], []
            for left, mode, right in side[1:]:
                flops.append(2 * done * left * mode * right)
                done *= mode
            yield flops


@operation(lambda parameters, biases, layout, threshold: sum(map(sum, _products(layout))))
def merge(
    parameters: Sequence[Tensor], biases: Sequence[Tensor | None], layout: Sequence[int], threshold: float
) -> list[Tensor]:
    """A (rank, in_features) and B or [bias; B] (rank or 1 + rank, out_features) of every train, in turn.

    parameters: the cores and then the gates of the first train, of the second ...; gates at or below `threshold` count
    as 0. biases: one, or None, for each train. layout: order, split, in_features, out_features, modes, ranks of each.
    Raises RuntimeError for tensors of other sizes than `layout` says, or not float32 on the CPU.
    """
    described, parameters, biases = _operands(parameters, biases, layout)
    factors: list[Tensor] = []
    empty = parameters[0].new_empty
    for (rank, inputs, outputs), bias in zip(described.factors, biases, strict=True):
        factors += (empty(rank, inputs), empty(rank if bias is None else rank + 1, outputs))
    _call("merge", described, [*parameters, *biases, *factors], threshold)
    return factors


def _merge_backward_flops(dfactors: Any, parameters: Any, biases: Any, layout: Sequence[int], threshold: float) -> int:
    """All products but the last of each factor once more, and two for each."""
    return sum(3 * sum(flops) - sum(flops[-1:]) for flops in _products(layout))


@operation(_merge_backward_flops)
def merge_backward(
    dfactors: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    layout: Sequence[int],
    threshold: float,
) -> list[Tensor]:
    """The gradients of all parameters, then of the biases whose b has a gradient, from those of the factors.

    Raises RuntimeError as `merge` does.
    """
    described, parameters, biases = _operands(parameters, biases, layout)
    sizes: list[int] = []
    for (rank, inputs, outputs), bias in zip(described.factors, biases, strict=True):
        sizes += (4 * rank * inputs, 4 * (rank + (bias is not None)) * outputs)
    dfactors = _checked("gradients of factors", dfactors, sizes)
    grads = [torch.empty_like(tensor) for tensor in parameters]
    pairs = zip(biases, dfactors[1::2], strict=True)
    dbiases = [None if bias is None or db is None else torch.empty_like(bias) for bias, db in pairs]
    _call("merge_backward", described, [*parameters, *biases, *dfactors, *grads, *dbiases], threshold)
    return grads + [dbias for dbias in dbiases if dbias is not None]
