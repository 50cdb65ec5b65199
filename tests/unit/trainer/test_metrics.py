"""What a run writes: whole lines, whole files, numbers that JSON can hold."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from comera.errors import CheckpointError
from comera.trainer.display import Display
from comera.trainer.metrics import MetricsLog, Summary, to_json

from ...helpers.run_folders import records

SUMMARY = Summary("comera", "tiny", 10, 1.5, 640, 0.15, 1 << 30, 2.5, 2.25, 500, 2000, 178, 40.0, 30.0, "steps")


def log(folder: Path, *steps: int, **options: Any) -> None:
    metrics = MetricsLog(folder, **options)
    for step in steps:
        metrics.write("train", step, time=step / 10, loss=1.0 / step)
    metrics.sync()
    metrics.close()


def test_each_record_is_a_line_and_there_at_once(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path)
    metrics.write("train", 1, time=0.5, loss=2.0, lr={"cores": 1e-3})
    assert records(tmp_path) == [{"kind": "train", "step": 1, "time": 0.5, "loss": 2.0, "lr": {"cores": 1e-3}}]
    metrics.close()


def test_resuming_cuts_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    log(tmp_path, 1, 2, 3, 4)
    log(tmp_path, 3, step=2)
    assert [line["step"] for line in records(tmp_path)] == [1, 2, 3]


def test_a_fresh_start_cuts_everything(tmp_path: Path) -> None:
    log(tmp_path, 1, 2)
    log(tmp_path, 1)
    assert [line["step"] for line in records(tmp_path)] == [1]


@pytest.mark.parametrize("torn", ['{"kind": "train", "st', '{"kind": "train", "step": 2, "time": 0.2}', "\x00\x00"])
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: str) -> None:
    log(tmp_path, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    log(tmp_path, 3, step=2)
    assert [line["step"] for line in records(tmp_path)] == [1, 3]


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


# --- on the terminal --------------------------------------------------------------------------------------------------


def show(terminal: bool, shown: bool = True, counted: str = "tokens", width: int = 160) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=width, quiet=not shown, color_system=None)
    with Display("tiny", shown=shown, counted=counted, console=console) as display:
        display.update(0.25, step=1234, loss=2.5, held_out_loss=2.25, tokens_per_s=5678.9, ratio=42.0, time=5180.0)
        display.announce("tiny: held-out loss 2.0 [best]")
    return screen.getvalue()


def test_a_terminal_shows_a_bar_with_losses_speed_ratio_and_time_left() -> None:
    text = show(terminal=True)
    parts = (
        "25%",
        "loss 2.5000",
        "held out 2.2500",
        "4 h 19 min left",
        "step 1,234",
        "5,679 tokens/s",
        "42.0x smaller",
    )
    for part in (*parts, "held-out loss"):
        assert part in text


def test_a_narrow_terminal_keeps_the_losses_and_the_time_left() -> None:
    text = show(terminal=True, width=80)
    assert "tiny ━━━━━" in text
    assert "25% loss 2.5000  held out 2.2500  4 h 19 min left" in text
    assert "tokens/s" not in text


def test_the_rate_is_named_after_what_the_task_counts() -> None:
    assert "5,679 pairs/s" in show(terminal=True, counted="pairs")


def test_without_a_terminal_only_lines_are_printed() -> None:
    first, announced = show(terminal=False).splitlines()
    assert first.startswith("tiny: 25%  loss 2.5000  held out 2.2500  4 h 19 min left  step 1,234")
    assert announced == "tiny: held-out loss 2.0 [best]"


def test_without_a_terminal_progress_comes_at_once_and_then_ever_more_rarely() -> None:
    screen = io.StringIO()
    display = Display("tiny", console=Console(file=screen, force_terminal=False, width=160))
    for step in range(1000):
        about = {"loss": 1.0, "held_out_loss": None, "tokens_per_s": 1.0, "ratio": 1.0}
        display.update(step / 1000, step=step, time=3.6 * step, **about)
    times = [3.6 * int(line.split("step ")[1].split()[0].replace(",", "")) for line in screen.getvalue().splitlines()]
    assert times[0] == 0
    assert times[1] < 15
    assert 8 <= len(times) <= 12  # an hour


def test_nothing_is_printed_when_not_shown() -> None:
    assert show(terminal=False, shown=False) == ""
