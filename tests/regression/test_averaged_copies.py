"""Copies that average a model's parameters (EMA) stay averages of it when ranks and bases change."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from comera.errors import RankError
from comera.nn.linear import TTLinear
from comera.rank.budget import round_
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.rank.prune import prune_
from comera.tt.spec import TTSpec

X = torch.eye(12)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    spec = TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1))
    return nn.Sequential(TTLinear(spec), nn.LayerNorm(12), TTLinear(spec))


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = (model(X) - torch.sin(torch.arange(144.0)).view(12, 12)).square().mean()
    return loss


def test_an_average_follows_the_model_through_the_switch_cuts_and_rounding() -> None:
    model = build()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    late = LateStage(target_size=0.5, start_step=60, steps=40)
    controller = RankController(model, EarlyStage(size_weight=0.0), late, copies=[ema]).attach(optimizer)
    for step in range(140):
        loss = loss_of(model)
        loss.backward()
        controller.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            controller.prune_()
        ema.update_parameters(model)
        if step >= 50:
            with torch.no_grad():
                apart = loss_of(ema) - loss_of(model)
            assert apart < 0.1, f"step {step}: the average's loss is {apart:.2f} above the model's"
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
