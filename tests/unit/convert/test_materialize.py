"""materialize_: the same function, from dense layers."""

import copy

import pytest
import torch
from torch import nn

from comera.convert import materialize_, tensorize_
from comera.errors import ConversionError

from ...helpers.small_net import IDS, SMALL, Net, kinds


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_materialize_gives_the_same_function(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    model = Net().to(dtype).eval()
    bias = model.up.bias
    tensorize_(model, SMALL)
    with torch.no_grad():
        model.up.tt.rank_params[1][2] = -1.0  # pruned
        model.blocks[1].bias.fill_(0.3)
    model.blocks[0].tt.requires_grad_(False)
    want = model(IDS)
    assert materialize_(model) is model
    assert kinds(model) == kinds(Net())
    torch.testing.assert_close(model(IDS), want, rtol=tolerance, atol=tolerance)
    assert model.up.bias is bias
    assert model.embed.padding_idx == 0
    assert model.embed.weight[0].abs().max() == 0
    assert [p.requires_grad for p in model.blocks.parameters()] == [False, True, True]
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert not model.up.training


def test_materialize_sums_half_precisions_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64)).to(torch.bfloat16)
    tensorize_(model, SMALL)
    want = copy.deepcopy(model[0].tt).to(torch.float64).dense().t()
    weight = materialize_(model)[0].weight
    assert weight.dtype == torch.bfloat16
    torch.testing.assert_close(weight.double(), want, rtol=2**-8, atol=1e-6)


def test_materialize_needs_something_to_materialize() -> None:
    with pytest.raises(ConversionError, match="nothing to materialize in Net"):
        materialize_(Net())
    model = nn.Sequential(nn.Linear(64, 64))
    tensorize_(model, SMALL)
    with pytest.raises(ConversionError, match="a single TTLinear has no parent"):
        materialize_(model[0])
