"""Packed weights of nn.MultiheadAttention and XLNet: conversion and back, the fast path, files and exports."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import XLNetConfig, XLNetLMHeadModel

from comera.convert import BTT, TT, TensorizeConfig, materialize_, tensorize_
from comera.export import serving_copy
from comera.nn import CompressedParameter

F64 = torch.float64
IDS = torch.tensor([[5, 6, 7, 1, 9], [8, 63, 2, 3, 4]])


def held(model: nn.Module) -> dict[str, CompressedParameter]:
    return {name: module for name, module in model.named_modules() if isinstance(module, CompressedParameter)}


def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


def test_a_decoder_whose_copies_hide_their_activation() -> None:
    """torch's own: a copy of a layer has F.relu beside the module of that name."""
    layer = nn.TransformerDecoderLayer(32, 4, 48, activation=nn.GELU(), batch_first=True)
    model = nn.TransformerDecoder(layer, 2)
    assert not isinstance(model.layers[0].activation, nn.Module)
    assert "activation" in model.layers[0]._modules
    report = tensorize_(model, TensorizeConfig(TT(order=4, rank=6)))
    assert sum(row.spec is not None for row in report.rows) == 2 * 6
    assert model(torch.randn(2, 3, 32), torch.randn(2, 4, 32)).isfinite().all()


@pytest.mark.parametrize("sizes", [{}, {"kdim": 24, "vdim": 40}, {"bias": False}], ids=str)
@pytest.mark.parametrize("format_", [TT(order=4, rank=6), BTT(rank=1)], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention(sizes: dict[str, Any], format_: TT | BTT, training: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 4, batch_first=True, dtype=F64, **sizes)})
    report = tensorize_(model, TensorizeConfig(format_))
    names = {name.rpartition(".")[2] for name in held(model)}
    assert names == ({"q_proj_weight", "k_proj_weight", "v_proj_weight"} if "kdim" in sizes else {"in_proj_weight"})
    assert sum(row.stored + row.bias for row in report.rows) == report.total
    dense = materialize_(copy.deepcopy(model))
    q, k, v = (torch.randn(2, 5, width, dtype=F64) for width in (32, sizes.get("kdim", 32), sizes.get("vdim", 32)))
    attention, other = model.train(training)["attention"], dense.train(training)["attention"]
    for weights in (True, False):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                found, exact = (each(q, k, v, need_weights=weights) for each in (attention, other))
            torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    attention(q, k, v)[0].square().sum().backward()
    other(q, k, v)[0].square().sum().backward()
    for path, part in held(model).items():
        train, leaf = list(part.tt.parameters()), path.rpartition(".")[2]
        wanted = torch.autograd.grad(part.layout.parameter(part.tt.dense()), train, getattr(other, leaf).grad)
        torch.testing.assert_close([p.grad for p in train], list(wanted), rtol=1e-9, atol=1e-10)


def encoder(nested: bool = False) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, dtype=F64)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_transformer_takes_no_fast_path_around_the_cores(training: bool, grad: bool) -> None:
    model = encoder()
    report = tensorize_(model, TensorizeConfig(TT(order=4, rank=6)))
    assert all(row.compressed for row in report.rows if row.layer)
    dense = materialize_(copy.deepcopy(model)).train(training)
    x, mask = torch.randn(3, 6, 32, dtype=F64), torch.zeros(3, 6, dtype=torch.bool)
    mask[0, 4:] = True
    with torch.set_grad_enabled(grad):
        found, exact = model.train(training)(x, src_key_padding_mask=mask), dense(x, src_key_padding_mask=mask)
    torch.testing.assert_close(found[~mask], exact[~mask], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("linear", [TT(order=4, rank=6), BTT(rank=2)])
def test_a_served_transformer_takes_no_fast_path_around_the_cores(linear: TT | BTT, grad: bool, nested: bool) -> None:
    model = encoder(nested)
    tensorize_(model, TensorizeConfig(linear))
    served = serving_copy(model)
    x, mask = torch.randn(3, 6, 32, dtype=F64), torch.zeros(3, 6, dtype=torch.bool)
    mask[0, 4:] = True
    with torch.set_grad_enabled(grad):
        for seen in (None, mask):
            found, exact = (each(x, src_key_padding_mask=seen) for each in (served, model.eval()))
            torch.testing.assert_close(found[~mask], exact[~mask], rtol=1e-9, atol=1e-10)
    program = torch.export.export(served, (x,))
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-9, atol=1e-10)


def test_exports_hold_cores(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    model = nn.Sequential(Attention(), nn.Linear(32, 64)).eval()
    tensorize_(model, TensorizeConfig(TT(order=4, rank=6)))
    x = torch.randn(3, 6, 32)
    served = serving_copy(model)
    torch.testing.assert_close(served(x), model(x), rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in served.parameters()) <= sum(p.numel() for p in model.parameters())
    program = torch.export.export(served, (x,))
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [lambda: nn.LSTM(32, 48, 2), lambda: nn.MultiheadAttention(32, 4)])
def test_parameters_come_back_in_their_order(build: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(build())
    names = [name for name, _ in model.named_parameters()]
    tensorize_(model, TensorizeConfig(TT(order=4, rank=4)))
    materialize_(model)
    assert [name for name, _ in model.named_parameters()] == names


def xlnet() -> XLNetLMHeadModel:
    torch.manual_seed(0)
    return XLNetLMHeadModel(XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=48, vocab_size=64)).to(F64)


def test_xlnet(tmp_path: Path) -> None:
    model = xlnet().eval()
    tensorize_(model, TensorizeConfig(TT(order=4, rank=6), None))
    assert [name.rpartition(".")[2] for name in held(model)] == ["q", "k", "v", "o", "r"] * 2
    dense = materialize_(copy.deepcopy(model)).eval()
    found, exact = logits(model), logits(dense)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-10)
    found.square().mean().backward()
    exact.square().mean().backward()
    for leaf in ("o", "r", "q"):
        part = model.transformer.layer[0].rel_attn.compressed[leaf]
        train = list(part.tt.parameters())
        grad = getattr(dense.transformer.layer[0].rel_attn, leaf).grad
        wanted = torch.autograd.grad(part.layout.parameter(part.tt.dense()), train, grad)
        torch.testing.assert_close([p.grad for p in train], list(wanted), rtol=1e-9, atol=1e-10)
    model.float().save_pretrained(tmp_path)
    loaded = XLNetLMHeadModel.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded), logits(model))


def test_xlnet_decomposes_exactly() -> None:
    model = xlnet().eval()
    before = logits(model)
    tensorize_(model, TensorizeConfig(TT(order=2, rank=999), None, init="decompose", min_ratio=0.0))
    torch.testing.assert_close(logits(model), before, rtol=1e-9, atol=1e-9)
