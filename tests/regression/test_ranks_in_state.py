"""`load_state_dict` of a model whose ranks were cut: what every trainer calls to resume."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from comera.convert import BTT, TT, TTM, TensorizeConfig, tensorize_
from comera.fusion import fuse_
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.optim.param_groups import param_groups
from comera.rank import prune_

CONFIG = TensorizeConfig(TT(order=4, rank=6), TTM(order=2, rank=6), {"down": BTT(rank=2)})


class Tied(nn.Module):
    """A table and a head that share a tensor train, and two layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 60, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.down(self.up(self.table(ids)).relu()))
        return found


def build(seed: int = 0, config: TensorizeConfig = CONFIG) -> Tied:
    torch.manual_seed(seed)
    model = Tied()
    tensorize_(model, config)
    return model


def cut_(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    with torch.no_grad():
        for k, (_, train) in enumerate(named_trains(model)):
            for d in train.rank_params:
                d[: 1 + k] = 0.0
    assert prune_(model, [optimizer] if optimizer else []).changed


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.arange(60)), torch.arange(60))
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("fused", [False, True])
def test_a_fresh_model_takes_the_ranks_of_the_state_and_trains_on_to_the_bit(tmp_path: Path, fused: bool) -> None:
    model = build()
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2))
    for _ in range(3):
        step(model, optimizer)
    cut_(model, optimizer)
    step(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")

    fresh = build(seed=1)
    if fused:
        fuse_(model)
        fuse_(fresh)
        fresh(torch.arange(60)).sum().backward()  # factors of the ranks from before are cached now
    parameters = list(fresh.parameters())
    again = torch.optim.AdamW(param_groups(fresh, lr=1e-2))
    state = torch.load(tmp_path / "state.pt")
    assert not any(fresh.load_state_dict(state["model"]))
    again.load_state_dict(state["optimizer"])
    assert all(a is b for a, b in zip(fresh.parameters(), parameters, strict=True))
    assert [train.spec for _, train in named_trains(fresh)] == [train.spec for _, train in named_trains(model)]
    assert fresh.head.tt is fresh.table.tt  # type: ignore[comparison-overlap]
    assert [step(fresh, again) for _ in range(3)] == [step(model, optimizer) for _ in range(3)]


def test_ranks_rise_again_with_a_state_from_before_the_cut() -> None:
    model, expected = build(), build()
    cut_(model)
    model.load_state_dict(expected.state_dict())
    assert torch.equal(model(torch.arange(60)), expected(torch.arange(60)))


def test_ranks_are_taken_on_the_meta_device_too() -> None:
    model = build()
    cut_(model)
    with torch.device("meta"):
        fresh = Tied()
    tensorize_(fresh, CONFIG)
    fresh.load_state_dict(model.state_dict(), assign=True)
    assert [train.spec for _, train in named_trains(fresh)] == [train.spec for _, train in named_trains(model)]
    assert torch.equal(fresh(torch.arange(60)), model(torch.arange(60)))


@pytest.mark.parametrize("lost", ["up.tt.cores.1", "up.tt.rank_params.0"])
def test_a_state_of_other_modes_or_with_less_is_refused_as_ever(lost: str) -> None:
    model = build()
    before = {name: train.spec for name, train in named_trains(model)}
    other = build(config=TensorizeConfig(TT(order=2, rank=3), TTM(order=3, rank=3)))
    with pytest.raises(RuntimeError, match=r"size mismatch for table.tt.cores.0|Missing key|Unexpected key"):
        model.load_state_dict(other.state_dict())
    source = build()
    cut_(source)
    state = source.state_dict()
    del state[lost]
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{lost}"'):
        model.load_state_dict(state)
    assert model.up.tt.spec == before["up.tt"]


def test_a_zero_weight_is_a_state_too() -> None:
    model = build()
    with torch.no_grad():
        for d in model.up.tt.rank_params:  # type: ignore[union-attr]
            d.zero_()
    prune_(model)
    fresh = build(seed=1)
    fresh.load_state_dict(model.state_dict())
    assert isinstance(fresh.up.tt, TensorTrain)
    assert fresh.up.tt.spec.inner_ranks == (0, 0, 0)
    assert torch.equal(fresh(torch.arange(60)), model(torch.arange(60)))
