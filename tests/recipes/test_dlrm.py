"""The DLRM recipe end to end, small: all methods, both stages, every optimizer, resuming, and two processes as one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from torch import nn

from comera.cli import main as cli
from comera.cli import options
from comera.errors import ConfigError
from comera.kernels.cpp import compiler
from comera.memory import estimate as memory
from comera.nn import TTMEmbeddingBag
from comera.nn.size import model_size
from comera.optim.names import OPTIMIZERS
from comera.pretrained import load_pretrained
from comera.rank.objective import LateStage
from comera.recipes.base import runs
from comera.recipes.dlrm import recipe as dlrm
from comera.recipes.dlrm.click_metrics import click_metrics
from comera.recipes.dlrm.criteo import KAGGLE_TABLES, ClickBatch, ClickData, CriteoConfig, prepare
from comera.recipes.dlrm.model import DLRMConfig
from comera.recipes.dlrm.recipe import METHODS, CompressConfig, DLRMTask, DLRMTaskConfig, build_model, click_loss
from comera.trainer.checkpoint import find_checkpoint
from comera.trainer.config import OptimizerName
from comera.trainer.metrics import Summary
from comera.trainer.optimizer import named_optimizer
from comera.trainer.step import TrainStep

from ..helpers.launched import launch
from ..helpers.recipe_runs import assert_goes_on_only_as_begun, cut_off
from ..helpers.run_folders import history
from ..helpers.small_dlrm import BATCH, ROWS, TABLES, small_log, small_run

LATE = replace(dlrm.preset().train, late=LateStage(target_size=0.2))
EPOCH = 12  # steps; the last batch of an epoch goes on into the next one


@pytest.fixture(scope="module")
def data_config(tmp_path_factory: pytest.TempPathFactory) -> CriteoConfig:
    return small_log(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def data(data_config: CriteoConfig) -> ClickData:
    return prepare(data_config, quiet=True)


@pytest.fixture
def config(data_config: CriteoConfig, tmp_path: Path) -> DLRMTaskConfig:
    return small_run(data_config, tmp_path / "run")


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in history(folder, "train")]


def same(one: ClickBatch, two: ClickBatch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
@pytest.mark.parametrize("method", METHODS)
def test_two_steps(config: DLRMTaskConfig, method: Any, optimizer: OptimizerName) -> None:
    train = replace(config.train, steps=2, optimizer=optimizer)
    config = replace(config, method=method, late_targets=(), train=train)
    summary = dlrm.run(config)
    assert (summary.method, summary.recipe, summary.steps, summary.examples) == (method, "dlrm", 2, 2 * BATCH)
    assert summary.tokens == 2 * BATCH
    assert set(summary.metrics) == {"accuracy", "auc", "nce"}
    (folder,) = runs(config).values()
    assert folder == (config.folder / "early" if method == "comera" else config.folder)
    assert set(json.loads((folder / "test.json").read_text())) == {"loss", "accuracy", "auc", "nce"}
    assert dlrm.run(config, resume=True) == summary


def test_the_tables_keep_to_the_budget_and_small_ones_stay_dense(config: DLRMTaskConfig) -> None:
    model, report = build_model(replace(config, train=replace(config.train, optimizer="adagrad")), TABLES)
    assert report is not None
    dense, _ = build_model(replace(config, method="dense"), TABLES)
    assert report.dense_total == model_size(dense).total
    assert sum(p.numel() for p in model.tables.parameters()) <= 8 * sum(TABLES) / 6
    for table, rows in zip(model.tables, TABLES, strict=True):
        assert isinstance(table, TTMEmbeddingBag if rows >= 300 else nn.EmbeddingBag)
        assert rows >= 300 or not table.sparse
    assert all(isinstance(layer, nn.Linear | nn.ReLU) for layer in [*model.bottom, *model.top])
    assert not any(table.sparse for table in dense.tables)  # AdamW takes no sparse gradients
    dense, _ = build_model(replace(config, method="dense", train=replace(config.train, optimizer="adagrad")), TABLES)
    assert all(table.sparse for table in dense.tables)


@pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")
@pytest.mark.parametrize("optimizer", ["adagrad", "adamw"])
def test_steps_are_recorded(config: DLRMTaskConfig, data: ClickData, optimizer: OptimizerName) -> None:
    config = replace(config, train=replace(config.train, optimizer=optimizer))
    found = []
    for mode in ("eager", "graph"):
        model, _ = build_model(config, TABLES)
        step = TrainStep(model, click_loss, named_optimizer(model, config.train), mode=mode)  # type: ignore[arg-type]
        found.append([float(step([data.train_batch(index, BATCH, 0)]).loss) for index in range(8)])
    assert (step.mode, step.built) == ("graph", 1)
    assert found[0] == found[1]


def test_wide_layers_of_the_mlps_become_tensor_trains_on_request(config: DLRMTaskConfig) -> None:
    compress = replace(config.compress, mlp_rank=8)
    with torch.device("meta"):
        report = build_model(replace(config, model=DLRMConfig(dim=8), compress=compress), TABLES)[1]
    assert report is not None
    trains = {row.name for row in report.rows if row.after == "TTLinear"}
    assert trains == {"bottom.2", "top.0", "top.2"}
    assert all(row.stored < row.dense for row in report.rows if row.name in trains)


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_sparse_gradients_train_as_dense_ones_do(
    config: DLRMTaskConfig, optimizer: OptimizerName, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train = replace(config.train, optimizer=optimizer)
    config = replace(config, method="dense", late_targets=(), train=train)
    dlrm.run(config)
    monkeypatch.setitem(OPTIMIZERS, optimizer, OPTIMIZERS[optimizer]._replace(sparse=False))
    other = replace(config, out=str(tmp_path / "other"))
    dlrm.run(other)
    for a, b in zip(history(config.folder, "train"), history(other.folder, "train"), strict=True):
        assert (a["loss"], a["grad_norm"]) == pytest.approx((b["loss"], b["grad_norm"]), rel=1e-5)


def test_late_stages_start_from_the_early_one_and_meet_their_targets(config: DLRMTaskConfig) -> None:
    last = dlrm.run(config)
    folders = runs(config)
    assert list(folders) == ["early", "late 0.6", "late 0.3"]
    summaries = {name: Summary.read(folder / "summary.json") for name, folder in folders.items()}
    early = summaries["early"]
    assert early is not None
    assert last == summaries["late 0.3"]
    assert early.steps == EPOCH
    for target in (0.6, 0.3):
        folder, summary = folders[f"late {target}"], summaries[f"late {target}"]
        assert summary is not None
        assert summary.steps == 2 * EPOCH
        assert summary.tensorized <= target * early.tensorized
        (stage,) = history(folder, "stage")
        assert (stage["stage"], stage["step"]) == ("late", 0)
        assert history(folder, "prune") or history(folder, "round")
    for folder in (config.folder, *folders.values()):
        assert yaml.safe_load((folder / "config.yaml").read_text())["out"] == str(config.folder)
    names = {row["name"] for row in json.loads((folders["early"] / "layers.json").read_text())}
    assert {f"tables.{k}" for k in range(26)} < names


def test_runs_meet_the_batches_of_one_sequence(config: DLRMTaskConfig, data: ClickData) -> None:
    early, late = DLRMTask(config, data), DLRMTask(config, data, first=EPOCH)
    dense = DLRMTask(replace(config, method="dense"), data)
    assert early.steps_per_epoch == EPOCH
    for step in range(EPOCH):
        assert same(early.train_batch(step, 0, 0, 1), dense.train_batch(step, 0, 0, 1))
        assert same(late.train_batch(step, 0, 0, 1), dense.train_batch(EPOCH + step, 0, 0, 1))
    task = DLRMTask(replace(config, train=replace(config.train, accumulation=3)), data, first=2)
    order = [(step, micro, rank) for step in range(2) for micro in range(3) for rank in range(2)]
    for index, (step, micro, rank) in enumerate(order, start=2 * 3 * 2):
        assert same(task.train_batch(step, micro, rank, 2), data.train_batch(index, BATCH, seed=0))


def test_the_dense_baseline_is_as_long_as_the_early_stage_and_one_late_stage(config: DLRMTaskConfig) -> None:
    dense = replace(config, method="dense")
    summary = dlrm.run(dense)
    assert (summary.steps, summary.tensorized) == (3 * EPOCH, 0)
    assert (dense.folder / "test.json").exists()


def test_evaluation_is_that_of_all_held_out_rows(config: DLRMTaskConfig, data: ClickData) -> None:
    summary = dlrm.run(replace(config, late_targets=(), train=replace(config.train, steps=3)))
    task = DLRMTask(config, data)
    load_pretrained(task.model, find_checkpoint(config.folder / "early"))
    found = {}
    for part in ("validation", "test"):
        batch = data.batch(part, 0, ROWS)
        with torch.no_grad():
            scores, loss = task.model(batch.dense, batch.ids), float(click_loss(task.model, batch))
        right = float(((scores > 0) == (batch.labels > 0)).float().mean())
        found[part] = {"loss": loss, "accuracy": right, **click_metrics(scores, batch.labels)}
    assert {"loss": summary.held_out_loss, **summary.metrics} == pytest.approx(found["validation"], rel=1e-5)
    tested = json.loads((config.folder / "early" / "test.json").read_text())
    assert tested == pytest.approx(found["test"], rel=1e-5)


def test_a_run_that_is_killed_goes_on_as_if_nothing_had_happened(config: DLRMTaskConfig, tmp_path: Path) -> None:
    train = replace(config.train, save_every=8, optimizer="adagrad")
    config = replace(config, late_targets=(0.5,), late_epochs=1.8, train=train)
    dlrm.run(config)
    killed = replace(config, out=str(tmp_path / "killed"))
    cut_off(DLRMTask, EPOCH + 13, lambda: dlrm.run(killed))
    with pytest.raises(ConfigError, match=r"expected a folder without a run, got .*killed with .*early"):
        dlrm.run(killed)
    (killed.folder / "early" / "test.json").unlink()  # as if it had been killed right after the early stage too
    dlrm.run(killed, resume=True)
    for name, folder in runs(config).items():
        assert history(runs(killed)[name]) == history(folder)
        assert (runs(killed)[name] / "test.json").read_text() == (folder / "test.json").read_text()


def test_a_run_does_not_resume_on_other_data_or_with_another_model(config: DLRMTaskConfig) -> None:
    config = replace(config, late_targets=(), train=replace(config.train, steps=2))
    dlrm.run(config)
    (config.folder / "early" / "summary.json").unlink()  # as if it had been killed before it ended
    changes = {
        "data.shuffle": {"data": replace(config.data, shuffle=False)},
        "compress.ratio": {"compress": replace(config.compress, ratio=5.0)},
        "optimizer": {"train": replace(config.train, optimizer="sgd")},
    }
    assert_goes_on_only_as_begun(dlrm.run, config, changes)


def train_as(rank: int, world: int, config: DLRMTaskConfig) -> None:
    """What `torchrun --nproc_per_node WORLD -m comera train dlrm` would do in process `rank`."""
    dlrm.run(config)


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_two_processes_train_as_one_with_twice_the_batch(
    config: DLRMTaskConfig, tmp_path: Path, optimizer: OptimizerName
) -> None:
    """With adagrad dense tables have sparse gradients, whose rows differ from process to process."""
    config = replace(config, late_targets=(0.5,), train=replace(config.train, optimizer=optimizer))
    dlrm.run(replace(config, train=replace(config.train, batch_size=2 * BATCH)))
    two = replace(config, out=str(tmp_path / "two"))
    launch(train_as, two)
    for name, folder in runs(config).items():
        other = runs(two)[name]
        assert len(losses(folder)) == (EPOCH if name != "early" else EPOCH // 2)
        assert losses(other) == pytest.approx(losses(folder), rel=2e-5)
        (one,), (both,) = history(folder, "eval")[-1:], history(other, "eval")[-1:]
        assert {"loss": both["loss"], **both["metrics"]} == pytest.approx(
            {"loss": one["loss"], **one["metrics"]}, rel=2e-5
        )
        assert json.loads((other / "test.json").read_text()) == pytest.approx(
            json.loads((folder / "test.json").read_text()), rel=2e-5
        )


def test_training_learns_what_was_planted(config: DLRMTaskConfig) -> None:
    sizes = (700,) * 4 + (100,) * 22
    data = replace(config.data, synthetic_rows=12_000, table_sizes=sizes)
    train = replace(dlrm.preset().train, epochs=1, batch_size=128, lr=5e-3, progress=False, device="cpu")
    model = DLRMConfig(dim=8, bottom=(32,), top=(32,))
    compress = CompressConfig(ratio=2, min_rows=500)
    config = replace(config, data=data, model=model, compress=compress, train=train, late_targets=())
    metrics = dlrm.run(config).metrics
    assert metrics["nce"] < 0.97
    assert metrics["auc"] > 0.63


def test_estimate_shows_the_dense_model_that_cannot_run() -> None:
    kaggle = replace(dlrm.preset(preset="kaggle"), model=DLRMConfig(dim=128))
    numbers = 4 * 128 * sum(KAGGLE_TABLES)
    step = dlrm.estimate(kaggle)
    assert step["dense"].weights == pytest.approx(numbers, rel=1e-3)
    assert step["dense"].gradients == step["dense"].weights
    assert step["dense"].optimizer == pytest.approx(2 * numbers, rel=1e-3)
    assert step["dense"].weights / step["comera"].weights > 150
    sparse = dlrm.estimate(replace(kaggle, train=replace(kaggle.train, optimizer="adagrad")))["dense"]
    assert sparse.optimizer == pytest.approx(numbers, rel=1e-3)
    assert sparse.gradients < 2048 * 26 * (128 * 4 + 8) + 10**7


def test_a_dense_baseline_that_does_not_fit_is_refused_with_its_estimate(
    config: DLRMTaskConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = dlrm.estimate(config)
    monkeypatch.setattr(memory, "device_memory", lambda device: need["comera"].total)
    with pytest.raises(ConfigError, match=r"method=dense: expected a training step that fits .* weights, .* gradients"):
        dlrm.run(replace(config, method="dense"))
    assert not config.folder.exists()
    dlrm.run(replace(config, late_targets=(), train=replace(config.train, steps=1)))
    noted = json.loads((config.folder / "early" / "memory.json").read_text())
    assert noted == {method: need[method].parts for method in ("dense", "comera")}


def test_the_defaults_fit_the_synthetic_log(tmp_path: Path) -> None:
    """`comera train dlrm` without any data."""
    config = dlrm.preset()
    sizes = prepare(replace(config.data, cache=str(tmp_path)), quiet=True).table_sizes
    with torch.device("meta"):
        model, _ = build_model(config, sizes)
    compressed = [table for table in model.tables if isinstance(table, TTMEmbeddingBag)]
    assert len(compressed) == sum(size >= config.compress.min_rows for size in sizes) >= 5
    assert sum(p.numel() for p in model.tables.parameters()) <= config.model.dim * sum(sizes) / config.compress.ratio


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (DLRMTaskConfig, {"method": "galore"}, "method galore needs .* this one has dense, comera, hashing"),
        (DLRMTaskConfig, {"preset": "best"}, "preset must be one of sample, kaggle, got 'best'"),
        (DLRMTaskConfig, {"late_targets": (0.5, 1.0)}, "> 0 and < 1, got 1.0"),
        (DLRMTaskConfig, {"late_targets": (0.5, 0.5)}, "late_targets must differ"),
        (DLRMTaskConfig, {"late_epochs": float("nan")}, "late_epochs must be a number > 0, got nan"),
        (DLRMTaskConfig, {"train": LATE}, "set late_targets and train.epochs"),
        (CompressConfig, {"ratio": 1.0}, "compress.ratio must be a number > 1, got 1.0"),
        (CompressConfig, {"min_rows": 0}, "compress.min_rows must be at least 1"),
        (CompressConfig, {"order": 5}, "compress.order must be one of 2, 3, 4, or none, got 5"),
        (CompressConfig, {"mlp_rank": -1}, "compress.mlp_rank must be a number >= 0"),
        (CompressConfig, {"mlp_order": 1}, "compress.mlp_order must be from 2 to 8"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(kind: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(**fields)


def test_a_ratio_that_leaves_nothing_is_refused_before_anything_is_written(config: DLRMTaskConfig) -> None:
    with pytest.raises(ConfigError, match=r"compress.ratio 1e\+06 leaves 0 parameters"):
        dlrm.run(replace(config, compress=CompressConfig(ratio=1e6, min_rows=300)))
    assert not config.folder.exists()


def test_the_command_line_takes_presets_and_nested_fields(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ({}, {"method": "dense"}, {"preset": "kaggle"}, {"method": "dense", "preset": "kaggle"}):
        argv = [word for name, value in words.items() for word in (f"--{name}", value)]
        assert options.parse("train", "dlrm", argv)[1] == dlrm.preset(**words)  # type: ignore[arg-type]
    argv = ["--model.dim=128", "--model.top=[64]", "--train.optimizer=adagrad", "--compress.order=3", "--out=o"]
    _, config, _ = options.parse("train", "dlrm", argv)
    chosen = (config.model.dim, config.model.top, config.train.optimizer, config.compress.order)
    assert chosen == (128, (64,), "adagrad", 3)
    assert runs(config) == {"early": Path("o/early"), "late 0.5": Path("o/late-0.5")}
    assert cli.main(["train", "dlrm", "--method", "cola"]) == 2
    assert "method cola needs a recipe that offers it, this one has dense, comera, hashing" in capsys.readouterr().err
    assert cli.main(["train", "dlrm", "--compress.ratio", "0.5"]) == 2
    assert capsys.readouterr().err == "comera: compress.ratio must be a number > 1, got 0.5\n"
