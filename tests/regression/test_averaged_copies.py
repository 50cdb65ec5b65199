"""Copies that average a model's parameters (EMA) stay averages of it when ranks and bases change."""

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from comera.errors import RankError
from comera.nn.linear import BTTLinear, TTLinear
from comera.rank.budget import round_
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.rank.prune import prune_
from comera.tt.spec import BTTSpec, TTSpec

X = torch.eye(12)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    spec = TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1))
    return nn.Sequential(TTLinear(spec), nn.LayerNorm(12), TTLinear(spec))


def loss_of(model: nn.Module) -> Tensor:
    return (model(X) - torch.sin(torch.arange(144.0)).view(12, 12)).square().mean()


def train_through(model: nn.Module, average: Any, update: Any, into: Callable[[Any], nn.Module]) -> RankController:
    """Train through the switch and cuts, where the average stays near the model. into: the average as a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    late = LateStage(target_size=0.5, start_step=60, steps=40)
    controller = RankController(model, EarlyStage(size_weight=0.0), late, copies=[average]).attach(optimizer)
    for step in range(140):
        loss = loss_of(model)
        loss.backward()
        controller.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            controller.prune_()
        update(model)
        if step >= 50:
            with torch.no_grad():
                apart = loss_of(into(model)) - loss_of(model)
            assert apart < 0.1, f"step {step}: the average's loss is {apart:.2f} above the model's"
    return controller


def test_an_average_follows_the_model_through_the_switch_cuts_and_rounding() -> None:
    model = build()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    controller = train_through(model, ema, ema.update_parameters, lambda _: ema)
    controller.meet_target_()
    ema.update_parameters(model)
    assert [p.shape for p in ema.module.parameters()] == [p.shape for p in model.parameters()]
    assert [layer.tt.late_from for layer in (ema.module[0], ema.module[2])] == [model[0].tt.late_from] * 2


def test_pruning_cuts_the_same_slices_out_of_a_copy() -> None:
    model = build()
    ema = copy.deepcopy(model)
    with torch.no_grad():
        for p in ema.parameters():
            p.add_(0.1 * torch.randn_like(p))
        model[0].tt.rank_params[1][[0, 5]] = 0.0
    kept = [1, 2, 3, 4, 6, 7, 8]
    left, right = (ema[0].tt.cores[k].detach().clone() for k in (1, 2))
    prune_(model, copies=[ema])
    assert torch.equal(ema[0].tt.cores[1], left[..., kept])
    assert torch.equal(ema[0].tt.cores[2], right[kept])
    assert ema[0].spec == model[0].spec


def test_rounding_starts_the_average_of_a_rounded_train_again() -> None:
    model = build()
    ema = copy.deepcopy(model)
    with torch.no_grad():
        ema[1].weight.fill_(0.5)
        ema[0].tt.cores[0].mul_(2)
    round_(model, 0.5, copies=[ema])
    assert all(torch.equal(a, b) for a, b in zip(ema[0].parameters(), model[0].parameters(), strict=True))
    assert (ema[1].weight == 0.5).all()


def test_a_copy_of_other_ranks_is_refused_before_anything_changes() -> None:
    model, ema = build(), build()
    with torch.no_grad():
        model[0].tt.rank_params[1][0] = 0.0
    prune_(model)
    before = [p.clone() for p in model.parameters()]
    for change in (
        lambda: prune_(model, copies=[ema]),
        lambda: round_(model, 0.5, copies=[ema]),
        lambda: RankController(model, copies=[ema]),
    ):
        with pytest.raises(RankError, match="expected a copy with the 2 tensor trains of the model and their ranks"):
            change()
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
    with pytest.raises(RankError, match="around the model itself"):
        prune_(model, copies=[nn.Sequential(model)])


class Shadows:
    """Averages as a list of tensors, as diffusers' EMAModel and torch_ema keep them."""

    temp_stored_params: list[Tensor] | None = None

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.shadow_params = [p.clone().detach() for p in parameters]

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for shadow, p in zip(self.shadow_params, model.parameters(), strict=True):
                shadow.lerp_(p, 0.1)

    def into(self, model: nn.Module) -> nn.Module:
        averaged = copy.deepcopy(model)
        with torch.no_grad():
            for p, shadow in zip(averaged.parameters(), self.shadow_params, strict=True):
                p.copy_(shadow)
        return averaged


class ByState(nn.Module):
    """An average that is updated by way of states, as timm's ModelEmaV2."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for mean, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
                mean.copy_(0.9 * mean + 0.1 * value)

    def into(self, model: nn.Module) -> nn.Module:
        return self.module


def diffusers_average(model: nn.Module) -> Any:
    average = pytest.importorskip("diffusers.training_utils").EMAModel(model.parameters(), decay=0.9)
    average.update = lambda model: average.step(model.parameters())
    average.into = lambda model: Shadows.into(average, model)
    return average


def btt() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(BTTLinear(BTTSpec(12, 12, in_modes=(3, 4), out_modes=(4, 3), block_ranks=3)))


@pytest.mark.parametrize("build", [build, btt])
@pytest.mark.parametrize("kind", [lambda model: Shadows(model.parameters()), ByState, diffusers_average])
def test_other_libraries_averages_follow(kind: Callable[[nn.Module], Any], build: Callable[[], nn.Module]) -> None:
    model = build()
    before = sum(p.numel() for p in model.parameters())
    average = kind(model)
    train_through(model, average, average.update, average.into)
    assert sum(p.numel() for p in average.into(model).parameters()) < before


def test_an_average_over_the_ranks_of_blocks_is_loaded_again() -> None:
    model = nn.Sequential(BTTLinear(BTTSpec(256, 512, in_modes=(16, 16), out_modes=(16, 32), block_ranks=7)))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(5):
        ema.update_parameters(model)
    assert ema.module[0].tt.state_dict()["block_ranks"].unique().tolist() == [7]  # 0.9 · 7 + 0.1 · 7 is below it
    model.load_state_dict(ema.module.state_dict())


class WithAverage(nn.Module):
    """Holds its own average, as a LightningModule may."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build()
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def test_an_average_within_the_model_is_not_adapted_as_a_part_of_it() -> None:
    held = WithAverage()
    size = sum(p.numel() for layer in (held.model[0], held.model[2]) for p in layer.tt.parameters())
    report = prune_(held)
    assert report.before == size
    assert [row.name for row in report.rows] == ["model.0.tt", "model.2.tt"]
    assert round_(held, 0.5).target == size // 2
    assert [p.shape for p in held.ema.module.parameters()] == [p.shape for p in held.model.parameters()]
    controller = RankController(held, late=LateStage(target_size=0.9))
    optimizer = torch.optim.AdamW(held.model.parameters(), lr=1e-2)
    controller.attach(optimizer)
    loss_of(held.model).backward()
    optimizer.step()
    held.ema.update_parameters(held.model)
    with pytest.warns(UserWarning, match="none was ever observed"):
        controller.start_late()
    assert torch.equal(held.ema.module[0].tt.dense(), held.model[0].tt.dense())


def began(model: nn.Module, **options: Any) -> RankController:
    """A controller whose early stage is over."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    controller = RankController(model, late=LateStage(target_size=0.5), **options).attach(optimizer)
    loss = loss_of(model)
    loss.backward()
    controller.observe(loss)
    optimizer.step()
    return controller


def test_an_average_that_would_not_follow_is_named_when_the_basis_changes() -> None:
    model = build()
    ema, snapshot = AveragedModel(model), copy.deepcopy(model)
    controller = began(model)
    ema.update_parameters(model)
    with pytest.warns(UserWarning, match="and a copy made by copy.deepcopy would not follow"):
        controller.start_late()
    del ema
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        began(snapshot).start_late()  # nothing averages it
        model = build()
        snapshot = copy.deepcopy(model)  # a teacher, which stays as it is
        began(model).start_late()


def test_an_average_that_is_written_through_data_is_named_too() -> None:
    model = build()
    average = copy.deepcopy(model)
    controller = began(model)
    for kept, now in zip(average.parameters(), model.parameters(), strict=True):
        kept.data.mul_(0.9).add_(now.data, alpha=0.1)  # which counts no versions
    with pytest.warns(UserWarning, match=r"a copy made by copy.deepcopy would not follow"):
        controller.start_late()


def test_the_averages_of_diffusers_are_named_when_the_basis_changes() -> None:
    model = build()
    ema = diffusers_average(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        began(model, copies=[ema]).start_late()
    model = build()
    ema = diffusers_average(model)
    controller = began(model)
    with pytest.warns(UserWarning, match="and the averages of EMAModel would not follow"):
        controller.start_late()
    del ema


def test_what_is_no_average_of_the_model_is_refused() -> None:
    model = build()
    with pytest.raises(RankError, match="got a dict: pass what holds the averages"):
        prune_(model, copies=[{"ema": model}])
    with pytest.raises(RankError, match="got Shadows with 0 or others"):
        prune_(model, copies=[Shadows([torch.zeros(3)])])
    shadows = Shadows(model.parameters())
    shadows.temp_stored_params = shadows.shadow_params
    with pytest.raises(RankError, match=r"has put its averages in their place: call its restore\(\)"):
        prune_(model, copies=[shadows])
