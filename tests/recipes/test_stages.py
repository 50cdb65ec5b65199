"""What the stages of a recipe make of its configuration."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comera.recipes import base as stages
from comera.recipes.classify import mnli
from comera.trainer.config import TrainConfig


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ((0.5, 0.2), [("early", "constant"), ("late-0.5", "cosine"), ("late-0.2", "cosine")]),
        ((), [("early", "cosine")]),
    ],
)
def test_rates_fall_in_the_late_stages_alone_where_there_are_any(
    targets: tuple[float, ...], expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[tuple[str, str]] = []

    def fit(task: Any, train: TrainConfig, out: Path, **others: Any) -> Any:
        begun.append((out.name, train.schedule))
        return SimpleNamespace(finished=True, steps=4)

    def make_task(first: int) -> Any:
        return SimpleNamespace(name="mnli", steps_per_epoch=4, finish=lambda *_: None)

    monkeypatch.setattr(stages, "fit", fit)
    config = replace(mnli.preset(preset="mnli"), out=str(tmp_path), late_targets=targets)
    stages.fit_stages(config, make_task, resume=False)
    assert begun == expected
