"""A gate that is NaN reaches the output and all gradients that it is in, by every way that gates are read: it is
above no threshold, but not pruned either. One that is -inf is pruned."""

from collections.abc import Callable
from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comera.nn.conv import TTConv
from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMProjection
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.packed import CompressedParameter, Layout
from comera.nn.tables import lookup_tables
from comera.nn.tensor_train import CompressedLayer, TensorTrain
from comera.tt.dense import absorb, materialize
from comera.tt.shapes import tt_spec
from comera.tt.spec import BTTSpec, TTMSpec, TTSpec

TT = TTSpec(12, 10, (4, 3), (2, 5), (1, 3, 4, 2, 1))
BTT = BTTSpec(12, 10, in_modes=(3, 4), out_modes=(2, 5), block_ranks=2)
TTM = TTMSpec(40, 6, (8, 5), (3, 2), (1, 4, 1))
DEEP = TTMSpec(300, 12, (8, 7, 6), (3, 2, 2), (1, 4, 3, 1))
CONV = tt_spec(4 * 9, 10, order=4, rank=3, kernel_size=(3, 3))
Read = Callable[[CompressedLayer], Tensor]
By = Callable[[Tensor], Tensor]


def linear(rows: int) -> tuple[Read, By]:
    x = torch.linspace(-1, 1, rows * 12).view(rows, 12).sin()
    return lambda layer: layer(x), lambda weight: F.linear(x.double(), weight)


def lookup(ids: int, rows: int) -> tuple[Read, By]:
    chosen = torch.arange(ids) * 7 % rows
    return lambda layer: layer(chosen), lambda weight: weight[chosen]


def bag(ids: int, rows: int) -> tuple[Read, By]:
    chosen = (torch.arange(ids) * 7 % rows).view(-1, 2)
    return lambda layer: layer(chosen), lambda weight: weight[chosen].sum(1)


def together(ids: int, rows: int) -> tuple[Read, By]:
    chosen = torch.arange(ids) * 7 % rows
    return lambda layer: lookup_tables([layer], [chosen])[0], lambda weight: weight[chosen]


def convolution() -> tuple[Read, By]:
    x = torch.linspace(-1, 1, 3 * 4 * 25).view(3, 4, 5, 5).sin()
    return lambda layer: layer(x), lambda weight: F.conv2d(x.double(), weight)


def head(rows: int) -> tuple[Read, By]:
    x = torch.linspace(-1, 1, rows * 6).view(rows, 6).sin()
    return lambda layer: layer(x), lambda weight: F.linear(x.double(), weight)


def by_factors(spec: TTSpec) -> TTLinear:
    layer = TTLinear(spec, bias=False)
    layer.contraction = "low_rank"
    return layer


def parameter(spec: TTSpec) -> CompressedParameter:
    return CompressedParameter(TensorTrain(spec, init_std=0.1), Layout((10, 12), 12, 10))


READS: dict[str, tuple[CompressedLayer, tuple[Read, By]]] = {
    **{f"TTLinear, {rows} rows": (TTLinear(TT, bias=False), linear(rows)) for rows in (1, 2, 64)},
    "factors": (by_factors(TT), linear(4)),
    "BTTLinear": (BTTLinear(BTT, bias=False), linear(5)),
    "TTConv": (TTConv(CONV, (3, 3), bias=False), convolution()),
    **{f"lookup of {n}": (TTMEmbedding(TTM), lookup(n, 40)) for n in (3, 400)},
    **{f"deep lookup of {n}": (TTMEmbedding(DEEP), lookup(n, 300)) for n in (3, 9000)},
    "bags": (TTMEmbeddingBag(TTM), bag(12, 40)),
    "deep bags": (TTMEmbeddingBag(DEEP), bag(12, 300)),
    "tables": (TTMEmbedding(TTM), together(6, 40)),
    "deep tables": (TTMEmbedding(DEEP), together(6, 300)),
    "head": (TTMProjection(TTM, bias=False), head(4)),
    "deep head": (TTMProjection(TTMSpec(60, 6, (5, 4, 3), (3, 2, 1), (1, 4, 3, 1)), bias=False), head(40)),
    "weight": (TTLinear(TT, bias=False), (lambda layer: layer.weight * 1.0, lambda weight: weight * 1.0)),
    "parameter": (parameter(TT), (lambda layer: layer.weight * 1.0, lambda weight: weight * 1.0)),
}


@pytest.mark.parametrize("kernels", ["all", "none"])
@pytest.mark.parametrize("name", READS)
def test_a_nan_gate_reaches_what_it_is_in(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMERA_KERNELS", kernels)
    layer, (read, by) = READS[name]
    train = layer.tt
    torch.manual_seed(0)
    train.reset_parameters()
    with torch.no_grad():
        train.rank_params[0][0], train.rank_params[0][1] = nan, -inf
    found = read(layer)
    leaves = [p.detach().double().requires_grad_() for p in train.parameters()]
    cores, gates = leaves[: train.spec.order], leaves[train.spec.order :]
    kept = [torch.where(d <= train.threshold, 0.0, d) for d in gates]
    dense = materialize(train.spec, absorb(cores, kept))
    if not isinstance(train.spec, TTMSpec):
        dense = dense.t().reshape(layer.weight.shape)
    expected = by(dense)
    assert found.isnan().any()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    dy = torch.linspace(-1, 1, expected.numel()).cos().view(expected.shape)
    grads = torch.autograd.grad(found, list(train.rank_params), dy)
    exact = torch.autograd.grad(expected, gates, dy.double())
    for grad, want in zip(grads, exact, strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert grads[0][0] != 0
    assert grads[0][1] == 0
    assert [bool(kept) for kept in train.unpruned()[0][:2]] == [True, False]
