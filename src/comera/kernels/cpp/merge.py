"""Operations of merge.cpp, on the numbers of many tensor trains in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, c_float, c_int, c_long, c_void_p
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from comera.kernels.cpp.build import library
from comera.kernels.cpp.library import define, integers
from comera.kernels.flops import flop_formula

T = TypeVar("T", Tensor, Tensor | None)


@cache
def _functions() -> tuple[Callable[..., None], Callable[..., None]]:
    forward, backward = library().merge, library().merge_backward
    for function in (forward, backward):
        function.argtypes = [c_long, POINTER(c_long), c_void_p, c_float, c_int]
        function.restype = None
    return forward, backward


def _chains(layout: Sequence[int]) -> Iterator[Sequence[int]]:
    """The numbers of one chain after the other: order, split, in_features, out_features, modes, ranks."""
    start = 0
    while start < len(layout):
        end = start + 5 + 2 * layout[start]
        yield layout[start:end]
        start = end


@lru_cache(maxsize=64)
def _described(layout: tuple[int, ...]) -> tuple[int, Any, list[tuple[int, int, int]]]:
    """How many chains, the layout as C takes it, and rank, in_features, out_features of each chain."""
    halves = [(rest[order + split], inner, outer) for order, split, inner, outer, *rest in _chains(layout)]
    return len(halves), (c_long * len(layout))(*layout), halves


def _run(function: Callable[..., None], layout: Sequence[int], tensors: Sequence[Tensor | None], least: float) -> None:
    count, numbers, _ = _described(tuple(layout))
    _at, at = integers(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    function(count, numbers, at, least, torch.get_num_threads())


def _contiguous(tensors: Sequence[T]) -> list[T]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _forward(
    numbers: Sequence[Tensor], biases: Sequence[Tensor | None], layout: Sequence[int], threshold: float
) -> list[Tensor]:
    numbers, biases = _contiguous(numbers), _contiguous(biases)
    halves: list[Tensor] = []
    for (rank, inner, outer), bias in zip(_described(tuple(layout))[2], biases, strict=True):
        halves += [numbers[0].new_empty(rank, inner), numbers[0].new_empty(rank + (bias is not None), outer)]
    _run(_functions()[0], layout, [*numbers, *biases, *halves], threshold)
    return halves


def _backward(
    dhalves: Sequence[Tensor | None],
    numbers: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    layout: Sequence[int],
    threshold: float,
) -> list[Tensor]:
    numbers, biases, dhalves = _contiguous(numbers), _contiguous(biases), _contiguous(dhalves)
    grads = [torch.empty_like(tensor) for tensor in numbers]
    reached = zip(biases, dhalves[1::2], strict=True)
    dbiases = [None if bias is None or db is None else torch.empty_like(bias) for bias, db in reached]
    _run(_functions()[1], layout, [*numbers, *biases, *dhalves, *grads, *dbiases], threshold)
    return grads + [dbias for dbias in dbiases if dbias is not None]


merge = define("merge(Tensor[] numbers, Tensor?[] biases, int[] layout, float threshold) -> Tensor[]", _forward)
"""A and B (or [bias; B]) of every chain; numbers: its cores and then its rank parameters, of all chains in a row."""

merge_backward = define(
    "merge_backward(Tensor?[] dhalves, Tensor[] numbers, Tensor?[] biases, int[] layout, float threshold) -> Tensor[]",
    _backward,
)
"""The gradients of all numbers, and then of the biases whose B has one, from those of the halves."""


def _products(layout: Sequence[int]) -> Iterator[list[int]]:
    """FLOPs of the products that make each half, from its end to the middle of the chain."""
    for order, split, _, _, *rest in _chains(layout):
        cores = list(zip(rest[order:-1], rest[:order], rest[order + 1 :], strict=True))
        for part in (cores[:split], cores[: split - 1 : -1]):
            done, flops = part[0][1], []
            for left, mode, right in part[1:]:
                flops.append(2 * done * left * mode * right)
                done *= mode
            yield flops


@flop_formula(torch.ops.comera.merge)
def _flops(numbers: Any, biases: Any, layout: Sequence[int], *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sum(sum(flops) for flops in _products(layout))


@flop_formula(torch.ops.comera.merge_backward)
def _flops_backward(
    dhalves: Any, numbers: Any, biases: Any, layout: Sequence[int], *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """All but the last product again, and two for each."""
    return sum(3 * sum(flops) - sum(flops[-1:]) for flops in _products(layout))
