"""DistributedDataParallel in the user's own loop: the switch, cuts, and decisions that all processes share."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from comera.distributed import rewrap_
from comera.errors import RankError
from comera.nn.embedding import TTMEmbedding
from comera.nn.linear import TTLinear
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.tt.spec import TTMSpec, TTSpec

from ..helpers.processes import in_processes

QUIET = EarlyStage(size_weight=0.0)


class Small(nn.Module):
    """A table and two layers whose ranks are all needed, so that the switch leaves every shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TTMEmbedding(TTMSpec(12, 12, (3, 4), (3, 4), (1, 6, 1)))
        self.first = TTLinear(TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1)))
        self.second = TTLinear(TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1)))

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.first(self.table(ids)))
        return hidden


def built(late: LateStage, *, give_wrapped: bool) -> tuple[Any, RankController, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Small()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    controller = RankController(wrapped if give_wrapped else model, QUIET, late).attach(optimizer)
    return wrapped, controller, optimizer


def step(model: nn.Module, controller: RankController, optimizer: torch.optim.Optimizer, rank: int, k: int = 0) -> None:
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
        step(model, controller, optimizer, rank, k)
    assert controller.stage == "late"
    same = [p.view_as(p).grad_fn.next_functions[0][0] is n for p, n in zip(model.parameters(), nodes, strict=True)]  # type: ignore[union-attr]
    return all(same)


def test_the_switch_leaves_gradient_nodes_where_shapes_stay() -> None:
    assert in_processes(train_beyond_the_switch) == [True, True]


def cut(rank: int, how: str) -> tuple[str, list[float]]:
    """Train on after a cut, the wrapper known to the controller, wrapped again by hand, made anew, or forgotten."""
    late = LateStage(target_size=0.6, start_step=3)
    model, controller, optimizer = built(late, give_wrapped=how == "known")
    for k in range(5):
        step(model, controller, optimizer, rank, k)
    assert controller.meet_target_().changed
    if how == "by hand":
        assert rewrap_(model) == 1
    if how == "anew":
        model = DistributedDataParallel(model.module)
    try:
        for k in range(4):
            step(model, controller, optimizer, rank, k)
    except (RankError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", flat(model)
    return "", flat(model)


def test_after_a_cut_training_goes_on_in_a_wrapper_that_was_wrapped_again() -> None:
    results = {how: in_processes(cut, how) for how in ("known", "by hand", "anew")}
    expected = results["known"][0][1]
    for how, processes in results.items():
        for said, values in processes:
            assert said == "", how
            assert values == expected, how


def test_a_wrapper_from_before_a_cut_is_refused_with_what_to_do() -> None:
    for said, _ in in_processes(cut, "forgotten"):
        assert said.startswith("RankError: "), said
        assert "comera.distributed.rewrap_(" in said


def train_to(rank: int, late: LateStage) -> tuple[int, list[float], str]:
    model, controller, optimizer = built(late, give_wrapped=True)
    for k in range(60):
        if k % 5 == 0:
            controller.evaluated(1.0 - 0.1 * k if rank else 1.0)
        step(model, controller, optimizer, rank, k)
    dist.barrier()
    return controller.size(), flat(model), controller.stage


def test_every_process_takes_the_same_decisions_from_different_losses() -> None:
    stages = [
        LateStage(target_size=0.4, start_step=10, shrink="surrogate"),
        LateStage(target_size=0.4, start_step=10, steps=20, target_loss=2.0),
        LateStage(target_size=0.4, plateau=3, steps=20),
    ]
    for late in stages:
        (size, values, stage), (other_size, other_values, other_stage) = in_processes(train_to, late)
        assert stage == other_stage, late
        assert size == other_size, late
        assert values == other_values, late
