"""`compress`: the usual case in one call, with parts that can be replaced."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import comera
from comera import TT, LateStage, RankController, TensorizeConfig
from comera.errors import ComeraError, ConfigError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16))


def test_a_loop_of_one_line_learns_and_meets_the_target_without_a_warning() -> None:
    model = net()
    run = comera.compress(model, ratio=4, target_size=0.5, steps=60, lr=3e-3)
    assert repr(run.report).startswith("<TensorizeReport: 2 of 2 layers compressed")
    x, losses, stages = torch.randn(64, 64), [], []
    for _ in range(run.steps):
        loss = (model(x) - x[:, :16]).square().mean()
        losses.append(loss.item())
        stages.append(run.ranks.stage)
        run.step(loss)
    assert losses[-1] < 0.5 * losses[0]
    assert stages.index("late") == 15
    assert run.ranks.target_size is not None
    assert comera.model_size(model).tensorized <= run.ranks.target_size
    with pytest.raises(ConfigError, match="expected 60 steps, got one more"):
        run.step(loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "steps: expected the optimizer steps of the whole training, 4 or more, got 3"),
        ({"lr": -1.0}, "lr must be a finite number >= 0"),
        ({"target_size": 2.0}, "is a fraction of the size"),
        ({"target_size": "5 GBB"}, "LateStage.target_size must be above 0, such as"),
        (
            {"target_size": 0.5, "config": TensorizeConfig(TT(rank=8, activation="silu")), "ratio": None},
            "lower its ranks in the early stage and by prune_, without a target",
        ),
        ({"target_size": 3}, "is below the smallest possible, 46 "),
        ({"target_size": "5MB"}, "expected at most the present 4,915 parameters"),
    ],
)
def test_a_mistake_leaves_the_model_as_it_was(options: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(ComeraError, match=message):
        comera.compress(model, **{"ratio": 4, "steps": 9, "lr": 1e-3, **options})
    assert type(model[0]) is nn.Linear


def test_a_trainer_takes_its_optimizer_and_its_callback(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99)
    model = BertForSequenceClassification(config)
    run = comera.compress(model, ratio=2, target_size=0.5, steps=8, lr=1e-3)
    rows = [{"input_ids": torch.arange(6), "labels": torch.tensor(k % 2)} for k in range(16)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=8, per_device_train_batch_size=4, report_to="none", use_cpu=True, disable_tqdm=True
    )
    callback = run.callback()
    Trainer(model, arguments, train_dataset=rows, optimizers=(run.optimizer, None), callbacks=[callback]).train()
    assert callback.controller.stage == "late"
    assert comera.model_size(model).tensorized <= callback.controller.target_size
    assert type(run.callback("lightning")).__module__ == "comera.integrations.lightning"


def test_another_trainer_is_refused_and_the_ranks_stay_attached() -> None:
    run = comera.compress(net(), ratio=4, target_size=0.5, steps=8, lr=1e-3)
    with pytest.raises(ConfigError, match="expected transformers or lightning, got 'keras'"):
        run.callback("keras")  # type: ignore[arg-type]
    assert run.ranks.attached == (run.optimizer,)


def test_a_frozen_model_is_refused_as_it_is() -> None:
    model = net().requires_grad_(False)
    with pytest.raises(ConfigError, match="Sequential has no trainable parameter"):
        comera.compress(model, ratio=4, steps=8, lr=1e-3)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("attached", [False, True])
def test_other_ranks_take_the_place_of_the_first(attached: bool) -> None:
    model = net()
    run = comera.compress(model, ratio=4, target_size=0.5, steps=40, lr=2e-3)
    before, first = comera.model_size(model).tensorized, run.ranks
    ranks = RankController(model, late=LateStage(target_size=0.8, start_step=10, steps=20))
    run.ranks = ranks.attach(run.optimizer) if attached else ranks
    assert (first.attached, ranks.attached) == ((), (run.optimizer,))
    for _ in range(run.steps):
        run.step(model(torch.randn(32, 64)).square().mean())
    assert 0.7 * before < comera.model_size(model).tensorized <= 0.8 * before


def test_ranks_adapt_at_the_steps_of_another_optimizer() -> None:
    model = net()
    run = comera.compress(model, ratio=4, target_size=0.5, steps=40, lr=2e-3)
    run.optimizer = torch.optim.SGD(comera.param_groups(model, lr=1e-2), momentum=0.9)
    for _ in range(run.steps):
        run.step(model(torch.randn(32, 64)).square().mean())
    assert run.ranks.target_size is not None
    assert run.ranks.size() <= run.ranks.target_size
