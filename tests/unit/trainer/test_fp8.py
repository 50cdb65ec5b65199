"""fit() with the precision fp8: what computes in it, what is logged, and that evaluation and resumption agree."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.errors import ConfigError, ConversionError
from comera.nn.linear import TTLinear
from comera.recipes.base import evaluate_last
from comera.trainer.checkpoint import checkpoints
from comera.trainer.config import TrainConfig
from comera.trainer.loop import fit
from comera.trainer.task import Task
from comera.tt.shapes import tt_spec

CONFIG = TrainConfig(
    steps=6, batch_size=8, lr=1e-3, precision="fp8", save_every=2, eval_every=2, prune_every=3, progress=False,
    device="cpu", threads=1,
)  # fmt: skip


class Tiny(Task):
    """Two layers that can compute in FP8, one that cannot, one dense."""

    name = "tiny"

    def __init__(self, config: TrainConfig = CONFIG) -> None:
        torch.manual_seed(3)
        first, second, third = (TTLinear(tt_spec(64, outputs, order=4, rank=8)) for outputs in (64, 64, 40))
        self.model: nn.Module = nn.Sequential(first, nn.GELU(), second, third, nn.Linear(40, 4))
        self.run = config

    @property
    def config(self) -> object:
        """As a recipe's."""
        return type("Config", (), {"train": self.run})

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 + step))
        return x, x[:, :4].argmax(1)

    def eval_batches(self) -> list[tuple[Tensor, Tensor]]:
        return [self.train_batch(-1, 0, 0, 1)]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def tokens(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[1])


def test_a_run_in_fp8_says_what_is_and_that_it_is_emulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = Tiny()
    summary = fit(task, replace(CONFIG, progress=True), tmp_path)
    shown = " ".join(capsys.readouterr().err.split())
    assert (
        "tiny: 2 of 4 layers compute in FP8 (tensorwise), emulated on this device: slower, for checking quality only"
    ) in shown
    assert "not in FP8: 3: out_features 40 is no multiple of 16 (nearest: 48)" in shown
    assert "not in FP8: 4: dense layers stay as they are" in shown
    assert [getattr(layer, "fp8", None) for layer in task.model] == ["tensorwise", None, "tensorwise", None, None]
    other = fit(Tiny(), replace(CONFIG, precision="bf16"), tmp_path / "bf16")
    assert summary.held_out_loss != other.held_out_loss
    assert summary.held_out_loss == pytest.approx(other.held_out_loss, rel=2e-2)


def test_a_resumed_run_is_the_whole_one(tmp_path: Path) -> None:
    whole, resumed = Tiny(), Tiny()
    fit(whole, CONFIG, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    *_, last = checkpoints(tmp_path / "resumed")
    shutil.rmtree(last)
    (tmp_path / "resumed" / "summary.json").unlink()
    with pytest.raises(ConfigError, match="precision: expected 'fp8', got 'bf16'"):
        fit(Tiny(), replace(CONFIG, precision="bf16"), tmp_path / "resumed", resume=True)
    fit(resumed, CONFIG, tmp_path / "resumed", resume=True)
    for kept, made in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(kept, made)


def test_the_last_model_is_evaluated_in_fp8_too(tmp_path: Path) -> None:
    config = replace(CONFIG, fuse=False)  # batched merges round differently
    summary = fit(Tiny(config), config, tmp_path)
    means = evaluate_last(Tiny(config), tmp_path)  # type: ignore[arg-type]  # untrained: an earlier call finished the run
    assert means["loss"] == summary.held_out_loss


def test_a_model_without_such_layers_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    task = Tiny()
    task.model = nn.Linear(64, 4)
    with pytest.raises(ConversionError, match="expected a tensor train linear layer"):
        fit(task, CONFIG, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
