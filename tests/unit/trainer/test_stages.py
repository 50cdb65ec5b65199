"""fit() through both stages: epochs, the switch, the target size at the end, and runs that begin with another one."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from comera.errors import CheckpointError, ConfigError, RankError
from comera.pretrained import load_pretrained
from comera.rank.objective import EarlyStage, LateStage
from comera.trainer.checkpoint import checkpoints, find_checkpoint
from comera.trainer.config import TrainConfig
from comera.trainer.evaluation import evaluate
from comera.trainer.loop import fit
from comera.trainer.metrics import Summary

from ...helpers.run_folders import records
from ...helpers.toy_task import BATCH, LENGTH, Scored

EPOCH = 4
CONFIG = TrainConfig(
    steps=12,
    batch_size=BATCH,
    lr=1e-2,
    early=EarlyStage(size_weight=0.0),  # ranks fall in the late stage alone
    rank_lr=0.04,
    schedule="constant",
    warmup=0.0,
    eval_every=0,
    save_every=0,
    log_every=1,
    progress=False,
)
FALLING = replace(CONFIG, steps=16, late=LateStage(target_size=0.4, start_step=5, shrink="surrogate"))


class Tiny(Scored):
    """An epoch has four steps, and batches differ in size."""

    steps_per_epoch = EPOCH
    counted = "characters"
    held_out = (4, 4, 1)
    lowest_gate = 0.3

    def size(self, step: int) -> tuple[int, int]:
        return BATCH + step % 2, LENGTH - step % 3


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in records(run, "train", "eval")]


def stages(run: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["stage"]) for line in records(run, "train")]


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(task: Tiny) -> int:
    return sum(p.numel() for p in task.model.get_submodule("1.tt").parameters())


# epochs


def test_epochs_bound_the_run_and_each_ends_with_an_evaluation(tmp_path: Path) -> None:
    summary = fit(Tiny(), replace(CONFIG, steps=None, epochs=2.5, eval_every=None), tmp_path)
    assert (summary.steps, summary.stopped) == (10, "steps")
    evals = records(tmp_path, "eval")
    assert [(line["step"], line["epoch"]) for line in evals] == [(4, 1.0), (8, 2.0), (10, 2.5)]
    assert summary.metrics == evals[-1]["metrics"]
    assert 0 <= summary.metrics["accuracy"] <= 1
    assert summary.epoch_time == pytest.approx(summary.time * EPOCH / 10)
    assert summary.examples == 5 * (BATCH + BATCH + 1)
    assert summary.tokens == sum((BATCH + step % 2) * (LENGTH - step % 3) for step in range(10))


def test_without_epochs_evaluations_are_steps_apart(tmp_path: Path) -> None:
    fit(Tiny(), replace(CONFIG, eval_every=5), tmp_path)
    assert [line["step"] for line in records(tmp_path, "eval")] == [5, 10, 12]


def test_epochs_of_a_task_that_has_none_are_refused(tmp_path: Path) -> None:
    class Endless(Tiny):
        steps_per_epoch = None  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"train\.epochs is 1.*no end"):
        fit(Endless(), replace(CONFIG, steps=None, epochs=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_length_of_the_epoch_is_another_run(tmp_path: Path) -> None:
    class Longer(Tiny):
        steps_per_epoch = EPOCH + 1

    fit(Tiny(stop=2), CONFIG, tmp_path)
    with pytest.raises(ConfigError, match="steps_per_epoch: expected 4, got 5"):
        fit(Longer(), CONFIG, tmp_path, resume=True)


def test_metrics_and_rate_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = fit(Tiny(), replace(CONFIG, steps=2, progress=True), tmp_path)
    shown = " ".join(capsys.readouterr().err.split())
    assert f"accuracy {summary.metrics['accuracy']:.4f}" in shown


# the switch, and the size at the end


@pytest.mark.parametrize(
    ("late", "first"),
    [
        (LateStage(target_size=0.5, start_step=5), 5),
        (LateStage(target_size=0.5, start_epoch=1), 4),
        (LateStage(target_size=90, start_epoch=2, start_step=6), 6),
        (LateStage(target_size="400 B", start_epoch=3), 12),  # at the very end: rounded at once
    ],
)
def test_the_late_stage_begins_where_it_should_and_ends_at_its_target(
    tmp_path: Path, late: LateStage, first: int
) -> None:
    task = Tiny()
    before = stored(task)
    summary = fit(task, replace(CONFIG, late=late, prune_every=3), tmp_path)
    assert stages(tmp_path) == [(k, "late" if k >= first else "early") for k in range(1, 13)]

    (stage,) = records(tmp_path, "stage")
    assert (stage["step"], stage["stage"]) == (first, "late")
    assert stage["size"] <= before
    assert stage["target_loss"] > 0
    expected = {0.5: 89, 90: 90, "400 B": 100}[late.target_size]  # type: ignore[index]
    assert stage["target_size"] == expected if late.start_step is None else stage["target_size"] <= expected
    assert summary.tensorized == stored(task) <= stage["target_size"]


def test_sizes_of_training_are_what_a_cut_would_leave(tmp_path: Path) -> None:
    task = Tiny()
    fit(task, replace(FALLING, prune_every=1), tmp_path)
    sizes = {line["step"]: line["size"] for line in records(tmp_path, "train")}
    prunes = records(tmp_path, "prune")
    assert len(prunes) >= 2
    assert all(sizes[line["step"]] == line["after"] < line["before"] for line in prunes)


def test_rounding_comes_before_the_last_evaluation_and_checkpoint(tmp_path: Path) -> None:
    task = Tiny()
    late = LateStage(target_size=0.3, start_step=10, steps=100)  # too late to get there by training
    summary = fit(task, replace(CONFIG, late=late), tmp_path)
    (rounded,) = records(tmp_path, "round")
    assert rounded["step"] == 12
    assert rounded["before"] > rounded["target"] >= rounded["after"] == stored(task) == summary.tensorized
    assert 0 < rounded["error"] < 1
    kinds = [line["kind"] for line in records(tmp_path, "round", "eval", "size")]
    assert kinds == ["size", "round", "eval", "size"]
    assert records(tmp_path, "size")[-1]["tensorized"] == stored(task)

    saved = Tiny(seed=4)
    load_pretrained(saved.model, find_checkpoint(tmp_path))
    assert stored(saved) == stored(task)
    means = evaluate(saved, saved.model, Accelerator(cpu=True))
    assert means == {"loss": summary.held_out_loss, **summary.metrics}


def test_a_plateau_of_the_held_out_loss_begins_the_late_stage(tmp_path: Path) -> None:
    class Stuck(Tiny):
        def evaluate(self, model: nn.Module, batch: Tensor) -> tuple[dict[str, Tensor], int]:
            return {"loss": torch.tensor(1.0)}, 1

    task = Stuck()
    late = LateStage(target_size=0.5, plateau=2)
    fit(task, replace(CONFIG, late=late, eval_every=2), tmp_path)
    (stage,) = records(tmp_path, "stage")
    assert stage["step"] == 6  # best at 2, none better at 4 and 6
    assert stages(tmp_path)[5:7] == [(6, "early"), (7, "late")]  # evaluated after the step was logged
    assert stored(task) <= stage["target_size"]


def test_a_late_stage_that_never_began_says_so_and_meets_its_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Tiny()
    before = stored(task)
    config = replace(CONFIG, late=LateStage(target_size=0.5, start_step=50), rank_lr=0.0, progress=True)
    assert fit(task, config, tmp_path).tensorized <= before // 2
    assert records(tmp_path, "stage") == []
    (rounded,) = records(tmp_path, "round")
    assert rounded["target"] == before // 2
    assert "the late stage never began" in " ".join(capsys.readouterr().err.split())


def test_the_switch_and_the_rounding_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(Tiny(), replace(CONFIG, late=LateStage(target_size=0.3, start_step=10), progress=True), tmp_path)
    shown = " ".join(capsys.readouterr().err.split())
    (stage,), (rounded,) = records(tmp_path, "stage"), records(tmp_path, "round")
    assert f"step 10: the late stage begins, from {stage['size']} parameters" in shown
    assert f"step 12: rounded from {rounded['before']} to {rounded['after']} parameters" in shown


def test_a_late_stage_that_nothing_starts_is_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, late=LateStage(target_size=0.5))
    with pytest.raises(ConfigError, match=r"nothing starts.*train\.late\.start_step, start_epoch or plateau"):
        fit(Tiny(), config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_dense_twin_trains_under_the_same_configuration(tmp_path: Path) -> None:
    fit(Tiny(compressed=False), replace(CONFIG, late=LateStage(target_size=0.5)), tmp_path)
    assert records(tmp_path, "stage", "round", "prune") == []
    assert {(line["size"], line["stage"]) for line in records(tmp_path, "train")} == {(0, None)}


def test_an_interrupted_run_is_not_rounded(tmp_path: Path) -> None:
    config = replace(CONFIG, late=LateStage(target_size=0.3, start_step=4))
    assert fit(Tiny(stop=6), config, tmp_path).stopped == "interrupted"
    assert records(tmp_path, "round") == []
    task = Tiny()
    summary = fit(task, config, tmp_path, resume=True)
    assert [line["step"] for line in records(tmp_path, "stage")] == [4]
    assert summary.tensorized == stored(task) <= records(tmp_path, "stage")[0]["target_size"]


def test_a_late_run_is_cut_at_its_end_in_any_case(tmp_path: Path) -> None:
    task = Tiny()
    summary = fit(task, replace(FALLING, steps=24, prune_at_end=False), tmp_path)
    (stage,), (prune,) = records(tmp_path, "stage"), records(tmp_path, "prune")
    assert (prune["step"], prune["before"]) == (24, 178)
    assert summary.tensorized == stored(task) <= stage["target_size"]


def test_ranks_stay_at_multiples(tmp_path: Path) -> None:
    task = Tiny()
    summary = fit(task, replace(FALLING, steps=24, prune_every=2, rank_multiple=2), tmp_path)
    assert records(tmp_path, "prune")
    assert [d.numel() % 2 for d in task.model.get_submodule("1.tt.rank_params").parameters()] == [0] * 5
    assert summary.tensorized <= records(tmp_path, "stage")[0]["target_size"]


# beginning with another run


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the early stage, with other ranks than a new model has."""
    run, task = tmp_path_factory.mktemp("early"), Tiny()
    with torch.no_grad():
        task.model.get_parameter("1.tt.rank_params.2")[[0, 3]] = 0.0
    fit(task, CONFIG, run)
    return run


DOWN = replace(CONFIG, steps=6, late=LateStage(target_size=0.5), prune_every=2)


@pytest.mark.parametrize("at", ["run", "checkpoint"])
def test_a_run_takes_another_one_over_and_is_late_at_once(tmp_path: Path, early: Path, at: str) -> None:
    before = files(early)
    summary_early = Summary.read(early / "summary.json")
    assert summary_early is not None
    task = Tiny(seed=4)
    source = early if at == "run" else find_checkpoint(early)
    summary = fit(task, DOWN, tmp_path, start_from=source)
    (stage,) = records(tmp_path, "stage")
    assert (stage["step"], stage["size"]) == (0, summary_early.tensorized)
    assert stage["target_size"] == summary_early.tensorized // 2
    assert stages(tmp_path) == [(k, "late") for k in range(1, 7)]
    assert task.asked == [(step, 0) for step in range(6)]
    assert summary.steps == 6
    assert summary.tensorized == stored(task) <= stage["target_size"]
    assert files(early) == before
    first = records(tmp_path, "size")[0]
    assert (first["step"], first["tensorized"]) == (0, summary_early.tensorized)


def test_it_goes_on_with_that_runs_numbers(tmp_path: Path, early: Path) -> None:
    fit(Tiny(seed=4), replace(CONFIG, steps=1, lr=1e-12, rank_lr=1e-12), tmp_path, start_from=early)
    assert records(tmp_path, "eval")[-1]["loss"] == pytest.approx(records(early, "eval")[-1]["loss"], rel=1e-6)
    assert records(tmp_path, "stage") == []


def test_a_resumed_run_needs_the_other_folder_no_more(tmp_path: Path, early: Path) -> None:
    fit(Tiny(), DOWN, tmp_path / "whole", start_from=early)
    source = shutil.copytree(early, tmp_path / "early")
    assert fit(Tiny(stop=2), DOWN, tmp_path / "run", start_from=source).stopped == "interrupted"
    trainer = json.loads((find_checkpoint(tmp_path / "run") / "trainer.json").read_text())
    assert trainer["progress"]["start_from"]["step"] == 12
    shutil.rmtree(source)
    assert fit(Tiny(), DOWN, tmp_path / "run", start_from=source, resume=True).stopped == "steps"
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert len(records(tmp_path / "run", "stage")) == 1


def test_a_run_in_its_late_stage_goes_on_in_it_or_is_refused(tmp_path: Path, early: Path) -> None:
    fit(Tiny(), DOWN, tmp_path / "a", start_from=early)
    other = replace(DOWN, late=LateStage(target_size=0.2))
    with pytest.raises(ConfigError, match=r"train\.late\.target_size is 0\.2, but the run in .* late stage already"):
        fit(Tiny(), other, tmp_path / "b", start_from=tmp_path / "a")
    assert not (tmp_path / "b").exists()
    fit(Tiny(), replace(DOWN, late=LateStage()), tmp_path / "b", start_from=tmp_path / "a")
    targets = [records(tmp_path / name, "stage")[0]["target_size"] for name in ("a", "b")]
    assert targets[0] == targets[1]


def test_what_cannot_be_taken_over_is_refused_with_nothing_written(tmp_path: Path, early: Path) -> None:
    cases: list[tuple[Tiny, Path, str]] = [
        (Tiny(), tmp_path / "nowhere", "expected checkpoints in"),
        (Tiny(hidden=16), early, "does not fit"),
        (Tiny(compressed=False), early, "rank controller's state"),
    ]
    for task, source, message in cases:
        before = copy.deepcopy(task.model.state_dict())
        with pytest.raises(CheckpointError, match=message):
            fit(task, DOWN, tmp_path / "run", start_from=source)
        assert not (tmp_path / "run").exists()
        after = task.model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_target_that_cannot_be_is_refused_before_anything_is_written(tmp_path: Path, early: Path) -> None:
    for target in (10_000, "1 MB", 3):
        config = replace(DOWN, late=LateStage(target_size=target))
        with pytest.raises(RankError, match="target"):
            fit(Tiny(), config, tmp_path / "run", start_from=early)
    assert not (tmp_path / "run").exists()


def test_a_dense_run_takes_a_dense_one_over(tmp_path: Path) -> None:
    fit(Tiny(compressed=False), CONFIG, tmp_path / "a")
    fit(Tiny(compressed=False, seed=4), CONFIG, tmp_path / "b", start_from=tmp_path / "a")
    assert records(tmp_path / "b", "train")[0]["loss"] < records(tmp_path / "a", "train")[0]["loss"]
    assert checkpoints(tmp_path / "b")
