"""A target size is met or refused, never missed in silence and never applied twice."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from comera.errors import RankError
from comera.nn.linear import TTLinear
from comera.nn.size import model_size
from comera.pretrained import load_pretrained, read_manifest, save_pretrained
from comera.rank.controller import RankController
from comera.rank.objective import LateStage
from comera.tt.spec import TTSpec

pytestmark = pytest.mark.filterwarnings("ignore:the late stage :UserWarning")  # short ones, in these tests


def build() -> nn.Sequential:
    return nn.Sequential(*(TTLinear(TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1))) for _ in range(2)))


def train(
    model: nn.Module, late: LateStage, steps: int, *, observes: bool = True
) -> tuple[RankController, torch.optim.Optimizer]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    controller = RankController(model, late=late).attach(optimizer)
    for _ in range(steps):
        loss = model(torch.eye(12)).square().mean()
        loss.backward()
        if observes:
            controller.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
    return controller, optimizer


def stored(model: nn.Module) -> int:
    return model_size(model).tensorized


def test_a_run_that_ends_before_its_late_stage_meets_the_target() -> None:
    model = build()
    size = stored(model)
    controller, _ = train(model, LateStage(target_size=0.5, start_step=100), 5)
    report = controller.meet_target_()
    assert stored(model) == report.after <= report.target == size // 2 == controller.target_size
    assert report.before == size
    assert controller.stage == "late"
    again = controller.meet_target_()
    assert not again.changed
    assert again.target == size // 2


def test_a_report_comes_where_pruning_alone_meets_the_target() -> None:
    model = build()
    controller, _ = train(model, LateStage(target_size=0.5, start_step=5, steps=20), 60)
    report = controller.meet_target_()
    assert report.action == "pruned"
    assert report.after <= report.target == controller.target_size


def test_forgotten_losses_are_said_and_the_target_is_met() -> None:
    model = build()
    size = stored(model)
    controller, _ = train(model, LateStage(target_size=0.5, start_step=100), 5, observes=False)
    with pytest.warns(UserWarning, match=r"none was ever observed: call observe\(loss\)"):
        report = controller.meet_target_()
    assert stored(model) == report.after <= size // 2


def test_steps_count_where_losses_are_forgotten() -> None:
    model = build()
    with pytest.warns(UserWarning, match="the late stage begins, but none was ever observed"):
        controller, _ = train(model, LateStage(target_size=0.5, start_step=4), 5, observes=False)
    assert controller.stage == "late"


def test_without_a_target_there_is_nothing_to_meet() -> None:
    controller, _ = train(build(), LateStage(), 2)
    with pytest.raises(RankError, match=r"expected a target.*LateStage\(target_size=0.2\)"):
        controller.meet_target_()


def test_a_target_that_cannot_be_met_is_refused_with_nothing_changed() -> None:
    model = build()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(RankError, match="below the smallest possible"):
        RankController(model, late=LateStage(target_size=5))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    controller, _ = train(model, LateStage(target_size=0.5), 2)
    controller.late = LateStage(target_size=5)  # replaced since
    trained = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(RankError, match="below the smallest possible"):
        controller.meet_target_()
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())
    assert controller.stage == "early"


@pytest.mark.parametrize("target", [0.4, 160, "640 B"])
def test_a_run_resumed_without_the_state_of_its_controller_applies_the_target_once(
    target: float | int | str, tmp_path: Path
) -> None:
    late = LateStage(target_size=target, start_step=5, steps=20)
    model = build()
    controller, _ = train(model, late, 20)
    controller.prune_()  # on the way: the budget has not fallen to the target yet
    controller.meet_target_()
    met, wanted = stored(model), controller.target_size
    save_pretrained(model, tmp_path)

    resumed = load_pretrained(build(), tmp_path)
    with pytest.warns(UserWarning, match=r"began before, at [\d,]+ parameters in tensor trains, now"):
        controller, _ = train(resumed, late, 40)
    assert controller.target_size == wanted
    assert not controller.meet_target_().changed
    assert stored(resumed) == met


def test_where_a_late_stage_began_travels_with_the_files(tmp_path: Path) -> None:
    model = build()
    sizes = [stored(layer) for layer in model]
    controller, _ = train(model, LateStage(target_size=0.5), 3)
    save_pretrained(model, tmp_path)
    assert all("late_from" not in entry for entry in read_manifest(tmp_path)["trains"])
    controller.start_late()
    save_pretrained(model, tmp_path)
    with torch.device("meta"):
        fresh = build()
    for loaded in (load_pretrained(build(), tmp_path), load_pretrained(fresh, tmp_path)):
        assert [layer.tt.late_from for layer in loaded] == sizes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the late stage ends after 0 of")
        controller.meet_target_()
