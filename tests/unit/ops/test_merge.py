"""Chains merged together against each merged by itself, which is tested against dense weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from comera.ops.low_rank import merge_halves
from comera.ops.together import merge_together
from comera.tt.dense import absorb
from comera.tt.shapes import tt_spec
from comera.tt.spec import TTSpec

SPECS = [
    TTSpec(in_modes=(2, 3), out_modes=(4,), ranks=(1, 2, 3, 1), in_features=6, out_features=4),
    TTSpec(in_modes=(2, 3), out_modes=(3, 2), ranks=(1, 2, 1, 2, 1), in_features=5, out_features=6),
    TTSpec(in_modes=(4,), out_modes=(5,), ranks=(1, 3, 1), in_features=3, out_features=4),
    TTSpec(in_modes=(2, 2), out_modes=(3, 2), ranks=(1, 2, 0, 2, 1), in_features=4, out_features=6),
    tt_spec(24, 30, order=6, rank=4),
]
THRESHOLD = 0.5


def chains(spec: TTSpec, count: int = 3, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    torch.manual_seed(0)
    cores = [[torch.randn(shape, dtype=dtype) for shape in spec.core_shapes] for _ in range(count)]
    # some rank parameters at or below the threshold, negative ones too
    rank_params = [[torch.rand(rank, dtype=dtype) * 2 - 0.3 for rank in spec.inner_ranks] for _ in range(count)]
    return [[t.requires_grad_() for t in (*c, *d)] for c, d in zip(cores, rank_params, strict=True)]


def each_by_itself(spec: TTSpec, chain: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cores, rank_params = chain[: spec.order], chain[spec.order :]
    masked = [torch.where(d > THRESHOLD, d, torch.zeros_like(d)) for d in rank_params]
    return merge_halves(spec, absorb(cores, masked), dtype)


def summed(halves: list[tuple[Tensor, Tensor]]) -> Tensor:
    """A number that leans on every entry differently."""
    flat = torch.cat([half.flatten() for pair in halves for half in pair])
    return (flat * torch.linspace(-1, 2, flat.numel(), dtype=flat.dtype)).sum()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_halves_and_gradients_are_those_of_each_chain_by_itself(spec: TTSpec) -> None:
    given = chains(spec)
    leaves = [tensor for chain in given for tensor in chain]
    together = merge_together([spec] * len(given), given, THRESHOLD, torch.float64)
    alone = [each_by_itself(spec, chain, torch.float64) for chain in given]
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(summed(together), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(summed(alone), leaves), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "ranks", [[(1, 2, 3, 2, 1), (1, 1, 4, 1, 1)], [(1, 2, 0, 2, 1), (1, 2, 5, 0, 1), (1, 2, 2, 2, 1)]]
)
def test_chains_of_other_ranks_are_filled_up(ranks: list[tuple[int, ...]]) -> None:
    specs = [TTSpec(in_modes=(2, 3), out_modes=(3, 2), ranks=r, in_features=5, out_features=6) for r in ranks]
    given = [chains(spec, count=1)[0] for spec in specs]
    leaves = [tensor for chain in given for tensor in chain]
    together = merge_together(specs, given, THRESHOLD, torch.float64)
    alone = [each_by_itself(spec, chain, torch.float64) for spec, chain in zip(specs, given, strict=True)]
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(summed(together), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(summed(alone), leaves), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_bias_is_the_first_row_of_its_b(dtype: torch.dtype) -> None:
    ranks = [(1, 2, 3, 2, 1), (1, 1, 4, 1, 1), (1, 2, 0, 2, 1)]
    specs = [TTSpec(in_modes=(2, 3), out_modes=(3, 2), ranks=r, in_features=5, out_features=6) for r in ranks]
    given = [chains(spec, count=1, dtype=dtype)[0] for spec in specs]
    biases = [torch.randn(6, dtype=dtype, requires_grad=True), None, torch.randn(6, dtype=dtype, requires_grad=True)]
    together = merge_together(specs, given, THRESHOLD, torch.float64, biases)
    alone = []
    for spec, chain, bias in zip(specs, given, biases, strict=True):
        a, b = each_by_itself(spec, chain, torch.float64)
        alone.append((a, b if bias is None else torch.cat([bias.double().unsqueeze(0), b])))
    torch.testing.assert_close(together, alone)
    leaves = [tensor for chain in given for tensor in chain] + [bias for bias in biases if bias is not None]
    found = torch.autograd.grad(summed(together), leaves, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(summed(alone), leaves))
    (dbias,) = torch.autograd.grad(summed(together[:1]), biases[:1])
    assert dbias.untyped_storage().nbytes() == dbias.nbytes  # not a view that keeps the gradient of B


@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_derivatives_are_right_twice(spec: TTSpec) -> None:
    given = chains(spec, count=2)
    with torch.no_grad():  # away from the threshold, where the mask jumps
        for chain in given:
            for d in chain[spec.order :]:
                d[(d - THRESHOLD).abs() < 1e-2] = 1.0
    leaves = [tensor for chain in given for tensor in chain]

    bias = torch.randn(spec.out_features, dtype=torch.float64, requires_grad=True)

    def halves(bias: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        width = len(flat) // 2
        made = merge_together([spec, spec], [flat[:width], flat[width:]], THRESHOLD, torch.float64, [None, bias])
        return tuple(half for pair in made for half in pair)

    assert torch.autograd.gradcheck(halves, (bias, *leaves))
    assert torch.autograd.gradgradcheck(halves, (bias, *leaves))


def test_chains_that_nothing_asked_for_get_no_gradient() -> None:
    spec = SPECS[1]
    first, second, third = given = chains(spec)
    (a, _), _, (_, b) = merge_together([spec] * len(given), given, THRESHOLD, torch.float64)
    (a.square().sum() + b.sum()).backward()
    assert all(tensor.grad is not None for tensor in (*first, *third))
    assert all(tensor.grad is None for tensor in second)
    alone = [each_by_itself(spec, chain, torch.float64) for chain in (first, third)]
    wanted = torch.autograd.grad(alone[0][0].square().sum() + alone[1][1].sum(), [*first, *third], allow_unused=True)
    for tensor, grad in zip((*first, *third), wanted, strict=True):
        torch.testing.assert_close(tensor.grad, torch.zeros_like(tensor) if grad is None else grad)


def test_each_of_several_losses_may_go_back_by_itself() -> None:
    spec = SPECS[4]
    given = chains(spec, count=2)
    halves = merge_together([spec] * len(given), given, THRESHOLD, torch.float64)
    for pair in halves:
        summed([pair]).backward()
    alone = [each_by_itself(spec, chain, torch.float64) for chain in given]
    for chain, pair in zip(given, alone, strict=True):
        wanted = torch.autograd.grad(summed([pair]), chain)
        torch.testing.assert_close([tensor.grad for tensor in chain], list(wanted))


def test_what_is_frozen_gets_no_gradient() -> None:
    spec = SPECS[1]
    given = chains(spec, count=2)
    for d in given[0][spec.order :]:
        d.requires_grad_(False)
    summed(merge_together([spec] * len(given), given, THRESHOLD, torch.float64)).backward()
    assert [tensor.grad is not None for tensor in given[0]] == [True] * spec.order + [False] * (spec.order - 1)
    assert all(tensor.grad is not None for tensor in given[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_merged_in_float32(dtype: torch.dtype) -> None:
    spec = SPECS[4]
    given = chains(spec, dtype=dtype)
    leaves = [tensor for chain in given for tensor in chain]
    together = merge_together([spec] * len(given), given, THRESHOLD, dtype)
    alone = [each_by_itself(spec, chain, dtype) for chain in given]
    torch.testing.assert_close(together, alone)
    found = torch.autograd.grad(summed(together), leaves)
    assert all(grad.dtype == dtype for grad in found)
    torch.testing.assert_close(found, torch.autograd.grad(summed(alone), leaves), rtol=0.05, atol=0.05)
