"""What a run writes: whole lines, whole files, numbers that JSON can hold."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from comera.errors import CheckpointError
from comera.trainer.metrics import MetricsLog, Summary, to_json

SUMMARY = Summary("comera", "tiny", 10, 1.5, 640, 0.15, 1 << 30, 2.5, 2.25, 500, 2000, 178, 40.0, 30.0, "steps")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def log(folder: Path, *steps: int, **options: Any) -> None:
    metrics = MetricsLog(folder, **options)
    for step in steps:
        metrics.write("train", step, time=step / 10, loss=1.0 / step)
    metrics.sync()
    metrics.close()


def test_each_record_is_a_line_and_there_at_once(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path)
    metrics.write("train", 1, time=0.5, loss=2.0, lr={"cores": 1e-3})
    assert lines(tmp_path) == [{"kind": "train", "step": 1, "time": 0.5, "loss": 2.0, "lr": {"cores": 1e-3}}]
    metrics.close()


def test_resuming_cuts_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    log(tmp_path, 1, 2, 3, 4)
    log(tmp_path, 3, step=2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_fresh_start_cuts_everything(tmp_path: Path) -> None:
    log(tmp_path, 1, 2)
    log(tmp_path, 1)
    assert [line["step"] for line in lines(tmp_path)] == [1]


@pytest.mark.parametrize("torn", ['{"kind": "train", "st', '{"kind": "train", "step": 2, "time": 0.2}', "\x00\x00"])
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: str) -> None:
    log(tmp_path, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    log(tmp_path, 3, step=2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 3]


def test_numbers_that_json_lacks_become_null() -> None:
    value = {"ratio": float("inf"), "deep": [1.0, float("nan"), (2, -float("inf"))], "none": None}
    assert json.loads(to_json(value)) == {"ratio": None, "deep": [1.0, None, [2, None]], "none": None}


def test_summary_round_trips_and_null_stands_for_infinite(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    SUMMARY.write(path)
    assert Summary.read(path) == SUMMARY
    replace(SUMMARY, tensorized_ratio=float("inf")).write(path)
    assert json.loads(path.read_text())["tensorized_ratio"] is None
    assert Summary.read(tmp_path / "nothing.json") is None


def test_a_summary_of_an_earlier_version_still_reads(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    values = asdict(replace(SUMMARY, metrics={"accuracy": 0.5}, epoch_time=2.0, examples=320))
    path.write_text(json.dumps(values))
    assert Summary.read(path) == Summary(**values)
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in ("metrics", "epoch_time", "examples")}))
    assert Summary.read(path) == SUMMARY


@pytest.mark.parametrize("text", ["{", '{"pages": 3}', "[]"])
def test_a_foreign_summary_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(CheckpointError, match="expected the summary of a run"):
        Summary.read(tmp_path / "summary.json")


def test_only_an_interrupted_run_is_unfinished() -> None:
    assert [replace(SUMMARY, stopped=s).finished for s in ("steps", "time", "interrupted")] == [True, True, False]
