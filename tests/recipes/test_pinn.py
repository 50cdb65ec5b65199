"""The recipe pinn end to end, small: two steps with every option, to the bit after a stop, and less error."""

import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from comera.baselines import Method, Narrow
from comera.cli.main import main
from comera.cli.options import saved_config
from comera.errors import ConfigError
from comera.export.runs import export_run
from comera.recipes.pinn import recipe as pinn
from comera.recipes.pinn.model import CompressConfig, ModelConfig
from comera.recipes.pinn.recipe import (
    METHODS,
    METRIC,
    PRESETS,
    Baselines,
    PinnConfig,
    PinnTask,
    Preset,
    SteinConfig,
    ZerothOrderConfig,
    build_model,
    draw,
    residual_loss,
    step_loss,
)
from comera.recipes.trained import open_trained
from comera.report import inspect, render
from comera.report.run import read_run
from comera.trainer.config import TrainConfig

from ..helpers.recipe_runs import assert_goes_on_only_as_begun, assert_same_end, cut_off

TINY = ModelConfig(hidden=16, layers=2)
RANKS = CompressConfig(order=4, rank=2)
FORWARD: dict[str, Any] = {"derivatives": "stein", "gradients": "zeroth-order"}


@pytest.fixture
def config(tmp_path: Path) -> PinnConfig:
    train = TrainConfig(steps=2, batch_size=4, lr=1e-2, eval_every=1, progress=False, device="cpu", threads=1)
    return PinnConfig(
        out=str(tmp_path / "run"),
        dimension=3,
        model=TINY,
        compress=RANKS,
        zeroth_order=ZerothOrderConfig(queries=2),
        train=train,
    )


@pytest.mark.parametrize("ways", [{}, FORWARD], ids=["backward", "forward"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_leaves_its_folder_exports_and_resumes_to_its_summary(
    config: PinnConfig, method: Method, ways: dict[str, Any]
) -> None:
    config = replace(config, method=method, **ways)
    summary = pinn.run(config)
    assert (summary.method, summary.recipe, summary.steps, summary.examples) == (method, "pinn", 2, 2 * 4)
    assert set(summary.metrics) == {METRIC}
    assert bool(json.loads((config.folder / "layers.json").read_text())) == (method == "comera")
    assert pinn.run(config, resume=True) == summary
    trained = open_trained(config.folder, saved_config)
    assert export_run(trained, "program", config.folder.parent / "export").difference < 1e-4
    run = read_run(config.folder)
    assert (run.unit, run.judged_by) == ("forward passes", METRIC)
    assert run.references[METRIC]["network 0"] > 0
    assert f"pinn, {method}: 2 steps" in inspect(config.folder)
    page = render(config.folder).read_text()
    assert "Forward passes seen" in page
    assert "relative L2 error" in page
    if method == "comera":
        assert export_run(trained, "safetensors", config.folder.parent / "dense", dense=True).difference < 1e-4


CHOICES: dict[str, dict[str, Any]] = {
    "tanh": {"model": replace(TINY, activation="tanh", layers=1)},
    "stein, backward": {"derivatives": "stein"},
    "exact, zeroth-order": {"gradients": "zeroth-order"},
    "monte-carlo": {**FORWARD, "stein": SteinConfig(rule="monte-carlo", samples=6, sigma=0.2)},
    "tensors": {**FORWARD, "zeroth_order": ZerothOrderConfig(layout="tensors", queries=1, eps=1e-2)},
    "growth": {**FORWARD, "zeroth_order": ZerothOrderConfig(queries=1, growth=1, epoch=1, max_queries=3)},
    "accumulation": {**FORWARD, "train": {"accumulation": 2}},
    "order": {"compress": CompressConfig(order=2, rank=3)},
    "one dimension": {"dimension": 1, **FORWARD},
    "muon": {"train": {"optimizer": "muon"}},
    "sgd": {"gradients": "zeroth-order", "train": {"optimizer": "sgd"}},
    "bf16": {"train": {"precision": "bf16"}},
    "narrow by hand": {"method": "narrow", "baselines": Baselines(narrow=Narrow(hidden=8))},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_two_steps_with_every_option(config: PinnConfig, choice: str) -> None:
    changes = dict(CHOICES[choice])
    if "train" in changes:
        changes["train"] = replace(config.train, **changes["train"])
    config = replace(config, **changes)
    summary = pinn.run(config)
    assert (summary.steps, summary.stopped) == (2, "steps")
    rows = 1 + 12 if config.stein.rule == "sparse-grid" and config.dimension == 1 else 1 + 40
    rows = 7 if choice == "monte-carlo" else rows if config.derivatives == "stein" else config.dimension + 3
    losses = {"backward": 2, "zeroth-order": 2 * 2 * 2}[config.gradients]
    losses = {"tensors": 2 * 2 * len(list(build_model(config)[0].parameters())), "growth": 2 * (1 + 2)}.get(
        choice, losses
    )
    if choice in ("monte-carlo", "one dimension"):
        losses = 2 * 2 * (2 if choice == "one dimension" else config.zeroth_order.queries_at(0))
    assert summary.tokens == losses * rows * config.train.batch_size * config.train.accumulation


def test_the_help_offers_what_these_tests_run() -> None:
    offered = {f.name for kind in (ModelConfig, CompressConfig, SteinConfig, ZerothOrderConfig) for f in fields(kind)}
    assert offered == {
        *("hidden", "layers", "activation", "order", "rank", "rule", "sigma", "samples"),
        *("eps", "queries", "growth", "max_queries", "epoch", "layout"),
    }


@pytest.mark.parametrize("ways", [{}, FORWARD, {**FORWARD, "stein": SteinConfig(rule="monte-carlo", samples=8)}])
def test_a_stopped_run_resumes_to_the_bit(config: PinnConfig, ways: dict[str, Any], tmp_path: Path) -> None:
    schedule = ZerothOrderConfig(queries=1, growth=0.5, epoch=1)
    config = replace(config, train=replace(config.train, steps=6, save_every=2), zeroth_order=schedule, **ways)
    whole = pinn.run(replace(config, out=str(tmp_path / "whole")))
    cut_off(PinnTask, 3, lambda: pinn.run(config))
    again = pinn.run(config, resume=True)
    assert (again.held_out_loss, again.metrics, again.tokens) == (whole.held_out_loss, whole.metrics, whole.tokens)
    assert_same_end(config.folder, tmp_path / "whole")


@pytest.mark.parametrize(
    ("ways", "steps", "factor"),
    [({}, 60, 8), ({"gradients": "zeroth-order"}, 150, 5), (FORWARD, 150, 5)],
    ids=["backward", "zeroth-order", "forward"],
)
def test_a_short_run_lowers_the_error(config: PinnConfig, ways: dict[str, Any], steps: int, factor: float) -> None:
    train = replace(config.train, steps=steps, lr=2e-2, batch_size=16, eval_every=0)
    summary = pinn.run(replace(config, train=train, zeroth_order=ZerothOrderConfig(queries=4), **ways))
    (without,) = read_run(config.folder).references[METRIC].values()
    assert summary.metrics[METRIC] < without / factor


def test_the_estimate_of_a_step_is_near_the_gradient_in_the_mean(config: PinnConfig) -> None:
    config = replace(config, gradients="zeroth-order")
    model = build_model(config)[0].double()
    batch = draw(config, 3)
    batch = batch._replace(points=batch.points.double())
    residual_loss(config, model, batch).backward()
    exact = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    count = 1000
    step_loss(config, model, batch._replace(queries=count)).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    expected = (len(exact) - 1) * float(exact.square().sum()) / count  # docs/method.md §11
    assert 0.5 * expected < float((found - exact).square().sum()) < 2 * expected


@pytest.mark.parametrize("ways", [{}, FORWARD], ids=["backward", "forward"])
def test_estimate_shows_all_methods_without_computing(config: PinnConfig, ways: dict[str, Any]) -> None:
    wide = replace(config, model=ModelConfig(hidden=128), train=replace(config.train, batch_size=32), **ways)
    estimates = pinn.estimate(wide)
    assert list(estimates) == ["comera", "dense", "narrow"]
    assert estimates["narrow"].flops <= estimates["comera"].flops < estimates["dense"].flops
    assert 8 <= build_model(replace(wide, method="narrow"))[0].head.in_features < 128


def test_without_a_backward_memory_does_not_grow_with_the_layers(config: PinnConfig) -> None:
    @cache
    def activations(gradients: Any, layers: int) -> int:
        model = ModelConfig(hidden=64, layers=layers)
        narrow = Baselines(narrow=Narrow(hidden=8))
        train = replace(config.train, batch_size=64)
        each = replace(config, baselines=narrow, method="dense", gradients=gradients, model=model, train=train)
        return pinn.estimate(each)["dense"].activations

    assert activations("backward", 8) > 2.5 * activations("backward", 2)
    assert activations("zeroth-order", 8) < 1.2 * activations("zeroth-order", 2)
    assert activations("zeroth-order", 8) < activations("backward", 8) / 4


def test_a_run_does_not_resume_as_another(config: PinnConfig) -> None:
    pinn.run(config)
    (config.folder / "summary.json").unlink()
    changes: dict[str, dict[str, Any]] = {
        "dimension": {"dimension": 4},
        "gradients": {"gradients": "zeroth-order"},
        "stein.sigma": {"stein": SteinConfig(sigma=0.2)},
        "zeroth_order.eps": {"zeroth_order": replace(config.zeroth_order, eps=0.1)},
        "model.activation": {"model": replace(TINY, activation="tanh")},
    }
    assert_goes_on_only_as_begun(pinn.run, config, changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "cola"}, "method cola needs a recipe that offers it"),
        ({"dimension": 0}, "dimension must be at least 1"),
        ({"derivatives": "autograd"}, "derivatives must be one of exact, stein"),
        ({"gradients": "spsa"}, "gradients must be one of backward, zeroth-order"),
        ({"train": TrainConfig(steps=1, precision="bf16"), "derivatives": "stein"}, r"train\.precision: differences"),
        ({"train": TrainConfig(steps=1, mode="compile"), "gradients": "zeroth-order"}, r"train\.mode: estimates"),
        ({"preset": "small"}, "preset must be one of backward, forward"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PinnConfig(**change)
    for kind, wrong in (
        (ModelConfig, {"activation": "relu"}),
        (SteinConfig, {"samples": 3}),
        (ZerothOrderConfig, {"layout": "cores"}),
        (CompressConfig, {"order": 1}),
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
            kind(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_the_same_for_all_methods(preset: Preset) -> None:
    made = [replace(pinn.preset(method, preset), method="comera") for method in METHODS]
    assert made[0] == made[1] == made[2]
    assert (made[0].gradients == "zeroth-order") == (preset == "forward")


def test_scores_and_texts_are_refused_with_the_reason(
    config: PinnConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pinn.run(config)
    capsys.readouterr()
    (tmp_path / "rows.csv").write_text("a\n1\n")
    score = ["score", str(config.folder), str(tmp_path / "rows.csv"), "--out", str(tmp_path / "scores.csv")]
    for command in (score, ["generate", str(config.folder), "text"]):
        assert main(command) != 0
        assert "pinn" in capsys.readouterr().err
