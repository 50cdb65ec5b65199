"""Every baseline through `fit`: a run that is stopped resumes to the bit; the reports show what it is."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from comera.baselines import (
    BASELINES,
    LTE,
    METHODS,
    TOKEN_METHODS,
    BaselineConfig,
    CoLA,
    GaLore,
    Narrow,
    Tensorly,
    apply_method_,
    check_method,
    widest,
)
from comera.cli import main as cli
from comera.convert import TensorizeConfig
from comera.errors import ConfigError
from comera.recipes.base import estimates_by_method, set_from_conversion
from comera.recipes.code_lm import recipe as code_lm
from comera.recipes.config import RecipeConfig
from comera.report import compare, inspect, render
from comera.report.html import layer_table
from comera.report.run import read_run
from comera.trainer.config import TrainConfig
from comera.trainer.loop import fit
from comera.trainer.task import Task

from ...helpers.recipe_runs import assert_same_end

SETTINGS = BaselineConfig(
    galore=GaLore(rank=2, update_proj_gap=3),
    lte=LTE(heads=4, rank=2, merge_every=4, alpha=8.0),
    cola=CoLA(rank=3),
    tensorly=Tensorly(order=4, rank=3),
)
# narrow and what adds to it need a recipe: tests/recipes/test_lm.py
CONVERSIONS = [method for method in BASELINES if method not in ("narrow", *TOKEN_METHODS)]
CONFIG = TrainConfig(
    steps=12, batch_size=6, lr=1e-2, core_lr=5e-3, eval_every=5, save_every=100, progress=False, device="cpu", threads=1
)


class Toy(Task):
    """Regression onto a fixed function; the stop comes as the interrupt of a person, between two steps."""

    name = "regression"

    def __init__(self, method: str, stop: int | None = None) -> None:
        torch.manual_seed(3)
        layers = [nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 8), nn.LayerNorm(8)]
        self.model: nn.Module = nn.Sequential(*layers)
        self.method, self.stop = method, stop
        self.identity = SETTINGS.identity(method)
        set_from_conversion(self, None if method == "dense" else SETTINGS[method].apply_(self.model))

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Tensor:
        if step == self.stop:
            raise KeyboardInterrupt
        return torch.randn(6, 8, generator=torch.Generator().manual_seed(step))

    def eval_batches(self) -> Iterator[Tensor]:
        yield torch.randn(7, 8, generator=torch.Generator().manual_seed(1000))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch.roll(1, 1).tanh()).square().mean()

    def tokens(self, batch: Tensor) -> int:
        return len(batch)


@pytest.mark.parametrize("method", CONVERSIONS)
def test_a_stopped_run_resumes_to_the_bit(method: str, tmp_path: Path) -> None:
    config = replace(CONFIG, save_every=1)
    whole = fit(Toy(method), config, tmp_path / "whole")
    for stop in (5, 6, 9):  # between merges and projections, and at them
        with pytest.raises(KeyboardInterrupt):
            fit(Toy(method, stop), config, tmp_path / "run", resume=True)
    again = fit(Toy(method), config, tmp_path / "run", resume=True)
    assert again.held_out_loss == whole.held_out_loss
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    assert whole.method == method


@pytest.mark.parametrize("method", CONVERSIONS)
def test_training_learns(method: str, tmp_path: Path) -> None:
    task = Toy(method)
    task.model.eval()
    before = task.loss(task.model, next(task.eval_batches())).item()
    task.model.train()
    fit(task, replace(CONFIG, steps=60, core_lr=2e-2, eval_every=0), tmp_path)
    task.model.eval()
    assert task.loss(task.model, next(task.eval_batches())).item() < 0.9 * before


def test_a_run_does_not_resume_under_other_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, steps=2, save_every=1)
    with pytest.raises(KeyboardInterrupt):
        fit(Toy("lte", stop=1), config, tmp_path, resume=True)
    task = Toy("lte")
    task.identity = replace(SETTINGS, lte=replace(SETTINGS.lte, merge_every=5)).identity("lte")
    with pytest.raises(ConfigError, match=r"baselines\.lte\.merge_every: expected 4, got 5"):
        fit(task, config, tmp_path, resume=True)
    assert SETTINGS.identity("dense") == SETTINGS.identity("comera") == {}


def test_reports_show_baselines_as_what_they_are(tmp_path: Path) -> None:
    runs = {method: tmp_path / method for method in ("cola", "lte", "galore", "tensorly", "dense")}
    for method, folder in runs.items():
        fit(Toy(method), replace(CONFIG, steps=4), folder)
    text = compare(runs, tmp_path)
    head, _, *lines = ([cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines())
    cells = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
    assert list(cells) == list(runs)
    assert cells["dense"]["speed"] == "1.00×"
    assert cells["dense"]["ratio"] == "–"
    assert cells["galore"]["ratio"] == "1.00×"
    summaries = {row["name"]: row for row in json.loads((tmp_path / "compare.json").read_text())}
    weights, heads = 2 * 8 * 12, 2 * 4 * 2 * (8 + 12)
    assert summaries["lte"]["parameters"] - summaries["dense"]["parameters"] == heads
    assert summaries["cola"]["parameters"] - summaries["dense"]["parameters"] == 2 * 3 * (8 + 12) - weights
    for method, kind in (("cola", "CoLALinear"), ("lte", "LTELinear"), ("tensorly", "FactorizedLinear")):
        table = layer_table(read_run(runs[method]))
        assert table is not None
        assert [row[:2] for row in table.rows[:2]] == [("0", kind), ("3", kind)]
        shown = inspect(runs[method])
        assert f"regression, {method}: 4 steps" in shown
        assert shown.count(kind) >= 4
        assert "no layer compressed" not in shown
    assert "larger than dense" in render(runs["lte"]).read_text()
    galore = layer_table(read_run(runs["galore"]))
    assert galore is not None
    assert galore.rows[0][1] == "dense"
    assert galore.rows[0][-1] == "gradient projected to rank 2"
    assert inspect(runs["dense"]).endswith("no layer compressed")


def test_a_method_without_its_package_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "galore_torch", None)
    monkeypatch.setattr(cli, "_run", None)
    out = tmp_path / "runs"
    assert cli.main(["compare", "code-lm", "--methods", "dense,galore", "--out", str(out)]) == 2
    shown = capsys.readouterr().err
    assert (
        "method galore needs the package galore-torch, which is not installed: pip install 'comera[baselines]'" in shown
    )
    assert not out.exists()

    def parts(config: RecipeConfig) -> tuple[nn.Module, None, Callable[[], Tensor]]:
        model = nn.Linear(2, 2)
        return model, None, lambda: model(torch.ones(1, 2)).sum()

    found = estimates_by_method(code_lm.preset(), parts)
    assert list(found) == ["comera", "dense", "lte", "cola", "tensorly", "narrow"]


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"method must be one of comera, dense, galore, lte, cola, tensorly, narrow, .*, got 'x'"
    ):
        check_method("x")
    with pytest.raises(ConfigError, match=r"method narrow needs a recipe that offers it, this one has comera, dense"):
        check_method("narrow")
    with pytest.raises(ConfigError, match=r"method hashing needs a recipe that offers it, .* or the recipe dlrm"):
        check_method("hashing", METHODS[:7])
    with pytest.raises(ConfigError, match="method hashing needs a recipe"):
        apply_method_(nn.Sequential(nn.Linear(2, 2)), "hashing", TensorizeConfig(), SETTINGS)
    for method in BASELINES:
        check_method(method, METHODS)


def test_narrow_is_no_conversion() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="builds its model narrower, got a finished Linear"):
        SETTINGS["narrow"].apply_(model)
    with pytest.raises(ConfigError, match=r"narrow\.hidden must be an integer >= 1 or nothing, got 0"):
        Narrow(hidden=0)


@pytest.mark.parametrize(("limit", "width"), [(0, 8), (6 * 64, 8), (6 * 16**2 - 1, 8), (6 * 16**2, 16), (10**6, 408)])
def test_widest_is_the_last_width_within_the_limit(limit: int, width: int) -> None:
    assert widest(limit, lambda width: 6 * width**2) == width


@pytest.mark.parametrize("rest", [0, 512, 10**4])  # FLOPs of the other layers, such as the head, a channel
@pytest.mark.parametrize("last", [*range(8, 200, 8), 1000, 6000])
@pytest.mark.parametrize("below", [0, 1])
def test_widest_asks_for_few_widths_in_models(last: int, rest: int, below: int) -> None:
    asked: list[int] = []

    def flops(width: int) -> int:
        asked.append(width)
        return 24 * width**2 + 6 * width * round(8 / 3 * width / 16) * 16 + rest * width

    # the limit is what this width costs, or what the next one costs less one
    assert widest(flops(last + 8 * below) - below, flops) == last
    assert len(asked[1:]) <= 5
    assert len(set(asked[1:])) == len(asked[1:])


@pytest.mark.parametrize(
    ("limit", "flops", "width"),
    [(0, lambda width: width >= 5000, 4992), (2**100, lambda width: 2**width, 96),
     (1e9 + 4095, lambda width: 1e9 + width, 4088), (1e9 - 1, lambda width: 1e9, 8)],
)  # fmt: skip
def test_widest_is_right_where_costs_are_no_parabola(limit: float, flops: Callable[[int], float], width: int) -> None:
    asked: list[int] = []
    assert widest(limit, lambda width: asked.append(width) or flops(width)) == width
    assert len(asked) < 40
