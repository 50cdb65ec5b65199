"""The one table of optimizers: every name trains, is estimated and planned, and keeps what the table says."""

import pytest
import torch
from torch import Tensor, nn

import comera
from comera.errors import ConfigError
from comera.optim.names import OPTIMIZERS, OptimizerName, Rates, optimizer_named
from comera.trainer.config import TrainConfig
from comera.trainer.optimizer import named_optimizer

NAMES = pytest.mark.parametrize("name", OPTIMIZERS)


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 40), nn.Linear(40, 3))
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=4), overrides={"[23]": None}))
    return model


def test_other_names_than_those_of_the_table_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected an optimizer out of adamw, muon, .*, momentum, got 'lion'"):
        optimizer_named("lion")
    with pytest.raises(ConfigError, match=r"optimizer must be one of adamw, muon, .*, momentum"):
        TrainConfig(steps=1, optimizer="lion")


@NAMES
def test_a_name_trains_and_keeps_what_the_table_says(name: OptimizerName) -> None:
    model, x = network(), torch.randn(64, 32)
    optimizer = named_optimizer(model, TrainConfig(steps=9, optimizer=name, lr=1e-2, weight_decay=0.01))
    losses = []
    for _ in range(9):
        optimizer.zero_grad()
        loss = (model(x) - x[:, :3]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    tensors, counts = OPTIMIZERS[name].state_of(model)
    kept = sum(v.nbytes for each in optimizer.state.values() for v in each.values() if isinstance(v, Tensor))
    if name == "adarankgrad":  # at its largest ranks
        assert kept <= sum(tensors) + counts
    else:
        assert kept == sum(tensors) + counts


@NAMES
def test_rates_reach_the_groups(name: OptimizerName) -> None:
    rates = Rates(lr=0.25, core_lr=0.5, rank_lr=0.125, weight_decay=0.0)
    found = {group["name"]: float(group["lr"]) for group in OPTIMIZERS[name].make(network(), rates).param_groups}
    assert found == {"cores": 0.5, "ranks": 0.125, "dense": 0.25, "dense_no_decay": 0.25}


@NAMES
def test_whether_sparse_gradients_are_supported_is_true(name: OptimizerName) -> None:
    table = nn.Embedding(50, 16, sparse=True)
    model = nn.Sequential(table, nn.Linear(16, 2))
    optimizer = OPTIMIZERS[name].make(model, Rates())
    model(torch.arange(4)).sum().backward()
    if OPTIMIZERS[name].sparse:
        optimizer.step()
        assert len(optimizer.state) <= 3
    elif name != "momentum":  # torch keeps a sparse momentum, which is right but not small
        with pytest.raises(ConfigError, match="sparse"):
            optimizer.step()
