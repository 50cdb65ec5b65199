"""Trackers of a run: the real packages in their offline modes get configuration, metrics and summary."""

import json
import logging
import math
import os
import signal
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import wandb
from accelerate.tracking import GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from comera.errors import ConfigError, MissingPackageError, TrainingError
from comera.trainer import trackers
from comera.trainer.config import TrainConfig, upgrade_config
from comera.trainer.loop import fit
from comera.trainer.trackers import Trackers

from ...helpers.run_folders import records
from .test_loop import CONFIG, Tiny

SHORT = replace(CONFIG, steps=4, eval_every=2, save_every=2)
SETTINGS = {"method": "comera", "train": {"lr": 0.01, "betas": [0.9, 0.99]}}


@pytest.fixture(autouse=True)
def nothing_leaves_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline modes, in folders of the test."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # all that mlflow-skinny has
    monkeypatch.chdir(tmp_path)


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_every_finite_number(tmp_path: Path) -> None:
    opened = Trackers(["tensorboard"], tmp_path, SETTINGS)
    opened.log("train", 1, {"time": 0.5, "loss": 2.0, "lr": {"cores": 0.25}, "stage": "early"})
    opened.log("size", 1, {"ranks": {"encoder.tt": (3, 7)}, "ratio": math.inf})
    opened.close()
    assert scalars(tmp_path) == {
        "train/time": [(1, 0.5)],
        "train/loss": [(1, 2.0)],
        "train/lr/cores": [(1, 0.25)],
        "size/ranks/encoder.tt/1": [(1, 3.0)],
        "size/ranks/encoder.tt/2": [(1, 7.0)],
    }
    texts = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["tensors"]
    assert texts == ["config/text_summary"]


def mlflow_runs() -> list[Any]:
    import mlflow

    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'comera'")
    return list(client.search_runs([experiment.experiment_id]))


@pytest.mark.filterwarnings("ignore")  # of mlflow and pydantic
def test_mlflow_gets_configuration_metrics_and_summary_and_resumes(tmp_path: Path) -> None:
    run, config = tmp_path / "run", replace(SHORT, trackers=("mlflow",))
    assert fit(Tiny(stop=2, number=signal.SIGINT), config, run).stopped == "interrupted"
    (stored,) = mlflow_runs()
    assert stored.info.status == "KILLED"
    assert stored.data.params["train.lr"] == str(config.lr)
    summary = fit(Tiny(), config, run, resume=True)
    (stored,) = mlflow_runs()
    assert stored.info.status == "FINISHED"
    assert stored.data.metrics["summary/held_out_loss"] == pytest.approx(summary.held_out_loss)
    import mlflow

    history = mlflow.MlflowClient().get_metric_history(stored.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [
        (r["step"], pytest.approx(r["loss"])) for r in records(run) if r["kind"] == "train"
    ]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_takes_a_database_if_its_packages_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlflow-skinny has the code for databases, but not SQLAlchemy and Alembic, with which it runs."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run, config = tmp_path / "run", replace(SHORT, trackers=("mlflow",))
    if all(find_spec(package) for package in ("sqlalchemy", "alembic")):
        summary = fit(Tiny(), config, run)
        (stored,) = mlflow_runs()
        assert stored.info.status == "FINISHED"
        assert stored.data.metrics["summary/held_out_loss"] == pytest.approx(summary.held_out_loss)
        assert (tmp_path / "mlflow.db").stat().st_size
    else:
        with pytest.raises(ConfigError, match=r"^train\.trackers: expected mlflow to start, got .*sqlite") as refused:
            fit(Tiny(), config, run)
        assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_fails_is_failed_in_mlflow(tmp_path: Path) -> None:
    class Failing(Tiny):
        def after_step(self, step: int) -> None:
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fit(Failing(), replace(SHORT, trackers=("mlflow",)), tmp_path / "run")
    assert [run.info.status for run in mlflow_runs()] == ["FAILED"]


@pytest.mark.filterwarnings("ignore")
def test_wandb_runs_offline_and_goes_on_with_its_id(tmp_path: Path) -> None:
    run, config = tmp_path / "run", replace(SHORT, trackers=("wandb",))
    fit(Tiny(stop=2, number=signal.SIGINT), config, run)
    ids = json.loads((run / "trackers.json").read_text())
    summary = fit(Tiny(), config, run, resume=True)
    assert json.loads((run / "trackers.json").read_text()) == ids
    stores = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(stores) == 2
    wandb.teardown()  # finish() only asks wandb's own process to close a store: this waits for it
    assert all(f"-{ids['wandb']}" in store.name for store in stores)  # within one second wandb adds "-1"
    first, second = (next(store.glob("*.wandb")).read_bytes() for store in stores)
    losses = [json.dumps(record["loss"]).encode() for record in records(run) if record["kind"] == "train"]
    assert losses[0] in first
    assert losses[-1] in second
    assert all(loss in first + second for loss in losses)
    for name in (b"train.lr", b"train/loss", b"eval/loss"):
        assert name in first
    assert b"summary/held_out_loss" in second
    assert json.dumps(summary.held_out_loss).encode() in second


class Broken(trackers._TensorBoard):
    """Fails at its second entry, and when it is closed."""

    entries = 0

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.entries += 1
        if self.entries == 2:
            raise ConnectionError("the server\nhas gone")
        super().log(values, step)

    def finish(self) -> None:
        super().finish()
        if self.entries == 2:
            raise ConnectionError("still gone")


@pytest.mark.filterwarnings("ignore")  # of mlflow and pydantic
def test_a_tracker_that_fails_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "_TensorBoard", Broken)
    with caplog.at_level(logging.WARNING, "comera"):
        summary = fit(Tiny(), replace(SHORT, trackers=("tensorboard", "mlflow")), tmp_path / "run")
    assert summary.finished
    (record,) = [r for r in caplog.records if r.name.startswith("comera")]
    assert (
        "tracker tensorboard failed at step 1 (ConnectionError: the server has gone): the run goes on" in record.message
    )
    (stored,) = mlflow_runs()
    assert stored.data.metrics["summary/held_out_loss"] == pytest.approx(summary.held_out_loss)


def test_a_tracker_that_cannot_start_or_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: GeneralTracker) -> None:
        raise PermissionError("not\nyours")

    monkeypatch.setattr(trackers._TensorBoard, "start", refuse)
    expected = r"^train\.trackers: expected tensorboard to start, got PermissionError: not yours: repair that"
    with pytest.raises(ConfigError, match=rf"{expected}, or leave it out$"):
        fit(Tiny(), replace(SHORT, trackers=("tensorboard",)), tmp_path / "run")
    for name in ("wandb", "mlflow", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingPackageError, match=rf"train\.trackers needs {name}: pip install {name}$"):
            fit(Tiny(), replace(SHORT, trackers=(name,)), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_configuration_that_names_the_old_csv_tracker_loads(caplog: pytest.LogCaptureFixture) -> None:
    content = {"train": {"steps": 3, "trackers": ["csv", "wandb"]}}
    assert upgrade_config(content) == {"train": {"steps": 3, "trackers": ["wandb"]}}
    assert caplog.messages == ["train.trackers: there is no csv any more; metrics.jsonl has all of it"]
    assert content["train"]["trackers"] == ["csv", "wandb"]


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_its_tracker_does_not_know_any_more_gets_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trackers.json").write_text('{"mlflow": "0123456789abcdef0123456789abcdef"}')
    Trackers(["mlflow"], tmp_path, SETTINGS, step=3).close()
    assert "tracker mlflow cannot continue its run 0123456789abcdef0123456789abcdef" in caplog.text
    (stored,) = mlflow_runs()
    assert stored.data.params == {"method": "comera", "train.lr": "0.01", "train.betas": "[0.9, 0.99]"}
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"mlflow": stored.info.run_id}
    (tmp_path / "trackers.json").write_text("{damaged")
    Trackers(["mlflow"], tmp_path, SETTINGS, step=3).close()
    assert len(mlflow_runs()) == 2


@pytest.mark.parametrize("names", [("wandb", "wandb"), ("mlflo",), "wandb", ("csv",)])
def test_other_names_are_refused(names: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.trackers must be different ones of tensorboard, wandb, mlflow, got"):
        TrainConfig(steps=1, trackers=names)


def test_a_full_disk_still_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trackers are left out; the run's own records are not."""

    def full(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("comera.trainer.metrics.MetricsLog.write", full)
    with pytest.raises(TrainingError, match="No space left"):
        fit(Tiny(), replace(SHORT, trackers=("tensorboard",)), tmp_path / "run")
