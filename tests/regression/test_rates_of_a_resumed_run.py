"""Rates that were measured from the first cores of a run go on when it is resumed, from whatever cores that begins."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from comera.nn.linear import TTLinear
from comera.trainer.loop import fit

from ..unit.trainer.test_loop import CONFIG, Tiny, records

SPECTRAL = replace(CONFIG, rates="spectral", weight_decay=1.0, steps=8)


class Elsewhere(Tiny):
    """The same model before it is loaded, with other cores."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.model:
            if isinstance(layer, TTLinear):
                with torch.no_grad():
                    layer.tt.cores[0].mul_(5)


class Stopping(Tiny):
    """Is interrupted after six steps."""

    def after_step(self, step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("task", [Tiny, Elsewhere])
def test_a_resumed_run_goes_on_at_the_rates_that_it_began_with(task: type[Tiny], tmp_path: Path) -> None:
    fit(Tiny(), SPECTRAL, tmp_path / "whole")
    assert fit(Stopping(), SPECTRAL, tmp_path / "run").stopped == "interrupted"
    fit(task(), SPECTRAL, tmp_path / "run", resume=True)
    losses = [[line["loss"] for line in records(tmp_path / each, "train")] for each in ("run", "whole")]
    assert losses[0] == losses[1]
