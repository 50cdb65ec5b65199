"""Parameter groups by type, and the learning-rate schedule."""

import doctest
from typing import Any

import pytest
import torch
from torch import nn

from comera.errors import ConfigError
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import TTLinear
from comera.optim import param_groups
from comera.trainer.optimizer import lr_multiplier
from comera.tt.spec import TTMSpec, TTSpec


def model() -> nn.ModuleDict:
    embedding = TTMEmbedding(TTMSpec(11, 6, (3, 4), (2, 3), (1, 5, 1)))
    dense = nn.Linear(6, 6)
    tied = nn.Linear(6, 6)
    tied.weight = dense.weight
    parts = {"embedding": embedding, "linear": TTLinear(TTSpec(6, 6, (3, 2), (2, 3), (1, 3, 4, 3, 1))), "dense": dense}
    return nn.ModuleDict(
        {**parts, "tied": tied, "norm": nn.LayerNorm(6), "head": TTMProjection(embedding.tt, bias=False)}
    )


def test_groups_follow_types_and_hold_each_parameter_once() -> None:
    net = model()
    rates = {"lr": 1e-3, "core_lr": 1e-4, "table_lr": 1e-5, "rank_lr": 1e-2}
    groups = {g["name"]: g for g in param_groups(net, **rates, weight_decay=0.1)}
    trains = [net["embedding"].tt, net["linear"].tt]
    members = {name: {id(p) for p in group["params"]} for name, group in groups.items()}
    assert members == {
        "cores": {id(core) for core in net["linear"].tt.cores},
        "tables": {id(core) for core in net["embedding"].tt.cores},
        "ranks": {id(d) for tt in trains for d in tt.rank_params},
        "dense": {id(net["dense"].weight)},
        "dense_no_decay": {
            id(p) for p in (net["linear"].bias, net["dense"].bias, net["tied"].bias, *net["norm"].parameters())
        },
    }
    every = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(every) == sorted(id(p) for p in net.parameters())
    settings = {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()}
    assert settings == {
        "cores": (1e-4, 0.1 / 4),
        "tables": (1e-5, 0.1 / 2),
        "ranks": (1e-2, 0.0),
        "dense": (1e-3, 0.1),
        "dense_no_decay": (1e-3, 0.0),
    }


def test_the_example_of_the_docstring_runs() -> None:
    (example,) = doctest.DocTestFinder().find(param_groups, "param_groups", globs={})
    assert len(example.examples) >= 6
    doctest.DebugRunner().run(example)


def test_lr_serves_where_no_other_is_given_and_optimizers_keep_the_names() -> None:
    optimizer = torch.optim.AdamW(param_groups(model(), lr=3e-4, rates="flat"))
    assert [g["name"] for g in optimizer.param_groups] == ["cores", "tables", "ranks", "dense", "dense_no_decay"]
    assert {g["lr"] for g in optimizer.param_groups} == {3e-4}
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0}


def test_given_rates_are_taken_to_the_bit() -> None:
    net = nn.ModuleList(TTLinear(TTSpec(6, 6, (6,), (6,), (1, 3, 1))) for _ in range(3))
    rates = {g["name"]: g["lr"] for g in param_groups(net, lr=0.1, core_lr=3e-3, rank_lr=0.7)}
    assert rates == {"cores": 3e-3, "ranks": 0.7, "dense_no_decay": 0.1}


def test_tables_take_the_rate_of_the_cores_where_they_have_none() -> None:
    rates = {g["name"]: g["lr"] for g in param_groups(model(), lr=3e-4, core_lr=1e-4)}
    assert rates == {"cores": 1e-4, "tables": 1e-4, "ranks": 3e-4, "dense": 3e-4, "dense_no_decay": 3e-4}


def test_frozen_parameters_and_empty_groups_are_omitted() -> None:
    net = model()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("rank_params" in name)
    assert [g["name"] for g in param_groups(net, lr=1e-3)] == ["ranks"]
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="ModuleDict has no trainable parameter"):
        param_groups(net, lr=1e-3)
    with pytest.raises(ConfigError, match="ReLU has no trainable parameter"):
        param_groups(nn.ReLU(), lr=1e-3)


@pytest.mark.parametrize("field", ["lr", "core_lr", "table_lr", "rank_lr", "weight_decay"])
@pytest.mark.parametrize("value", [-1e-3, float("nan"), float("inf")])
def test_values_out_of_range_are_refused(field: str, value: float) -> None:
    values: dict[str, Any] = {"lr": 1e-3, field: value}
    with pytest.raises(ConfigError, match=f"{field} must be a finite number >= 0"):
        param_groups(nn.Linear(2, 2), **values)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.4: 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 0.6: 0.55, 1.0: 0.1}),
        ("linear", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.4: 0.775, 0.6: 0.55, 1.0: 0.1}),
        ("constant", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.6: 1.0, 1.0: 1.0}),
    ],
)
def test_the_multiplier_warms_up_then_falls(schedule: Any, expected: dict[float, float]) -> None:
    for progress, value in expected.items():
        assert lr_multiplier(progress, warmup=0.2, schedule=schedule, final=0.1) == pytest.approx(value)


def test_progress_beyond_its_range_is_clamped_and_no_warmup_starts_at_one() -> None:
    assert lr_multiplier(-0.5, warmup=0.0, schedule="cosine", final=0.0) == 1.0
    assert lr_multiplier(1.3, warmup=0.0, schedule="cosine", final=0.25) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup": 1.0}, "0 <= warmup < 1, got 1.0"),
        ({"warmup": -0.1}, "0 <= warmup < 1, got -0.1"),
        ({"final": 1.5}, "final must be a multiplier from 0 to 1, got 1.5"),
        ({"schedule": "step"}, "'cosine', 'linear' or 'constant', got 'step'"),
    ],
)
def test_schedules_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"warmup": 0.1, "schedule": "cosine", "final": 0.1, **changes}
    with pytest.raises(ConfigError, match=message):
        lr_multiplier(0.5, **arguments)
