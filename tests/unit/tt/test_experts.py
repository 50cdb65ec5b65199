"""Stacks of matrices in one weight: the matrix of one expert is that of the whole, and specs that hold none."""

from __future__ import annotations

import pytest
import torch

from comera.errors import SpecError
from comera.tt import init_cores, materialize, tt_spec
from comera.tt.experts import check_stack, expert_matrix
from comera.tt.shapes import btt_spec
from comera.tt.spec import BTTSpec, TTSpec

F64 = torch.float64
SPECS = [
    tt_spec(5 * 14, 22, order=6, rank=7, kernel_size=(5,)),
    tt_spec(5 * 14, 22, order=3, rank=7, kernel_size=(5,)),
    tt_spec(5 * 14, 22, order=2, rank=7, kernel_size=(5,)),  # the expert and all inputs in one core
    TTSpec(5 * 14, 22, (4, 4 * 5), (23,), (1, 3, 6, 1)),  # padded inputs and outputs, in a core with the expert
    btt_spec(14, 22, rank=2, experts=5),
    btt_spec(14, 22, blocks=(3, 2), rank=4, experts=5),  # padded inputs
    btt_spec(14, 22, blocks=(2, 1), rank=3, experts=5).with_block_ranks([0, 3, 1, 2, 3, 1, 2, 3, 0, 1]),
    btt_spec(14, 23, rank=2, experts=5),  # a prime number of features
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_one_expert_is_that_of_the_whole(spec: TTSpec | BTTSpec) -> None:
    torch.manual_seed(0)
    outputs = spec.out_features // 5 if isinstance(spec, BTTSpec) else spec.out_features
    check_stack(spec, 5, 14, outputs)
    cores = [core.requires_grad_() for core in init_cores(spec, 0.5, dtype=F64)]
    stack = materialize(spec, cores).reshape(14, 5, outputs)
    for index in (0, 3, -1, torch.tensor(2), torch.tensor(-2)):
        found, exact = expert_matrix(spec, cores, 5, index), stack[:, index]
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
        weights = torch.randn_like(exact)
        grads = [torch.autograd.grad((each * weights).sum(), cores, retain_graph=True) for each in (found, exact)]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_each_expert_has_a_block_tensor_train_of_its_own() -> None:
    one, stack = btt_spec(768, 3072, rank=2), btt_spec(768, 3072, rank=2, experts=8)
    assert (stack.numel, stack.ranks[1]) == (8 * one.numel, 8 * one.ranks[1])
    assert str(stack) == "BTT 24·32 / 512·48 rank 2"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (tt_spec(5 * 14, 23, order=4), "expected 70 -> 22 for 5 experts 14 -> 22, got 70 -> 23"),
        (TTSpec(70, 22, (10, 7), (22,), (1, 2, 2, 1)), "last input mode that holds the 5 experts"),
        (btt_spec(14, 5 * 22, blocks=(2, 11)), "output blocks that make up the 22 features of each of 5 experts"),
        (btt_spec(14, 5 * 22, blocks=(2, 15)), "got 15 of 8: choose a number of blocks that divides 22"),
    ],
    ids=str,
)
def test_specs_that_hold_no_such_stack(spec: TTSpec | BTTSpec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_stack(spec, 5, 14, 22)
