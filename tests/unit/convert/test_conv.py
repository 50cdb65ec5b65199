"""Models with convolutions: conversion and back, sizes, files, ranks that fall, and what stays dense."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ViTConfig, ViTModel

from comera.adapters import TTAdapter, adapt_
from comera.convert import BTT, CONVOLUTION, TT, TensorizeConfig, materialize_, register_converter, tensorize_
from comera.convert.registry import converters
from comera.errors import CheckpointError, ConversionError
from comera.export import export_program, serving_copy
from comera.export.layers import dense_copy
from comera.fp8 import fp8_
from comera.fusion import fuse_
from comera.memory import recompute_
from comera.memory.estimate import estimate
from comera.nn import BTTLinear, TTConv, model_size
from comera.optim import param_groups
from comera.pretrained import load_pretrained, save_pretrained
from comera.rank import LateStage, RankController

F64 = torch.float64
CONFIG = TensorizeConfig(BTT(rank=1), conv=TT(order=4, rank=4))


def net(dtype: torch.dtype = F64) -> nn.Sequential:
    """Images of 3 x 12 x 12 to 4 classes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding="valid", bias=False),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, groups=32),
        nn.Conv2d(32, 64, 3, padding=2, padding_mode="circular", groups=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
    ).to(dtype)


def images(dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(5, 3, 12, 12, dtype=dtype, generator=torch.Generator().manual_seed(1))


def test_without_a_format_convolutions_stay_dense() -> None:
    report = tensorize_(net(), TensorizeConfig(BTT(rank=1), overrides={"*": BTT(rank=2)}))
    rows = {row.name: row for row in report.rows if row.before == "Conv2d"}
    assert [row.layer for row in rows.values()] == [False] * 4
    assert rows["2"].note == "weight 32×16×3×3: a convolution, which TensorizeConfig(conv=comera.TT()) would compress"


def test_with_a_format_they_are_compressed_each_with_a_row() -> None:
    model = net()
    report = tensorize_(model, CONFIG)
    rows = {row.name: row for row in report.rows}
    assert [rows[name].after for name in "0258"] == ["TTConv", "TTConv", "TTConv", "BTTLinear"]
    assert rows["4"].note.startswith("a depthwise convolution")
    assert rows["2"].dense == 32 * 16 * 9
    assert rows["5"].dense == 64 * 16 * 9
    assert isinstance(model[8], BTTLinear)
    assert isinstance(model[5], TTConv)
    assert (model[5].groups, model[5].padding_mode, model[2].bias) == (2, "circular", None)
    again = tensorize_(model, CONFIG)
    assert [row.note for row in again.rows if row.after == "TTConv"] == ["already compressed"] * 3


def test_by_ratio() -> None:
    model = net()
    report = tensorize_(model, TensorizeConfig(conv=TT(order=4)), ratio=5)
    assert report.ratio == pytest.approx(5, rel=0.02)
    assert model_size(model).dense_total == sum(p.numel() for p in net().parameters())
    assert sum(row.after == "TTConv" for row in report.rows) >= 2


def test_full_ranks_from_trained_weights_are_exact_and_come_back() -> None:
    model, x = net(), images()
    want, dense = model(x), {name: p.clone() for name, p in model.named_parameters()}
    everything = TT(order=4, rank=10**6)
    report = tensorize_(model, TensorizeConfig(everything, conv=everything, min_ratio=0, init="decompose"))
    assert max(row.error for row in report.rows if row.error is not None) < 1e-12
    torch.testing.assert_close(model(x), want, rtol=1e-10, atol=1e-10)
    materialize_(model)
    assert [type(layer) for layer in model] == [type(layer) for layer in net()]
    assert [repr(layer) for layer in model] == [repr(layer) for layer in net()]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, dense[name], rtol=1e-10, atol=1e-10)


def test_dtype_device_bias_and_training_are_kept() -> None:
    model = net().eval()
    model[2].requires_grad_(False)
    bias = model[0].bias
    tensorize_(model, CONFIG)
    assert isinstance(model[0], TTConv)
    assert model[0].bias is bias
    assert not model[0].training
    assert not any(p.requires_grad for p in model[2].parameters())
    assert {p.dtype for p in model.parameters()} == {F64}


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = net()
    tensorize_(model, CONFIG)
    assert all(p.is_meta for p in model.parameters())
    assert isinstance(model[5], TTConv)
    assert model[5].tt.init_std == pytest.approx((3 * 16 * 9) ** -0.5)


def test_tied_convolutions_share_a_tensor_train() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3, padding=1, bias=False)).to(F64)
    model[1].weight = model[0].weight
    tensorize_(model, CONFIG)
    assert isinstance(model[0], TTConv)
    assert model[0].tt is model[1].tt
    materialize_(model)
    assert model[0].weight is model[1].weight


def test_overrides_by_name() -> None:
    model = net()
    report = tensorize_(model, replace(CONFIG, linear=None, overrides={"0": None, "5": TT(order=2, rank=3)}))
    rows = {row.name: row for row in report.rows}
    assert rows["0"].note == "left dense as configured"
    assert str(rows["5"].spec) == "TT 144 / 64 ranks 3"
    with pytest.raises(ConversionError, match=r"gives a BTT to 0 \(Conv2d 27 -> 16\), which needs a TT or None"):
        tensorize_(net(), replace(CONFIG, overrides={"0": BTT(rank=1)}))


def test_errors_name_the_format_that_convolutions_need() -> None:
    hint = r"Convolutions stay dense unless they have a format: TensorizeConfig\(conv=comera.TT\(\)\)"
    with pytest.raises(ConversionError, match=f"nothing to convert.* {hint}"):
        tensorize_(net()[:8], ratio=2)
    with pytest.raises(ConversionError, match=f"times smaller at most.* {hint}"):
        tensorize_(net(), ratio=50)
    with pytest.raises(ConversionError, match=f"matches no layer.* {hint}"):
        tensorize_(net(), TensorizeConfig(BTT(rank=1), overrides={"0": TT(rank=2)}))
    with pytest.raises(ConversionError, match="conv must be a TT or None"):
        TensorizeConfig(conv=BTT())  # type: ignore[arg-type]


class Named(nn.Conv2d):
    """A subclass, of which nothing is known."""


def test_subclasses_are_left_alone_until_they_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(converters(), Named, raising=False)
    model = nn.Sequential(Named(16, 32, 3), nn.Conv2d(32, 32, 3), nn.ConvTranspose2d(32, 32, 3))
    report = tensorize_(model, CONFIG)
    assert report.rows[0].note == "a subclass of a known layer; register_converter adds it"
    assert report.rows[2].note == "weight 32×32×3×3: a convolution"
    register_converter(Named, CONVOLUTION)
    tensorize_(model, CONFIG)
    assert isinstance(model[0], TTConv)
    materialize_(model)
    assert type(model[0]) is Named
    monkeypatch.delitem(converters(), Named)


def test_weight_norm_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(32, 32, 3)))
    report = tensorize_(model, CONFIG)
    assert [row.after for row in report.rows if row.compressed] == ["TTConv"]
    assert sum(row.dense + row.bias for row in report.rows) == report.dense_total


def test_saved_models_come_back(tmp_path: Path) -> None:
    model, x = net(), images()
    tensorize_(model, CONFIG)
    save_pretrained(model, tmp_path)
    with torch.device("meta"):
        fresh = net()
    for other in (net(), fresh):
        load_pretrained(other, tmp_path)
        assert torch.equal(other(x), model(x))
    misfit = net()
    misfit[2] = nn.Linear(16 * 9, 32)
    with pytest.raises(CheckpointError, match="expected a tensor train for a Linear 144 -> 32, got TTConv"):
        load_pretrained(misfit, tmp_path)


def test_exports(tmp_path: Path) -> None:
    model, x = net(torch.float32).eval(), images(torch.float32)
    tensorize_(model, CONFIG)
    want = model(x)
    torch.testing.assert_close(dense_copy(model)(x), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(serving_copy(model)(x), want, rtol=1e-4, atol=1e-5)
    written = export_program(model, [x], tmp_path / "program")
    program = torch.export.load(written.path / "model.pt2").module()
    torch.testing.assert_close(program(x[:3]), want[:3], rtol=1e-4, atol=1e-5)


def test_fused_recomputed_and_fp8() -> None:
    model, x = net(), images()
    tensorize_(model, replace(CONFIG, linear=TT(order=4, rank=16)))
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    report = fp8_(model)
    assert {row.reason for row in report.left_alone if row.kind == "TTConv"} == {"convolutions have no FP8 product"}
    fp8_(model, None)
    fuse_(model)
    block = nn.Sequential(model)
    outputs, factors = 16 + 32 + 64 + 64, 0 + 4 + 2 * 4 + 16  # of conv of few channels, conv, in two groups, linear
    found = recompute_(block, blocks="0")
    assert (found.layers, found.hidden, found.low_rank) == (4, outputs, factors)
    for one, other in zip(torch.autograd.grad(block(x).square().sum(), list(model.parameters())), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_a_block_that_recomputes_keeps_the_low_rank_activations_of_convolutions() -> None:
    block = nn.Sequential(nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=2))).to(F64)
    tensorize_(block, CONFIG)
    x = torch.randn(2, 16, 9, 9, dtype=F64, requires_grad=True)
    inputs = [x, *block.parameters()]

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += func is torch.ops.aten.convolution.default
            return func(*args, **(kwargs or {}))

    wanted = torch.autograd.grad(block(x).square().sum(), inputs)
    recompute_(block, blocks="0")
    y = block(x).square().sum()
    with Count() as count:
        found = torch.autograd.grad(y, inputs)
    assert count.seen == 1  # the second half of the first layer; that of the last one is not needed
    assert all(map(torch.equal, found, wanted))


def test_adapters_are_for_linear_layers() -> None:
    model = net()
    tensorize_(model, replace(CONFIG, linear=None))
    with pytest.raises(ConversionError, match=r"'5', which matches only 5 \(TTConv\)"):
        adapt_(model, TTAdapter(rank=2), targets="5")
    with pytest.raises(ConversionError, match=r"'0', which matches only 0 \(Conv2d\)"):
        adapt_(net(), TTAdapter(rank=2), targets="0")


def test_memory_of_a_step_is_estimated() -> None:
    with torch.device("meta"):
        model = net(torch.float32)
        x = torch.empty(64, 3, 12, 12)
    tensorize_(model, CONFIG)
    found = estimate(model, lambda: model(x).square().sum())
    assert found.total > 64 * 16 * 144 * 4  # the first activation


def test_ranks_fall_and_so_does_the_loss() -> None:
    """Which of four quarters of an image is the brightest."""
    generator = torch.Generator().manual_seed(0)
    model = net(torch.float32)
    tensorize_(model, replace(CONFIG, conv=TT(order=4, rank=8), linear=TT(order=4, rank=8)))
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2))
    ranks = RankController(model, late=LateStage(target_size=0.5, start_step=20)).attach(optimizer)
    before, losses = model_size(model).tensorized, []
    for _ in range(60):
        x = torch.randn(32, 3, 12, 12, generator=generator)
        label = torch.randint(4, (32,), generator=generator)
        for image, quarter in zip(x, label.tolist(), strict=True):
            row, col = divmod(quarter, 2)
            image[:, 6 * row : 6 * row + 6, 6 * col : 6 * col + 6] += 1
        loss = F.cross_entropy(model(x), label)
        loss.backward()
        ranks.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    ranks.meet_target_()
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert model_size(model).tensorized <= 0.5 * before
    assert isinstance(model[5], TTConv)
    assert model[5].spec.numel < TT(order=4, rank=8).spec(144, 64, (3, 3)).numel


def test_transformers_saves_and_loads_them(tmp_path: Path) -> None:
    config = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16)
    config.patch_size = 8
    model = ViTModel(config).eval()
    tensorize_(model, CONFIG)
    model.save_pretrained(tmp_path)
    loaded = ViTModel.from_pretrained(tmp_path).eval()
    layer = loaded.embeddings.patch_embeddings.projection
    assert isinstance(layer, TTConv)
    assert layer.stride == (8, 8)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(x).last_hidden_state, model(x).last_hidden_state)
