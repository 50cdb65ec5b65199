"""S and Ŝ over random tensor trains: one formula, whether masked, pruned or counted in one table."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comera.nn.tensor_train import TensorTrain
from comera.rank.size import SizeTable, unpruned_ranks, unpruned_size

from ..helpers.strategies import specs


@st.composite
def trains(draw: st.DrawFn) -> TensorTrain:
    """Any format, ranks 0 to 5; gates on both sides of the threshold."""
    train = TensorTrain(draw(specs(max_rank=5)), init_std=1.0, dtype=torch.float64)
    with torch.no_grad():
        for d in train.rank_params:
            size = {"min_size": len(d), "max_size": len(d)}
            d.copy_(torch.tensor(draw(st.lists(st.floats(-1, 3, width=32), **size)), dtype=torch.float64))
    return train


@settings(max_examples=30, deadline=None)
@given(drawn=st.lists(trains(), min_size=1, max_size=3))
def test_the_gradient_is_that_of_the_surrogate_for_any_trains(drawn: list[TensorTrain]) -> None:
    table = SizeTable(drawn)
    expected = [torch.zeros_like(d) for d in table.rank_params]
    for train in drawn:
        if len(train.rank_params):
            value = SizeTable([train]).surrogate()
            auto = iter(torch.autograd.grad(value, list(train.rank_params)))
            first = next(k for k, d in enumerate(table.rank_params) if d is train.rank_params[0])
            expected[first : first + len(train.rank_params)] = auto
    for grad, auto in zip(table.surrogate_grads(), expected, strict=True):
        torch.testing.assert_close(grad, auto, rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(train=trains())
def test_with_unpruned_gates_of_one_the_surrogate_is_the_size(train: TensorTrain) -> None:
    with torch.no_grad():
        for d, unpruned in zip(train.rank_params, train.unpruned(), strict=True):
            d[unpruned] = 1.0
    assert SizeTable([train]).surrogate().item() == unpruned_size(train)
    ranks = (1, *unpruned_ranks(train), 1)
    assert unpruned_size(train) == sum(ranks[k] * n * ranks[k + 1] for k, n in enumerate(train.spec.sizes))
    for k, grad in enumerate(SizeTable([train]).surrogate_grads()):
        slope = ranks[k] * train.spec.sizes[k] + train.spec.sizes[k + 1] * ranks[k + 2]
        assert set(grad.tolist()) <= {0.0, float(slope)}
