"""Linear layers as block tensor trains, and back."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from comera.convert import BTT, TT, TTM, TensorizeConfig, materialize_, tensorize_
from comera.nn.linear import BTTLinear
from comera.nn.tensor_train import named_trains

from ...helpers.small_net import IDS, Net, kinds

BLOCKS = TensorizeConfig(linear=BTT(rank=2), embedding=TTM(order=2, rank=4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_linear_layers_become_blocks_and_come_back(dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    bias = model.up.bias
    report = tensorize_(model, replace(BLOCKS, overrides={"blocks.0": TT(order=4, rank=4), "blocks.1": BTT(1, (4, 6))}))
    assert kinds(model) == {**kinds(Net()), "embed": "TTMEmbedding", "up": "BTTLinear"} | {
        "blocks.0": "TTLinear",
        "blocks.1": "BTTLinear",
    }
    assert [str(tt.spec) for _, tt in named_trains(model)][1::2] == ["BTT 4·8 / 8·8 rank 2", "BTT 4·16 / 6·8 rank 1"]
    assert model.up.bias is bias
    assert {row.name: row.stored for row in report.rows}["up"] == model.up.tt.spec.numel + model.up.tt.spec.rank_numel
    assert report.total == sum(p.numel() for p in model.parameters())
    assert "BTT 4·8 / 8·8 rank 2" in str(report)
    expected = model(IDS)
    materialize_(model)
    assert kinds(model) == kinds(Net())
    torch.testing.assert_close(model(IDS), expected, **({"rtol": 0.1, "atol": 0.05} if dtype == torch.bfloat16 else {}))


def test_blocks_are_decomposed_one_by_one() -> None:
    model, x = Net().double(), torch.randn(5, 32, dtype=torch.float64)
    expected = model.up(x)
    report = tensorize_(model, replace(BLOCKS, linear=BTT(rank=99), min_ratio=0, init="decompose"))
    torch.testing.assert_close(model.up(x), expected)
    errors = {row.name: row.error for row in report.rows}
    assert errors["up"] < 1e-12
    model = Net()
    weight = model.up.weight.detach().double()
    report = tensorize_(model, replace(BLOCKS, init="decompose"))
    blocks = weight.t().reshape(4, 8, 8, 8).transpose(1, 2)
    tail = torch.linalg.svdvals(blocks)[..., 2:].norm() / weight.norm()
    assert {row.name: row.error for row in report.rows}["up"] == pytest.approx(float(tail), rel=1e-4)


def test_tied_linear_layers_share_blocks_on_the_meta_device_too() -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        model[1].weight = model[0].weight
        tensorize_(model, BLOCKS)
        assert model[0].tt is model[1].tt
        assert isinstance(model[0], BTTLinear)
        assert all(value.device.type == device for value in model.state_dict().values())
