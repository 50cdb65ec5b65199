"""fit() on a tiny language model: the run folder, its bounds, and everything that can stop it."""

import json
import math
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from comera.errors import CheckpointError, ConfigError, TrainingError
from comera.rank.objective import EarlyStage, LateStage
from comera.trainer.checkpoint import checkpoints, find_checkpoint
from comera.trainer.config import TrainConfig
from comera.trainer.energy import EnergyConfig
from comera.trainer.loop import fit
from comera.trainer.optimizer import lr_multiplier

from ...helpers.run_folders import records
from ...helpers.toy_task import BATCH, LENGTH
from ...helpers.toy_task import NextToken as Tiny

CONFIG = TrainConfig(
    steps=12,
    batch_size=BATCH,
    lr=1e-2,
    early=EarlyStage(size_weight=0.1),  # strong enough to cut ranks within a few steps
    rank_lr=0.2,
    eval_every=4,
    save_every=3,
    log_every=1,
    prune_every=5,
    progress=False,
)


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in records(run, "train")]


class Greedy(Tiny):
    """It takes 300 MB to evaluate, and 200 MB in its second step."""

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Tensor:
        if step == 1:
            torch.ones(50 * 2**20)
        return super().train_batch(step, micro, rank, world)

    def eval_batches(self) -> Iterator[Tensor]:
        torch.ones(75 * 2**20)
        return super().eval_batches()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak counts from the start of the process")
def test_the_peak_memory_of_the_summary_is_that_of_the_curve_and_of_training(tmp_path: Path) -> None:
    summary = fit(Greedy(), replace(CONFIG, log_every=3, eval_every=1), tmp_path)
    peaks = [line["peak_memory"] for line in records(tmp_path, "train")]
    assert summary.peak_memory == max(peaks) == peaks[0]
    assert all(150 * 2**20 < peaks[0] - peak < 290 * 2**20 for peak in peaks[1:])


def test_the_run_folder_is_that_of_the_contract(tmp_path: Path) -> None:
    summary = fit(Tiny(), replace(CONFIG, trackers=("tensorboard",)), run := tmp_path / "run")
    data = ["layers.json", "metrics.jsonl", "provenance.json", "summary.json"]
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml", *data, "tensorboard"]
    assert json.loads((run / "summary.json").read_text()) == asdict(summary)
    assert json.loads((run / "layers.json").read_text()) == []

    train, evals, sizes = (records(run, kind) for kind in ("train", "eval", "size"))
    assert [line["step"] for line in train] == list(range(1, 13))
    fields = {"kind", "step", "time", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_time"}
    assert set(train[0]) == fields | {"peak_memory", "size", "stage", "energy"}
    assert {line["stage"] for line in train} == {"early"}
    assert set(train[0]["lr"]) == {"cores", "ranks", "dense", "dense_no_decay"}
    assert [line["tokens"] for line in train] == [BATCH * LENGTH * step for step in range(1, 13)]
    fields = {"kind", "step", "time", "tokens", "loss", "metrics", "epoch", "energy"}
    assert [(line["step"], set(line)) for line in evals] == [(k, fields) for k in (4, 8, 12)]
    assert [(line["metrics"], line["epoch"]) for line in evals] == [({}, None)] * 3
    # evaluations, the cut at 10 and, where there is something left to cut, that at the end
    assert [line["step"] for line in sizes] in ([0, 4, 8, 10, 12], [0, 4, 8, 10, 12, 12])
    ranks = sizes[0]["ranks"]
    assert ranks == {"1.tt": [2, 4, 6, 4, 2]}
    assert sizes[0]["active"] == 2 * 2 + 2 * 2 * 4 + 4 * 2 * 6 + 6 * 3 * 4 + 4 * 2 * 2 + 2 * 2
    assert all(a["time"] < b["time"] for a, b in pairwise(train))

    assert (summary.recipe, summary.method, summary.steps, summary.stopped) == ("tiny", "comera", 12, "steps")
    assert summary.tokens == 12 * BATCH * LENGTH
    assert (summary.examples, summary.metrics, summary.epoch_time) == (12 * BATCH, {}, None)
    assert summary.held_out_loss == evals[-1]["loss"]
    assert summary.best_held_out_loss == min(line["loss"] for line in evals)
    assert summary.peak_memory > 2**26
    assert summary.peak_memory == max(line["peak_memory"] for line in train)
    assert 0 < summary.step_time <= summary.time


def test_ranks_shrink_and_the_summary_counts_what_is_left(tmp_path: Path) -> None:
    task = Tiny()
    before = sum(p.numel() for p in task.model.parameters())
    summary = fit(task, CONFIG, tmp_path)
    prunes = records(tmp_path, "prune")
    assert prunes
    assert all(line["before"] > line["after"] for line in prunes)
    assert summary.parameters == sum(p.numel() for p in task.model.parameters()) < before
    assert summary.tensorized == sum(p.numel() for p in task.model.get_submodule("1.tt").parameters())
    assert summary.size_bytes == 4 * summary.parameters
    assert summary.tensorized == prunes[-1]["after"]


def test_a_dense_task_trains_without_ranks(tmp_path: Path) -> None:
    task = Tiny(compressed=False)
    first = task.loss(task.model.eval(), next(task.eval_batches())).item()
    summary = fit(task, replace(CONFIG, steps=30), tmp_path)
    assert (summary.method, summary.tensorized, summary.tensorized_ratio, summary.ratio) == ("dense", 0, 1.0, 1.0)
    assert losses(tmp_path)[-1][1] < first
    assert records(tmp_path, "prune") == []
    assert {(line["size"], line["stage"]) for line in records(tmp_path, "train")} == {(0, None)}
    assert records(tmp_path, "size")[0]["ranks"] == {}


def test_config_yaml_is_the_configuration_or_what_was_resolved(tmp_path: Path) -> None:
    fit(Tiny(), replace(CONFIG, steps=1), tmp_path / "a")
    saved = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())["train"]
    stages = {"early": EarlyStage(**saved["early"]), "late": LateStage(**saved["late"])}
    stages |= {"energy": EnergyConfig(**saved["energy"])}
    assert TrainConfig(**{**saved, **stages}) == replace(CONFIG, steps=1)
    resolved = {"recipe": "tiny", "data": {"path": Path("x/y")}, "train": {"betas": (0.9, 0.99), "steps": None}}
    fit(Tiny(), replace(CONFIG, steps=1), tmp_path / "b", resolved=resolved)
    saved = yaml.safe_load((tmp_path / "b" / "config.yaml").read_text())
    assert saved == {"recipe": "tiny", "data": {"path": "x/y"}, "train": {"betas": [0.9, 0.99], "steps": None}}


def test_optional_parts_of_a_task_are_used(tmp_path: Path) -> None:
    task = Tiny()
    task.method, task.report_rows, task.identity = "mine", [{"name": "1", "order": 6}], {"data": "abc"}  # type: ignore[attr-defined]
    assert fit(task, replace(CONFIG, steps=2), tmp_path).method == "mine"
    assert json.loads((tmp_path / "layers.json").read_text()) == [{"name": "1", "order": 6}]
    trainer = json.loads((find_checkpoint(tmp_path) / "trainer.json").read_text())
    assert {k: trainer["identity"][k] for k in ("data", "recipe", "processes", "lr")} == {
        "data": "abc",
        "recipe": "tiny",
        "processes": 1,
        "lr": CONFIG.lr,
    }


def test_each_step_asks_for_its_own_micro_batches(tmp_path: Path) -> None:
    task = Tiny()
    fit(task, replace(CONFIG, steps=3, accumulation=2), tmp_path)
    assert task.asked == [(step, micro) for step in range(3) for micro in range(2)]


def test_learning_rates_follow_the_schedule_at_the_middle_of_each_step(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=8, warmup=0.25, core_lr=3e-3)
    fit(Tiny(), config, tmp_path)
    for line in records(tmp_path, "train"):
        multiplier = lr_multiplier((line["step"] - 0.5) / 8, warmup=0.25, schedule="cosine", final=0.0)
        assert multiplier > 0
        peaks = {"cores": 3e-3, "ranks": 0.2, "dense": 1e-2, "dense_no_decay": 1e-2}
        assert line["lr"] == {name: pytest.approx(peak * multiplier) for name, peak in peaks.items()}


def test_the_first_of_two_bounds_ends_the_run(tmp_path: Path) -> None:
    assert fit(Tiny(), replace(CONFIG, steps=2, max_seconds=1e6), tmp_path).stopped == "steps"


def test_a_run_ends_with_the_last_and_the_best_checkpoint(tmp_path: Path) -> None:
    fit(Tiny(), CONFIG, tmp_path)
    evals = {line["step"]: line["loss"] for line in records(tmp_path, "eval")}
    assert find_checkpoint(tmp_path, "last").name == "step-00000012"
    assert find_checkpoint(tmp_path, "best").name == f"step-{min(evals, key=evals.__getitem__):08d}"
    assert len(checkpoints(tmp_path)) <= 2


def test_evaluation_does_not_shift_training(tmp_path: Path) -> None:
    class Drawing(Tiny):
        def eval_batches(self) -> Iterator[Tensor]:
            torch.rand(17)
            return super().eval_batches()

    fit(Tiny(), replace(CONFIG, eval_every=0), tmp_path / "a")
    fit(Drawing(), replace(CONFIG, eval_every=1, eval_batches=2, log_every=1), tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_log_every_thins_the_lines_and_keeps_the_last(tmp_path: Path) -> None:
    fit(Tiny(), replace(CONFIG, log_every=5), tmp_path)
    assert [line["step"] for line in records(tmp_path, "train")] == [5, 10, 12]


def test_bf16_trains(tmp_path: Path) -> None:
    summary = fit(Tiny(), replace(CONFIG, precision="bf16"), tmp_path)
    assert summary.held_out_loss is not None
    assert math.isfinite(summary.held_out_loss)


def test_threads_hold_for_the_run_only(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watching(Tiny):
        def tokens(self, batch: Tensor) -> int:
            seen.append(torch.get_num_threads())
            return super().tokens(batch)

    before = torch.get_num_threads()
    fit(Watching(), replace(CONFIG, steps=1, threads=before + 1), tmp_path)
    assert (set(seen), torch.get_num_threads()) == ({before + 1}, before)


def test_a_folder_with_a_run_is_left_alone_unless_resumed(tmp_path: Path) -> None:
    fit(Tiny(), replace(CONFIG, steps=1), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"expected a folder without a run, got .*metrics\.jsonl.*resume"):
        fit(Tiny(), CONFIG, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match=r"expected a folder for the run that .*/run' \(File exists\)"):
        fit(Tiny(), CONFIG, tmp_path / "run", resume=True)
    assert (tmp_path / "run").read_text() == "mine"


def test_a_finished_run_says_so_and_returns_its_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = fit(Tiny(), replace(CONFIG, steps=2), tmp_path)
    task = Tiny()
    assert fit(task, replace(CONFIG, steps=2, progress=True), tmp_path, resume=True) == summary
    assert task.asked == []
    assert "is finished, 2 steps" in " ".join(capsys.readouterr().err.split())


def test_a_finished_run_is_not_resumed_as_another(tmp_path: Path) -> None:
    fit(Tiny(), replace(CONFIG, steps=2), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for other in ({"steps": 9}, {"seed": 7}):
        with pytest.raises(ConfigError, match=r"must go on as it was begun \(\w+: expected \d, got \d;"):
            fit(Tiny(), replace(CONFIG, **{"steps": 2, **other}), tmp_path, resume=True)  # type: ignore[arg-type]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_killed_between_its_last_checkpoint_and_its_summary_is_finished(tmp_path: Path) -> None:
    summary = fit(Tiny(), replace(CONFIG, steps=2), tmp_path)
    (tmp_path / "summary.json").unlink()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    task = Tiny()
    assert fit(task, replace(CONFIG, steps=2), tmp_path, resume=True) == summary
    assert task.asked == []
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resuming_where_nothing_was_saved_starts_fresh(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "time": 0.1, "loss": 9.0}\n{"kind": "tr')
    fit(Tiny(), CONFIG, tmp_path, resume=True)
    fit(Tiny(), CONFIG, tmp_path / "other", resume=True)
    assert losses(tmp_path) == losses(tmp_path / "other")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_and_it_resumes(tmp_path: Path, number: int) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    summary = fit(Tiny(stop=6, number=number), CONFIG, tmp_path / "a")
    assert (summary.stopped, summary.steps, summary.finished) == ("interrupted", 7, False)
    assert find_checkpoint(tmp_path / "a").name == "step-00000007"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers

    assert fit(Tiny(), CONFIG, tmp_path / "a", resume=True).stopped == "steps"
    fit(Tiny(), CONFIG, tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_a_second_sigint_has_its_usual_effect(tmp_path: Path) -> None:
    class Twice(Tiny):
        def train_batch(self, step: int, micro: int, rank: int, world: int) -> Tensor:
            super().train_batch(step, micro, rank, world)
            return super().train_batch(step, micro, rank, world)

    with pytest.raises(KeyboardInterrupt):
        fit(Twice(stop=6, number=signal.SIGINT), CONFIG, tmp_path)
    assert find_checkpoint(tmp_path).name == "step-00000006"


class Diverging(Tiny):
    """Its loss, or only its gradient, is no longer finite from a step on."""

    def __init__(self, step: int, *, gradient_only: bool = False) -> None:
        super().__init__()
        self.step, self.gradient_only = step, gradient_only

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss = super().loss(model, batch)
        if not model.training or self.asked[-1][0] < self.step:
            return loss
        zero = (loss * 0).abs()
        return loss + zero.sqrt() if self.gradient_only else loss * torch.inf  # sqrt at 0: gradient 0 · inf


@pytest.mark.parametrize(
    ("gradient_only", "message"), [(False, "loss inf with gradient norm"), (True, r"loss \d.*norm nan")]
)
def test_numbers_that_are_not_finite_stop_the_run_and_keep_the_last_good_checkpoint(
    tmp_path: Path, gradient_only: bool, message: str
) -> None:
    with pytest.raises(TrainingError, match=message) as error:
        fit(Diverging(7, gradient_only=gradient_only), CONFIG, tmp_path)
    kept = find_checkpoint(tmp_path)
    assert kept.name == "step-00000006"
    assert "at step 8" in str(error.value)
    assert str(kept) in str(error.value)
    assert "lower lr" in str(error.value)
    assert not (tmp_path / "summary.json").exists()
    fit(Tiny(), CONFIG, tmp_path, resume=True)  # the checkpoint is good


def test_divergence_before_the_first_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"at step 1; no checkpoint had been saved yet"):
        fit(Diverging(0), CONFIG, tmp_path)


def test_a_model_that_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    class Poisoned(Tiny):
        def tokens(self, batch: Tensor) -> int:
            if self.asked[-1][0] == 5:  # an entry that no batch reaches, so that the loss stays finite
                weight = self.model.get_parameter("4.bias")
                weight.data[0] = torch.nan
            return super().tokens(batch)

        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            logits = model(batch[:, :-1])[..., 1:].flatten(0, 1)
            return F.cross_entropy(logits, batch[:, 1:].flatten().clamp(min=1) - 1)

    with pytest.raises(TrainingError, match=r"expected finite values, got .*at step 6"):
        fit(Poisoned(), CONFIG, tmp_path)
    assert find_checkpoint(tmp_path).name == "step-00000004"


def test_a_held_out_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    class Overflowing(Tiny):
        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            return super().loss(model, batch) * (1 if model.training else torch.nan)

    with pytest.raises(TrainingError, match="held-out loss nan at step 4"):
        fit(Overflowing(), CONFIG, tmp_path)


def test_no_held_out_data_is_an_error_that_says_so(tmp_path: Path) -> None:
    class Blind(Tiny):
        def eval_batches(self) -> Iterator[Tensor]:
            return iter(())

    with pytest.raises(ConfigError, match="expected held-out batches from tiny, got none"):
        fit(Blind(), CONFIG, tmp_path)


@pytest.mark.parametrize(("change", "named"), [({"lr": 1e-3}, "lr"), ({"steps": 13}, "steps"), ({"seed": 5}, "seed")])
def test_resuming_under_another_configuration_names_what_changed(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    fit(Tiny(stop=6), CONFIG, tmp_path)
    with pytest.raises(ConfigError, match=rf"must go on as it was begun \({named}: expected"):
        fit(Tiny(), replace(CONFIG, **change), tmp_path, resume=True)


def test_resuming_may_change_what_is_shown(tmp_path: Path) -> None:
    fit(Tiny(stop=6), CONFIG, tmp_path)
    config = replace(CONFIG, eval_every=3, save_every=0, trackers=("tensorboard",), threads=1)
    assert fit(Tiny(), config, tmp_path, resume=True).stopped == "steps"


def test_resuming_with_another_model_is_refused(tmp_path: Path) -> None:
    fit(Tiny(stop=6), CONFIG, tmp_path)
    (dense := Tiny(compressed=False)).method = "comera"  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        fit(dense, CONFIG, tmp_path, resume=True)
