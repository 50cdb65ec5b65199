"""torch.compile traces every product and look-up as one graph, with the same values and gradients."""

import pytest
import torch

from comera.nn.linear import BTTLinear
from comera.ops.block_product import btt_linear
from comera.ops.linear import tt_linear
from comera.ops.lookup import ttm_bag, ttm_lookup
from comera.ops.planner.plan import plan_linear, plan_lookup, plan_projection
from comera.ops.projection import ttm_linear
from comera.tt.spec import TTMSpec, TTSpec

from ...helpers.specs import btt

# torch.compile itself instantiates torch.autograd.Function for its own bookkeeping and warns about it
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

LINEAR = TTSpec(23, 22, (3, 4, 2), (4, 6), (1, 3, 5, 4, 3, 1))
TABLE = TTMSpec(50, 11, (4, 13), (3, 4), (1, 5, 1))
LONG_TABLE = TTMSpec(50, 11, (4, 5, 3), (3, 2, 2), (1, 5, 4, 1))


class Chain(torch.nn.Module):
    """What the layers do: hold a spec and cores, and call a product with them."""

    def __init__(self, function, spec, **options):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.spec, self.options = function, spec, options
        self.cores = torch.nn.ParameterList([torch.randn(shape) for shape in spec.core_shapes])

    def forward(self, x):
        return self.function(x, self.spec, list(self.cores), **self.options)


def compiled(module, **options):
    torch._dynamo.reset()
    return torch.compile(module, backend="aot_eager", fullgraph=True, **options)


def values_and_gradients(module, *x):
    y = module(*x)
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    leaves = [*module.parameters(), *(t for t in x if t.requires_grad)]
    return [y, *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("strategy", ["low_rank", "sequential", "dense", None])
def test_tt_linear(strategy):
    plan = strategy and plan_linear(LINEAR, 14).using(strategy)
    module = Chain(tt_linear, LINEAR, bias=torch.randn(22), plan=plan)
    x = torch.randn(2, 7, 23, requires_grad=True)
    torch.testing.assert_close(
        values_and_gradients(compiled(module), x), values_and_gradients(module, x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("spec", [btt((4, 6), (5, 5), 2, pad_in=1, pad_out=3), btt((4, 6), (2, 11), [3, 0, 1, 2] * 2)])
def test_btt_linear(spec):
    module = Chain(btt_linear, spec, bias=torch.randn(22))
    x = torch.randn(2, 7, spec.in_features, requires_grad=True)
    torch.testing.assert_close(
        values_and_gradients(compiled(module), x), values_and_gradients(module, x), rtol=1e-4, atol=1e-4
    )
    layer = BTTLinear(spec)
    torch.testing.assert_close(compiled(lambda: layer.weight * 2)(), layer.weight * 2)


@pytest.mark.parametrize("strategy", ["two_parts", "dense"])
def test_ttm_linear(strategy):
    module = Chain(ttm_linear, TABLE, plan=plan_projection(TABLE, 14).using(strategy))
    x = torch.randn(2, 7, 11, requires_grad=True)
    torch.testing.assert_close(
        values_and_gradients(compiled(module), x), values_and_gradients(module, x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("strategy", ["two_parts", "dense", None])
def test_ttm_bag(strategy, mode):
    plan = strategy and plan_lookup(TABLE, 14).using(strategy)
    weights = torch.randn(6) if mode == "sum" else None

    def bags(ids, spec, cores, offsets=None):
        return ttm_bag(ids, offsets, spec, cores, mode=mode, per_sample_weights=weights, padding_idx=3, plan=plan)

    module = Chain(bags, TABLE, offsets=torch.tensor([0, 2, 2, 5]))
    ids = torch.tensor([0, 3, 49, 7, 7, 3])
    torch.testing.assert_close(
        values_and_gradients(compiled(module), ids), values_and_gradients(module, ids), rtol=1e-5, atol=1e-5
    )
    module.options["offsets"] = torch.tensor([0, 2, 1, 5])
    with pytest.raises(RuntimeError, match=r"never decrease and reach at most 6"):
        compiled(module)(ids)


@pytest.mark.parametrize("strategy", ["two_parts", "sequential", "dense"])
def test_ttm_lookup(strategy):
    module = Chain(ttm_lookup, LONG_TABLE, padding_idx=3, plan=plan_lookup(LONG_TABLE, 14).using(strategy))
    ids = torch.tensor([[0, 3, 49], [7, 7, 3]])
    torch.testing.assert_close(
        values_and_gradients(compiled(module), ids), values_and_gradients(module, ids), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(RuntimeError, match=r"expected every id in 0 ... 49"):
        compiled(module)(torch.tensor([[0, 50, 49], [7, 7, 3]]))


def test_autocast():
    module = Chain(tt_linear, LINEAR, bias=torch.randn(22))

    def under_autocast(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x)

    x = torch.randn(600, 23)
    y = compiled(under_autocast)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, under_autocast(x))


def test_choice_follows_the_batch_bucket(monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "none")  # a graph has torch's products, and numbers are up to 100,000
    spec = TTSpec(256, 256, (4, 4, 4, 4), (4, 4, 4, 4), (1, 4, 12, 12, 12, 12, 12, 4, 1))
    assert plan_linear(spec, 1).strategy != plan_linear(spec, 1024).strategy
    module = Chain(tt_linear, spec)
    one_graph = compiled(module, dynamic=True)
    for batch in (3, 1000, 1024):
        x = torch.randn(batch, 256)
        torch.testing.assert_close(one_graph(x), module(x), rtol=1e-4, atol=1e-3)
