"""TrainConfig: what it refuses, what it says on the command line, what a resumed run may change."""

from dataclasses import fields, replace
from typing import Any

import docstring_parser
import pytest

from comera.errors import ConfigError
from comera.rank.objective import LateStage
from comera.trainer.config import TrainConfig


def test_a_run_without_a_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a bound.*set train\.steps, train\.epochs, train\.max_seconds"):
        TrainConfig()


@pytest.mark.parametrize(
    "bound", [{"steps": 1}, {"epochs": 0.5}, {"max_seconds": 0.5}, {"steps": 3, "epochs": 2.0, "max_seconds": 1.0}]
)
def test_one_bound_is_enough(bound: dict[str, Any]) -> None:
    config = TrainConfig(**bound)
    assert all(getattr(config, name) == bound.get(name) for name in ("steps", "epochs", "max_seconds"))


@pytest.mark.parametrize(
    ("bounds", "epoch", "steps"),
    [
        ({"steps": 7}, None, 7),
        ({"steps": 7}, 3, 7),
        ({"max_seconds": 1.0}, 3, None),
        ({"epochs": 2}, 10, 20),
        ({"epochs": 0.25}, 10, 3),  # a step begun is a step
        ({"epochs": 0.07}, 100, 7),  # as floating-point numbers, 7.000000000000001
        ({"epochs": 1e-9}, 10, 1),
        ({"steps": 7, "epochs": 2}, 10, 7),
        ({"steps": 7, "epochs": 0.5}, 10, 5),
    ],
)
def test_the_fewest_steps_bound_the_run(bounds: dict[str, Any], epoch: int | None, steps: int | None) -> None:
    assert TrainConfig(**bounds).bound(epoch) == steps


def test_epochs_of_a_task_without_them_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs is 2, but .*has no end: set train\.steps"):
        TrainConfig(epochs=2).bound(None)


def test_evaluations_are_an_epoch_apart_where_there_are_epochs() -> None:
    config = TrainConfig(steps=1)
    assert (config.eval_steps(40), config.eval_steps(None)) == (40, 100)
    assert [replace(config, eval_every=every).eval_steps(40) for every in (0, 7)] == [0, 7]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("steps", 0, ">= 1"),
        ("epochs", 0.0, "> 0"),
        ("max_seconds", 0.0, "> 0"),
        ("max_seconds", float("nan"), "> 0"),
        ("batch_size", 0, ">= 1"),
        ("accumulation", 0, ">= 1"),
        ("lr", 0.0, "> 0"),
        ("lr", float("inf"), "> 0"),
        ("core_lr", -1e-3, ">= 0"),
        ("table_lr", -1e-3, ">= 0"),
        ("rank_lr", -1e-3, ">= 0"),
        ("weight_decay", -0.1, ">= 0"),
        ("max_grad_norm", -1.0, ">= 0"),
        ("warmup", 1.0, "< 1"),
        ("final_lr", 1.5, "<= 1"),
        ("betas", (0.9,), "two numbers"),
        ("betas", (0.9, 1.0), "two numbers"),
        ("schedule", "exponential", "cosine, linear, constant"),
        ("precision", "fp16", "fp32, bf16"),
        ("device", "gpu", "auto, cpu"),
        ("prune_every", -1, ">= 0"),
        ("eval_every", -1, ">= 0"),
        ("rank_multiple", 0, ">= 1"),
        ("log_every", 0, ">= 1"),
        ("threads", 0, ">= 1"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_was_expected(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.{name} must be .*{expected}.*got ") as error:
        TrainConfig(**{"steps": 10, name: value})
    assert repr(value) in str(error.value)


def test_every_field_has_help_for_the_command_line() -> None:
    described = {p.arg_name for p in docstring_parser.parse_from_object(TrainConfig).params if p.description}
    assert described == {field.name for field in fields(TrainConfig)}


def test_identity_is_what_decides_the_losses() -> None:
    config = TrainConfig(steps=10)
    watching = replace(config, eval_every=7, eval_batches=2, save_every=3, log_every=1, trackers=("wandb",), threads=1)
    assert replace(watching, progress=False, device="cpu").identity() == config.identity()
    changes: list[dict[str, Any]] = [
        {"lr": 2e-3},
        {"table_lr": 2e-3},
        {"accumulation": 2},
        {"seed": 1},
        {"prune_every": 5},
        {"steps": 11},
        {"epochs": 2},
        {"rank_multiple": 8},
        {"late": LateStage(target_size=0.5)},
    ]
    for change in changes:
        assert replace(config, **change).identity() != config.identity()


def test_evaluations_that_decide_the_stage_belong_to_the_identity() -> None:
    config = TrainConfig(steps=10, eval_every=5, late=LateStage(target_size=0.5, plateau=2))
    for change in ({"eval_every": 4}, {"eval_batches": 1}):
        assert replace(config, **change).identity() != config.identity()
    assert replace(config, log_every=3).identity() == config.identity()


def test_lists_from_yaml_become_tuples() -> None:
    assert TrainConfig(steps=1, betas=[0.8, 0.9]).betas == (0.8, 0.9)  # type: ignore[arg-type]
