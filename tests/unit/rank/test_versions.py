"""Writes outside of an optimizer raise version counters, so that autograd and merge caches notice them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from comera.nn.linear import TTLinear
from comera.rank.budget import canonicalize_, round_
from comera.rank.importance import update_importance_, zero_gates_
from comera.rank.prune import prune_
from comera.rank.step_rule import gradients_of
from comera.tt.spec import TTSpec

SPEC = TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1))


def zero_most(model: nn.ModuleList) -> None:
    optimizer = torch.optim.SGD(model[0].tt.parameters(), lr=0.0)
    model[0](torch.randn(4, 12)).square().sum().backward()
    update_importance_(optimizer, model[0].tt.rank_params, gradients_of(optimizer))
    zero_gates_([model[0].tt], [optimizer], 20)


def zero_and_prune(model: nn.ModuleList) -> None:
    with torch.no_grad():
        model[0].tt.rank_params[1].data[0] = 0.0
    prune_(model)


CHANGES: dict[str, Callable[[nn.ModuleList], object]] = {
    "prune_": zero_and_prune,
    "round_": lambda model: round_(model[0], 0.5),
    "canonicalize_": lambda model: canonicalize_([model[0].tt]),
    "zero_gates_": zero_most,
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_parameter_that_is_written_gets_a_new_version_and_no_other(change: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([TTLinear(SPEC), TTLinear(SPEC)])
    before = {name: p._version for name, p in model.named_parameters()}
    CHANGES[change](model)
    for name, p in model.named_parameters():
        written = name.startswith("0.tt." if change != "zero_gates_" else "0.tt.rank_params.")
        assert (p._version > before[name]) == written, name


def test_a_backward_through_values_that_were_cut_is_refused() -> None:
    layer = TTLinear(SPEC)
    weight = layer.tt.dense()
    with torch.no_grad():
        layer.tt.rank_params[1].data[0] = 0.0
    prune_(layer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weight.sum().backward()
