"""Layers with an adapter: y = x W + bias + s · x Δ against the dense oracle."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from comera.adapters import TTAdapter, adapt_, merge_adapters_
from comera.errors import WeightError
from comera.nn import TTMProjection
from comera.tt.dense import materialize
from comera.tt.shapes import ttm_spec

from ...helpers.adapted_models import F64, FORMATS, close, layer_of, randomize_

# --- one layer against the oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("order", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize(("features", "outputs"), [(12, 30), (13, 7)])
def test_an_adapted_layer_adds_its_product(kind: str, order: int, rank: int, features: int, outputs: int) -> None:
    model = layer_of(kind, features, outputs)
    weight, bias = model[0].weight.detach().clone(), model[0].bias
    x = torch.randn(5, features, dtype=F64)
    before = model(x)
    adapt_(model, TTAdapter(order, rank, scale=0.7), targets="0")
    assert torch.equal(model(x), before)  # zero at first, exactly
    randomize_(model)
    tt = model[0].adapter.tt
    assert tt.spec.order == order
    delta = materialize(tt.spec, tt.effective_cores())
    close(model(x), F.linear(x, weight + 0.7 * delta.t(), bias))
    close(model[0].weight, weight + 0.7 * delta.t())


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 3), (0, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_any_batch(kind: str, lead: Sequence[int], bias: bool) -> None:
    model = layer_of(kind, 12, 10, bias=bias)
    adapt_(model, TTAdapter(4, 2, scale=-1.5), targets="*")
    randomize_(model)
    x = torch.randn(*lead, 12, dtype=F64)
    close(model(x), F.linear(x, model[0].weight, model[0].bias))


@pytest.mark.parametrize("kind", FORMATS)
def test_inputs_that_are_not_contiguous(kind: str) -> None:
    model = layer_of(kind, 12, 10)
    adapt_(model, TTAdapter(4, 2), targets="*")
    randomize_(model)
    for x in (torch.randn(12, 5, dtype=F64).t(), torch.randn(5, 24, dtype=F64)[:, ::2], torch.ones(1, dtype=F64)):
        given = x.expand(3, 12) if x.ndim == 1 else x
        close(model(given), model(given.contiguous()))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("order", "rank"), [(2, 2), (4, 1), (5, 3)])
def test_gradients_of_the_input_and_the_adapter(kind: str, order: int, rank: int) -> None:
    model = layer_of(kind, 6, 10)
    adapt_(model, TTAdapter(order, rank, scale=2.0), targets="0")
    randomize_(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(name.startswith("0.adapter.tt.") for name in trained)
    x = torch.randn(3, 6, dtype=F64, requires_grad=True)

    def output(x: Tensor, *values: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, dict(zip(trained, values, strict=True)), x)
        return found

    assert torch.autograd.gradcheck(output, (x, *trained.values()))


def test_the_gradient_that_leaves_zero_is_that_of_the_last_core_alone() -> None:
    model = layer_of("dense", 12, 10)
    adapt_(model, TTAdapter(4, 2), targets="0")
    model(torch.randn(5, 12, dtype=F64)).square().sum().backward()
    moved = [bool(p.grad.any()) for p in model[0].adapter.tt.cores]
    assert moved == [False, False, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dtype_is_that_of_the_layer(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 16)).to(dtype)
    adapt_(model, TTAdapter(4, 2), targets="0")
    assert {core.dtype for core in model[0].adapter.tt.cores} == {dtype}
    assert model(torch.randn(2, 16, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("kind", FORMATS)
def test_autocast(kind: str) -> None:
    model = layer_of(kind, 32, 16).float()
    adapt_(model, TTAdapter(4, 2), targets="0")
    randomize_(model)
    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), model(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", FORMATS)
def test_it_compiles_whole(kind: str) -> None:
    model = layer_of(kind, 12, 10)
    adapt_(model, TTAdapter(4, 2, scale=0.5), targets="0")
    randomize_(model)
    x = torch.randn(3, 12, dtype=F64, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    parameters = [x, *(p for p in model.parameters() if p.requires_grad)]
    wanted = torch.autograd.grad(model(x).square().sum(), parameters)
    for found, want in zip(torch.autograd.grad(compiled(x).square().sum(), parameters), wanted, strict=True):
        close(found, want)


def test_layers_that_store_their_weight_transposed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(10, 12)).to(F64)
    x = torch.randn(3, 12, dtype=F64)
    before = model(x)
    adapt_(model, TTAdapter(3, 2), targets="0")
    close(model(x), before)
    randomize_(model)
    adapted = model(x)
    assert model[0].weight.shape == (12, 10)
    close(adapted, x @ model[0].weight + model[0].bias)
    merge_adapters_(model)
    assert type(model[0]) is Conv1D
    close(model(x), adapted)


def test_the_head_over_a_table() -> None:
    model = nn.Sequential(TTMProjection(ttm_spec(30, 12, order=2, rank=3), dtype=F64))
    x = torch.randn(4, 12, dtype=F64)
    adapt_(model, TTAdapter(4, 2), targets="0")
    randomize_(model)
    close(model(x), F.linear(x, model[0].weight, model[0].bias))


# --- what others read ------------------------------------------------------------------------------------------------


def test_torch_attention_and_its_fast_path_see_adapters() -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(F64).eval()
    x = torch.randn(2, 5, 16, dtype=F64)
    with torch.no_grad():
        before = block(x)
    adapt_(block, TTAdapter(4, 2), targets=["linear*", "self_attn.out_proj"])
    randomize_(block)
    adapted = block(x).detach()
    with torch.no_grad():  # where torch would multiply by the weights itself
        close(block(x), adapted)
    assert (adapted - before).abs().max() > 0.01
    merge_adapters_(block)
    close(block(x), adapted)


def test_a_write_into_the_sum_raises() -> None:
    model = layer_of("dense", 12, 10)
    adapt_(model, TTAdapter(4, 2), targets="0")
    with pytest.raises(WeightError, match="read only"):
        model[0].weight.zero_()
