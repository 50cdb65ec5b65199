"""CoLA against a plain formula; which layers the baselines take."""

import pytest
import torch
from torch import nn

from comera.baselines.cola import CoLA, CoLALinear, cola_
from comera.baselines.common import linear_layers
from comera.errors import ConfigError, ConversionError
from comera.trainer.config import TrainConfig


def test_it_is_two_products_with_an_activation_between() -> None:
    torch.manual_seed(0)
    dense = nn.Linear(12, 8).double()
    model = nn.Sequential(dense)
    cola_(model, rank=3)
    layer = model[0]
    assert isinstance(layer, CoLALinear)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    narrow = x @ layer.down.T
    y = (narrow * torch.sigmoid(narrow)) @ layer.up.T + dense.bias
    torch.testing.assert_close(layer(x), y, rtol=1e-12, atol=1e-12)
    assert layer.bias is dense.bias
    inputs = (x[:, :2].clone().requires_grad_(), *layer.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), inputs)


def test_numbers_ranks_and_rates() -> None:
    model = nn.Sequential(nn.Linear(12, 8, bias=False), nn.ReLU(), nn.Linear(8, 40), nn.Linear(40, 3))
    dense = sum(p.numel() for p in model.parameters())
    applied = CoLA().apply_(model, skip=("3",))
    assert [(row.name, row.stored, row.dense, row.note) for row in applied.rows] == [
        ("0", 2 * (12 + 8), 96, "bottleneck 2"),
        ("2", 2 * (40 + 8), 320, "bottleneck 2"),
    ]
    assert applied.dense_total == dense
    assert sum(p.numel() for p in model.parameters()) == 40 + 96 + 40 + 3 * 40 + 3
    factors, *others = applied.optimizer(TrainConfig(steps=1, lr=0.1, core_lr=0.2)).param_groups
    assert (factors["name"], factors["lr"], len(factors["params"])) == ("factors", 0.2, 4)
    assert [group["lr"] for group in others] == [0.1, 0.1]
    assert "core_lr" not in factors
    wide = nn.Sequential(nn.Linear(12, 8))
    assert cola_(wide, rank=100)[0].note == "bottleneck 8"  # clipped


def test_the_product_of_both_weights_has_the_variance_of_the_published_code() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200))
    cola_(model)
    layer = model[0]
    assert isinstance(layer, CoLALinear)
    assert layer.rank == 50
    assert (layer.up @ layer.down).var().item() == pytest.approx(1 / 500, rel=0.1)


def test_layers_keep_dtype_mode_and_frozen_biases() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16)).eval()
    model[0].bias.requires_grad_(False)
    cola_(model)
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 3 + [torch.bfloat16] * 3
    assert not any(module.training for module in model.modules())
    assert not model[0].bias.requires_grad


def test_tied_weights_subclasses_and_skipped_layers_stay() -> None:
    class Mine(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "table": nn.Embedding(6, 4),
            "head": nn.Linear(4, 6, bias=False),
            "mine": Mine(4, 4),
            "attention": nn.MultiheadAttention(4, 2),
            "free": nn.Linear(4, 4),
            "skipped": nn.Linear(4, 4),
        }
    )
    model["head"].weight = model["table"].weight
    model["again"] = model["free"]
    assert list(linear_layers(model, skip=("skip*",))) == ["free"]
    cola_(model, skip=("skip*",))
    assert type(model["free"]) is CoLALinear
    assert model["again"] is model["free"]
    assert model["head"].weight is model["table"].weight
    assert type(model["skipped"]) is nn.Linear


def test_nothing_to_convert_and_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"besides those that are skipped \(\*\)"):
        cola_(nn.Sequential(nn.Linear(3, 3)), skip=("*",))
    with pytest.raises(ConversionError, match="nothing to convert in Linear"):
        cola_(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=r"cola\.rank must be an integer >= 1 or nothing, got 0"):
        CoLA(rank=0)
