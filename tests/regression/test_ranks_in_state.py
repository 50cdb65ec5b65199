"""`load_state_dict` of a model whose ranks were cut: what every trainer calls to resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from comera.convert import BTT, TT, TTM, TensorizeConfig, tensorize_
from comera.distributed import rewrap_
from comera.errors import RankError
from comera.fusion import fuse_
from comera.nn.embedding import TTMEmbedding
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.optim.param_groups import param_groups
from comera.rank import prune_
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.tt.spec import BTTSpec, TTMSpec, TTSpec

from ..helpers.processes import in_processes
from ..helpers.small_net import TiedNet

CONFIG = TensorizeConfig(TT(order=4, rank=6), TTM(order=2, rank=6), {"down": BTT(rank=2)})


def build(seed: int = 0, config: TensorizeConfig = CONFIG) -> TiedNet:
    torch.manual_seed(seed)
    model = TiedNet()
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
        fresh = TiedNet()
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


# --- DistributedDataParallel in the user's own loop -------------------------------------------------------------------


QUIET = EarlyStage(size_weight=0.0)


class Small(nn.Module):
    """A table and three layers whose ranks are all needed, so that the switch leaves every shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TTMEmbedding(TTMSpec(12, 12, (3, 4), (3, 4), (1, 6, 1)))
        self.first = TTLinear(TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1)))
        self.second = TTLinear(TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1)))
        self.third = BTTLinear(BTTSpec(12, 12, (3, 4), (4, 3), 2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.third(self.second(self.first(self.table(ids))))


def built(late: LateStage, *, give_wrapped: bool, **options: bool) -> tuple[Any, RankController, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Small()
    wrapped = DistributedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    controller = RankController(wrapped if give_wrapped else model, QUIET, late).attach(optimizer)
    return wrapped, controller, optimizer


def step_of(
    model: nn.Module, controller: RankController, optimizer: torch.optim.Optimizer, rank: int, k: int = 0
) -> None:
    optimizer.zero_grad()
    target = torch.sin(torch.arange(144.0) + k + 3 * rank).view(12, 12)
    loss = (model(torch.arange(12)) - target).square().mean() * (1 + 4 * rank)
    loss.backward()
    controller.observe(loss)
    optimizer.step()


def flat(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def train_beyond_the_switch(rank: int) -> bool:
    model, controller, optimizer = built(LateStage(target_size=0.9, start_step=3), give_wrapped=False)
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]  # type: ignore[union-attr]
    for k in range(8):
        step_of(model, controller, optimizer, rank, k)
    assert controller.stage == "late"
    same = [p.view_as(p).grad_fn.next_functions[0][0] is n for p, n in zip(model.parameters(), nodes, strict=True)]  # type: ignore[union-attr]
    return all(same)


def test_the_switch_leaves_gradient_nodes_where_shapes_stay() -> None:
    assert in_processes(train_beyond_the_switch) == [True, True]


WAYS = ("known", "by hand", "anew", "static_graph", "gradient_as_bucket_view", "hook", "forgotten")


def cut(rank: int, how: str) -> tuple[str, list[float]]:
    """Train on after a cut, the wrapper known to the controller, wrapped again by hand, made anew, or forgotten."""
    late = LateStage(target_size=0.6, start_step=3)
    options = {how: True} if how in ("static_graph", "gradient_as_bucket_view") else {}
    model, controller, optimizer = built(late, give_wrapped=how in ("known", "hook", *options), **options)
    if how == "hook":
        model.register_comm_hook(None, allreduce_hook)
    for k in range(5):
        step_of(model, controller, optimizer, rank, k)
    assert controller.meet_target_().changed
    if how == "by hand":
        assert rewrap_(model) == 1
    if how == "anew":
        model = DistributedDataParallel(model.module)
    try:
        for k in range(4):
            step_of(model, controller, optimizer, rank, k)
    except (RankError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", flat(model)
    return "", flat(model)


def cut_in_every_way(rank: int) -> dict[str, tuple[str, list[float]]]:
    return {how: cut(rank, how) for how in WAYS}


def test_after_a_cut_training_goes_on_in_a_wrapper_that_follows_and_is_refused_in_one_that_does_not() -> None:
    first, second = in_processes(cut_in_every_way)
    for results in (first, second):
        said, _ = results.pop("forgotten")
        assert said.startswith("RankError: expected a DistributedDataParallel of the parameters' present shapes"), said
        assert "comera.distributed.rewrap_(" in said
        for how, (said, values) in results.items():
            assert said == "", how
            assert values == first["known"][1], how


DECISIONS = (
    LateStage(target_size=0.4, start_step=10, shrink="surrogate"),
    LateStage(target_size=0.4, start_step=10, steps=20, target_loss=2.0),
    LateStage(target_size=0.4, plateau=3, steps=20),
)


def train_to(rank: int) -> list[tuple[str, int, list[float]]]:
    found = []
    for late in DECISIONS:
        model, controller, optimizer = built(late, give_wrapped=True)
        for k in range(60):
            if k % 5 == 0:
                controller.evaluated(1.0 - 0.1 * k if rank else 1.0)
            step_of(model, controller, optimizer, rank, k)
        dist.barrier()
        found.append((controller.stage, controller.size(), flat(model)))
    return found


def test_every_process_takes_the_same_decisions_from_different_losses() -> None:
    for late, first, second in zip(DECISIONS, *in_processes(train_to), strict=True):
        assert first == second, late
