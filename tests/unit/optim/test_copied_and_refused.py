"""Every optimizer goes on as it was after a copy, a pickle, or a step that was refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import comera
from comera.contrib import AdaRankGrad, TensorGaLore
from comera.convert import BTT, TTM, TensorizeConfig, tensorize_
from comera.errors import ConfigError
from comera.optim import SMMF, AdamW, Muon, ZerothOrder
from comera.rank import EarlyStage, LateStage, RankController

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: AdamW(comera.param_groups(model, lr=1e-2)),
    "fused AdamW": lambda model: AdamW(comera.param_groups(model, lr=1e-2), fused=True),
    "Muon": lambda model: Muon(model, lr=1e-2, exclude=["3"]),
    "SMMF": lambda model: SMMF(comera.param_groups(model, lr=1e-2)),
    "AdaRankGrad": lambda model: AdaRankGrad(comera.param_groups(model, lr=1e-2), check_every=2, refresh_every=3),
    "TensorGaLore": lambda model: TensorGaLore(comera.param_groups(model, lr=1e-2), refresh_every=2),
    "torch": lambda model: torch.optim.AdamW(comera.param_groups(model, lr=1e-2)),
}
CONTROLLED = EarlyStage(size_weight=1.0, ridge=0.1), LateStage(target_size=0.9, start_step=3)


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 40))
    tensorize_(model, TensorizeConfig(BTT(rank=2), TTM(order=2, rank=4), overrides={"3": None}))
    return model


def gradients(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(40, (2, 32), generator=generator)
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(ids[0]), ids[1])
    loss.backward()
    return loss.detach()


def trained(model: nn.Module, optimizer: Optimizer, ranks: RankController | None, steps: range) -> dict[str, Tensor]:
    for step in steps:
        loss = gradients(model, step)
        if ranks is not None:
            ranks.observe(loss)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.filterwarnings("ignore:the late stage expresses:UserWarning")  # a copy that trains is no average
@pytest.mark.parametrize("controlled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda whole: pickle.loads(pickle.dumps(whole))])
def test_a_copy_goes_on_as_the_original(copied: Callable[[Any], Any], name: str, controlled: bool) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model)
    ranks = RankController(model, *CONTROLLED).attach(optimizer) if controlled else None
    for steps in (range(0), range(5)):  # before there is any state, and in the late stage
        trained(model, optimizer, ranks, steps)
        others = copied((model, optimizer, ranks))
        start = trained(*others, range(0))
        wanted = trained(*copied((model, optimizer, ranks)), range(5, 10))
        assert_same(start, trained(model, optimizer, ranks, range(0)))
        assert_same(trained(*others, range(5, 10)), wanted)
        if ranks is not None:
            assert others[2].state_dict()["steps"] == ranks.state_dict()["steps"] + 5
    assert_same(trained(model, optimizer, ranks, range(5, 10)), wanted)


def test_a_copied_controller_is_attached_to_the_copy_alone() -> None:
    model = network()
    optimizer = AdamW(comera.param_groups(model, lr=1e-2))
    ranks = RankController(model, *CONTROLLED).attach(optimizer)
    other, its_optimizer, its_ranks = copy.deepcopy((model, optimizer, ranks))
    trained(other, its_optimizer, its_ranks, range(4))
    assert (ranks.stage, its_ranks.stage) == ("early", "late")
    with pytest.raises(comera.errors.RankError, match="attached already"):
        its_ranks.attach(its_optimizer)
    its_ranks.detach()
    trained(other, its_optimizer, None, range(2))
    assert its_ranks.state_dict()["steps"] == 4


class RefusedError(Exception):
    """What a hook or closure of the user's raises."""


@pytest.mark.parametrize("how", ["hook before", "hook after", "closure"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_refused_step_leaves_nothing_for_the_next(name: str, how: str) -> None:
    results = []
    for refuse in (False, True):
        model = network()
        optimizer = OPTIMIZERS[name](model)
        refusing: list[int] = []

        def guard(*_: Any, refusing: list[int] = refusing) -> None:
            if refusing:
                raise RefusedError

        if how == "hook before":
            optimizer.register_step_pre_hook(guard)
        ranks = RankController(model, *CONTROLLED[:1]).attach(optimizer)
        if how == "hook after":
            optimizer.register_step_pre_hook(guard)
        for step in range(6):
            if refuse and step in (0, 3, 4):
                refusing.append(1)
                gradients(model, step)
                with pytest.raises(RefusedError):
                    optimizer.step(guard if how == "closure" else None)  # type: ignore[arg-type]
                refusing.clear()
            if step == 4:
                ranks.detach()
            gradients(model, step)
            optimizer.step()
        results.append(trained(model, optimizer, None, range(0)))
    assert_same(*results)


def test_two_controllers_of_one_optimizer_after_a_refused_step() -> None:
    """Of the rules of one step the first is taken and the second written into gradients, after a refused step too."""
    results = []
    for refuse in (False, True):
        model = network()
        optimizer = AdamW(comera.param_groups(model, lr=1e-2))
        for weight in (1.0, 0.5):
            RankController(model, EarlyStage(size_weight=weight)).attach(optimizer)
        refusing = [1] if refuse else []

        def guard(*_: Any, refusing: list[int] = refusing) -> None:
            if refusing:
                raise RefusedError

        optimizer.register_step_pre_hook(guard)
        if refuse:
            gradients(model, 0)
            with pytest.raises(RefusedError):
                optimizer.step()
            refusing.clear()
        results.append(trained(model, optimizer, None, range(4)))
    assert_same(*results)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "torch"])
def test_a_sparse_gradient_is_refused_before_anything_is_changed(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model.add_module("last", nn.Embedding(40, 32, sparse=True))
    optimizer = Muon(model, lr=1e-2) if name == "Muon" else OPTIMIZERS[name](model)
    ids = torch.arange(7)

    def gradient(sparse: bool) -> None:
        model.zero_grad()
        table: Any = model[2]
        table.sparse = sparse
        model[:2](table(ids)).square().mean().backward()

    for _ in range(2):
        gradient(sparse=False)
        optimizer.step()
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    gradient(sparse=True)
    with pytest.raises(ConfigError, match=r"sparse ones for 1 parameters, such as one of shape \(40, 32\) \(nothing"):
        optimizer.step()
    assert_same(kept[0], model.state_dict())
    for key, state in optimizer.state_dict()["state"].items():
        assert_same(*({n: torch.as_tensor(v) for n, v in each.items()} for each in (kept[1][key], state)))


def test_estimates_without_back_propagation_go_on_too() -> None:
    model = network()
    estimator = ZerothOrder(model.parameters(), queries=2)
    ids = torch.arange(40)
    other, its = copy.deepcopy((model, estimator))
    third, their = pickle.loads(pickle.dumps((model, estimator)))
    found = []
    for each, estimates in ((model, estimator), (other, its), (third, their)):
        for _ in range(2):
            estimates.estimate(lambda each=each: nn.functional.cross_entropy(each(ids), ids))
        found.append({n: p.grad for n, p in each.named_parameters() if p.grad is not None})
    assert len(found[0]) > 5
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
