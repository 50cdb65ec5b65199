"""TTConv against torch's convolutions with the materialized weight, in float64."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from comera.errors import SpecError, WeightError
from comera.nn import TensorTrain, TTConv, TTLinear
from comera.rank import prune_
from comera.tt import tt_spec, ttm_spec

F64 = torch.float64
KINDS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SETTINGS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((3,), {}),
    ((3, 3), {"stride": 2, "padding": 1}),
    ((3, 2), {"padding": "same", "padding_mode": "replicate", "dilation": (2, 1)}),
    ((3, 3), {"padding": (2, 1), "padding_mode": "reflect", "stride": (1, 2)}),
    ((5,), {"padding": 3, "padding_mode": "circular", "groups": 2}),
    ((1, 2, 3), {"padding": (0, 1, 2), "padding_mode": "replicate", "bias": False}),
    ((2, 1, 2), {"padding": "valid", "dilation": 2, "groups": 2}),
]
each = pytest.mark.parametrize(("kernel", "settings"), SETTINGS, ids=str)


def pair(kernel: tuple[int, ...], **settings: Any) -> tuple[TTConv, nn.Module]:
    """A layer of 6 to 8 channels, and the dense one with its weight."""
    torch.manual_seed(0)
    channels = 6 // settings.get("groups", 1)
    features = torch.Size(kernel).numel() * channels
    layer = TTConv(tt_spec(features, 8, order=4, rank=3, kernel_size=kernel), kernel, **settings, dtype=F64)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    dense = KINDS[len(kernel)](6, 8, kernel, **settings, dtype=F64)
    with torch.no_grad():
        dense.weight.copy_(layer.weight)
        if layer.bias is not None:
            dense.bias.copy_(layer.bias)
    return layer, dense


def exact(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@each
@pytest.mark.parametrize("batch", [(), (0,), (3,)], ids=str)
def test_it_computes_what_the_dense_layer_does(
    kernel: tuple[int, ...], settings: dict[str, Any], batch: tuple[int, ...]
) -> None:
    layer, dense = pair(kernel, **settings)
    x = torch.randn(*batch, 6, *[7] * len(kernel), dtype=F64)
    exact(layer(x), dense(x))


@each
def test_it_has_the_attributes_of_the_dense_layer(kernel: tuple[int, ...], settings: dict[str, Any]) -> None:
    layer, dense = pair(kernel, **settings)
    constants: list[str] = dense.__constants__  # type: ignore[assignment]
    assert {name: getattr(layer, name) for name in constants} == {name: getattr(dense, name) for name in constants}
    assert layer.transposed is dense.transposed is False
    assert layer.extra_repr() == dense.extra_repr()
    assert layer.weight.shape == dense.weight.shape
    assert (layer.bias is None) == (dense.bias is None)
    assert layer.dense_type is type(dense)


def test_gradients_through_its_weight() -> None:
    layer, dense = pair((3, 3), padding=1)
    x = torch.randn(2, 6, 5, 5, dtype=F64)
    parameters = list(layer.parameters())
    got = torch.autograd.grad(layer(x).square().sum(), parameters)
    read = nn.functional.conv2d(x, layer.weight, layer.bias, padding=1)
    for one, other in zip(got, torch.autograd.grad(read.square().sum(), parameters), strict=True):
        exact(one, other)
    with pytest.raises(WeightError, match="TTConv"):
        layer.weight = dense.weight


def test_std_of_a_new_weight() -> None:
    torch.manual_seed(0)
    layer = TTConv(tt_spec(64 * 9, 128, order=4, rank=48, kernel_size=(3, 3)), (3, 3))
    want = nn.Conv2d(64, 128, 3).weight.detach().std()
    assert float(layer.weight.detach().std()) == pytest.approx(float(want), rel=0.1)


def test_pruned_ranks_are_cut_and_nothing_changes() -> None:
    layer, _ = pair((3, 3), padding=1)
    x = torch.randn(2, 6, 5, 5, dtype=F64)
    with torch.no_grad():
        layer.tt.rank_params[1][1] = 0.0
    before = layer(x)
    prune_(layer)
    assert layer.spec.inner_ranks[1] == 2
    exact(layer(x), before)
    with torch.no_grad():
        layer.tt.rank_params[0].zero_()
    prune_(layer)
    assert set(layer.spec.inner_ranks) == {0}
    assert layer.bias is not None
    exact(layer(x), layer.bias[:, None, None].expand(2, 8, 5, 5))


def test_copies_states_and_tied_layers() -> None:
    layer, _ = pair((3, 3), padding="same")
    x = torch.randn(2, 6, 5, 5, dtype=F64)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        exact(other(x), layer(x))
    smaller, _ = pair((3, 3), padding="same")
    smaller.tt.resize_(layer.spec.with_ranks(1))
    smaller.load_state_dict(layer.state_dict())
    exact(smaller(x), layer(x))
    tied = TTConv(layer.tt, (3, 3), stride=2, bias=False)
    exact(tied(x), nn.functional.conv2d(x, layer.weight, stride=2))


def test_it_compiles_whole() -> None:
    layer, _ = pair((3, 3), padding="same", padding_mode="circular", groups=2)
    x = torch.randn(2, 6, 5, 5, dtype=F64)
    torch._dynamo.reset()
    exact(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


def test_what_it_refuses() -> None:
    spec = tt_spec(54, 8, order=4, rank=2, kernel_size=(3, 3))
    with pytest.raises(SpecError, match="TTConv needs a TTSpec or a TensorTrain with one"):
        TTConv(TensorTrain(ttm_spec(20, 8), init_std=1.0), (3, 3))
    with pytest.raises(SpecError, match="whose product divides the 54 input features"):
        TTConv(spec, (5, 5))
    with pytest.raises(SpecError, match="one to three sizes"):
        TTConv(spec, (3, 3, 1, 1))
    with pytest.raises(SpecError, match=r"bias of shape \(8,\)"):
        TTConv(spec, (3, 3), bias=nn.Parameter(torch.zeros(7)))
    with pytest.raises(ValueError, match="out_channels must be divisible by groups"):
        TTConv(spec, (3, 3), groups=3)
    with pytest.raises(ValueError, match="padding='same' is not supported for strided"):
        TTConv(spec, (3, 3), padding="same", stride=2)
    with pytest.raises(SpecError, match="expected an input"):
        TTConv(spec, (3, 3))(torch.randn(2, 5, 4, 4))
    assert not isinstance(TTConv(spec, (3, 3)), TTLinear)
