"""Layers of tensorly-torch against the dense matrix that their cores stand for."""

import sys
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from comera.baselines import check_method, installed
from comera.baselines.tensorly import Tensorly, tensorly_
from comera.errors import ConfigError
from comera.trainer.config import TrainConfig
from comera.tt.shapes import tt_spec


def dense_weight(layer: Any) -> torch.Tensor:
    """(out, in) from the cores (r, out_k, in_k, s), by one plain sum after the other."""
    whole = torch.ones(1, 1, 1, dtype=layer.weight.factors[0].dtype)
    for core in layer.weight.factors:
        whole = torch.einsum("oir,rmns->omins", whole, core)
        whole = whole.flatten(2, 3).flatten(0, 1)
    return whole[..., 0]


@pytest.mark.parametrize("implementation", ["factorized", "reconstructed"])
@pytest.mark.parametrize("sizes", [(64, 48), (35, 12), (7, 12)])
def test_it_is_the_dense_layer_of_its_cores(sizes: tuple[int, int], implementation: Any) -> None:
    torch.manual_seed(0)
    dense = nn.Linear(*sizes).double()
    model = nn.Sequential(dense)
    tensorly_(model, rank=5, order=4, implementation=implementation)
    layer = model[0]
    x = torch.randn(2, 3, sizes[0], dtype=torch.float64, requires_grad=True)
    y, expected = layer(x), x @ dense_weight(layer).T + dense.bias
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    wanted = [x, *layer.weight.factors, layer.bias]
    seed = torch.randn_like(y)
    for came, right in zip(
        torch.autograd.grad(y, wanted, seed), torch.autograd.grad(expected, wanted, seed), strict=True
    ):
        torch.testing.assert_close(came, right, rtol=1e-10, atol=1e-12)
    assert layer.bias is dense.bias


def test_modes_and_rank_are_those_of_our_layers() -> None:
    model = nn.Sequential(nn.Linear(768, 3072, device="meta"), nn.Linear(768, 768, bias=False, device="meta"))
    dense = sum(p.numel() for p in model.parameters())
    applied = Tensorly().apply_(model)
    for layer, out in zip(model, (3072, 768), strict=True):
        spec: Any = tt_spec(768, out, order=6, rank=30)
        assert (layer.in_tensorized_features, layer.out_tensorized_features) == (spec.in_modes, spec.out_modes)
        assert list(layer.weight.rank) == [1, 30, 30, 1]
    stored = [sum(prod(core.shape) for core in layer.weight.factors) for layer in model]
    assert stored[1] == 12 * 8 * 30 + 30 * 8 * 8 * 30 + 30 * 8 * 12
    assert [(row.stored, row.dense) for row in applied.rows] == [(stored[0], 768 * 3072), (stored[1], 768 * 768)]
    assert applied.rows[1].note == "12·8·8 / 8·8·12 ranks 30-30"
    assert applied.dense_total == dense
    cores, others = applied.optimizer(TrainConfig(steps=1, lr=0.1, core_lr=0.2)).param_groups
    assert (cores["name"], cores["lr"], len(cores["params"])) == ("cores", 0.2, 6)
    assert (others["name"], len(others["params"])) == ("dense_no_decay", 1)


def test_random_cores_give_the_weight_the_deviation_that_it_had() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 192))
    model[0].weight.data.normal_(0, 0.02)
    tensorly_(model, rank=24, order=4)
    assert dense_weight(model[0]).std().item() == pytest.approx(0.02, rel=0.15)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, said in (("tltorch", "which is not installed: pip install"), ("tensorly", "which lacks tensorly")):
        with monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.partition(".")[0] in ("tltorch", "tensorly")]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, module, None)
            model = nn.Sequential(nn.Linear(8, 8))
            with pytest.raises(ConfigError, match=f"method tensorly needs the package tensorly-torch, {said}"):
                tensorly_(model)
            assert type(model[0]) is nn.Linear
    check_method("tensorly")
    check_method("dense")
    assert installed("dense")


def test_settings_out_of_range_are_refused() -> None:
    for name, value in (("order", 5), ("order", 0), ("rank", 0), ("implementation", "fast")):
        with pytest.raises(ConfigError, match=rf"tensorly\.{name} must be"):
            Tensorly(**{name: value})  # type: ignore[arg-type]
