"""What goes wrong outside of the program is told in one line: interrupts, full disks, odd paths, odd records."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.run_folders import write_run
from tests.helpers.tiny_run import TINY, words
from tests.unit.trainer.test_loop import CONFIG, Tiny, losses

from comera import report
from comera.cli.main import main
from comera.errors import CheckpointError, DataError, TrainingError
from comera.recipes.data.cache import open_or_make
from comera.trainer.checkpoint import checkpoints, find_checkpoint
from comera.trainer.config import TrainConfig
from comera.trainer.loop import fit

resource = pytest.importorskip("resource")  # not on Windows


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files of this process end at `size` bytes: a write beyond fails as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def options(out: Path, **changes: object) -> list[str]:
    return words({"out": out, **TINY, "data.cache": out.parent / "cache", "train.device": "cpu", **changes})


def test_an_interrupted_early_stage_of_dlrm_says_how_to_go_on(tmp_path: Path) -> None:
    dlrm = {
        "out": tmp_path / "run",
        "data.synthetic_rows": 420,
        "data.workers": 1,
        "data.cache": tmp_path / "cache",
        "compress.min_rows": 50,
        "compress.ratio": 4,
        "model.dim": 8,
        "model.bottom": "[16]",
        "model.top": "[16]",
        "train.epochs": 1000,
        "train.batch_size": 16,
        "train.log_every": 1,
        "train.eval_every": 0,
        "train.progress": "false",
        "train.device": "cpu",
    }
    metrics = tmp_path / "run" / "early" / "metrics.jsonl"
    command = [sys.executable, "-m", "comera", "train", "dlrm", *words(dlrm)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (metrics.exists() and '"train"' in metrics.read_text()):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=120)
    assert process.returncode == 130, shown
    assert f"resume with: comera train dlrm --out {tmp_path}/run --resume" in shown
    assert (tmp_path / "run" / "early" / "report.html").exists()


def fill_the_disk(room: int, config: TrainConfig, run: Path, message: str) -> None:
    """Train: from step 5 on no file may be larger than `room`."""
    full = largest_file(room)

    class Filling(Tiny):
        def after_step(self, step: int) -> None:
            if step == 5:
                full.__enter__()

    try:
        with pytest.raises(TrainingError, match=message):
            fit(Filling(), config, run)
    finally:
        full.__exit__(None, None, None)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
def test_a_disk_that_fills_up_keeps_the_last_checkpoint(file: str, tmp_path: Path) -> None:
    config = replace(CONFIG, steps=6, eval_every=0, prune_every=0, prune_at_end=False)
    fit(Tiny(), config, tmp_path / "whole")
    sizes = {path.name: path.stat().st_size for path in find_checkpoint(tmp_path / "whole").iterdir()}
    said = r"expected to write the checkpoint of step 6 in .*step-00000003: make room"
    fill_the_disk(sizes[file] - 64, config, tmp_path / "run", said)  # times in trainer.json have more or fewer digits
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    fit(Tiny(), config, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_disk_without_room_for_the_records_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    said = r"expected to write the records of the run .*step-0000000[34]: make room"
    fill_the_disk(100, CONFIG, tmp_path / "run", said)
    fit(Tiny(), CONFIG, tmp_path / "run", resume=True)
    fit(Tiny(), CONFIG, tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def one_line(argv: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    capsys.readouterr()
    assert main(argv) == code
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1].startswith("comera: ")
    assert all(not line.startswith("comera: ") for line in shown[:-1])
    return shown[-1]


@pytest.mark.parametrize("room", [100, 5000, 20_000])
def test_a_cache_without_room_is_one_line_and_leaves_nothing(
    room: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with largest_file(room):
        shown = one_line(["train", "code-lm", *options(tmp_path / "run")], capsys)
    assert shown.startswith(f"comera: data.cache: expected room for the prepared data, got {tmp_path / 'cache'}")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert not (tmp_path / "run").exists()


def test_what_a_cache_is_made_from_is_not_blamed_on_the_cache(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_or_make(tmp_path / "data", lambda folder: folder, lambda folder: (tmp_path.parent / "nowhere").read_text())


def commands(train: list[str], odd: str) -> dict[str, list[str]]:
    """What meets an odd path, by where."""
    return {
        "train": [*train, "--out", odd],
        "resume": [*train, "--out", odd, "--resume"],
        "compare": ["compare", "code-lm", "--out", odd, "--resume"],
        "inspect": ["inspect", odd],
        "export": ["export", odd, "--to", "onnx", "--out", "exported"],
        "cache": [*train, "--data.cache", odd],
        "data": [*train, "--data.path", odd],
    }


@pytest.mark.parametrize(
    "odd", ["", " ", "~nobodyatall/run", "nul\0byte", "sur\udcffrogate", "file", "file/run", "loop/run", "x" * 300]
)
@pytest.mark.parametrize("command", ["train", "resume", "compare", "inspect", "export", "cache"])
def test_odd_paths_are_one_line(
    command: str,
    odd: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("loop").symlink_to("loop")
    shared = tmp_path_factory.getbasetemp() / "data of odd paths"
    train = ["train", "code-lm", *options(tmp_path / "run", **{"data.cache": shared})]
    one_line(commands(train, odd)[command], capsys)
    assert not Path("run").exists()
    assert Path("file").read_text() == "mine"


@pytest.mark.skipif(os.name == "nt" or os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("command", ["train", "resume", "compare", "inspect", "export", "cache", "data"])
def test_an_unreadable_folder_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    odd = str(closed / "run")
    train = ["train", "code-lm", *options(tmp_path / "run", **{"data.cache": "/tmp/nobody's cache"})]
    os.seteuid(65_534)
    try:
        one_line(commands(train, odd)[command], capsys)
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("line", ['{"kind": "train"}', '{"kind": "train", "step": "3"}', "[1]", "7", '{"step": null}'])
def test_a_metrics_line_without_a_step_is_named(line: str, tmp_path: Path) -> None:
    fit(Tiny(), replace(CONFIG, steps=3), tmp_path)
    (tmp_path / "summary.json").unlink()
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(f"{line}\n{metrics.read_text()}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        CheckpointError, match=r"metrics\.jsonl, line 1: expected a record with a step, got .*remove this"
    ):
        fit(Tiny(), replace(CONFIG, steps=3), tmp_path, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", [".step-00000006.new", ".step-x", ".step-00000003.old", ".step-00000006.old"])
@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_leftovers_of_any_kind_are_removed(name: str, kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(Tiny(), replace(CONFIG, steps=3), run)
    (run / "summary.json").unlink()
    leftover = run / "checkpoints" / name
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    if kind == "file":
        leftover.write_text("mine")
    elif kind == "link":
        leftover.symlink_to(tmp_path / "mine")
    else:
        leftover.mkdir()
    fit(Tiny(), replace(CONFIG, steps=3), run, resume=True)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    assert (tmp_path / "mine" / "file").read_text() == "mine"
    assert checkpoints(run)


ABSURD: list[Any] = [1e308, -1e308, 1e39, 1e18, 10**400, -5]


@pytest.mark.parametrize("value", ABSURD, ids=["1e308", "-1e308", "1e39", "1e18", "10**400", "-5"])
@pytest.mark.parametrize("name", ["step", "time", "loss", "total", "ratio"])
def test_absurd_numbers_are_drawn_or_named(name: str, value: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=20)
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows[len(rows) // 2 :]:
        if name in row:
            row[name] = value
            break
    else:
        rows.append({**rows[-1], name: value})
    metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    refused = None
    try:
        report.read_run(folder)
    except DataError as error:
        refused = str(error)
    assert refused is None or ("metrics.jsonl, line" in refused and "\n" not in refused)
    page = report.render(folder).read_text()
    assert ("cannot be read" in page) == (refused is not None)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", {"step_time": 10**400}),
        ("summary.json", {"parameters": "many"}),
        ("summary.json", {"size_bytes": None}),
        ("summary.json", {"metrics": {"accuracy": 1e308}}),
        ("memory.json", {"dense": 3}),
        ("memory.json", {"dense": {"weights": "many"}}),
        ("test.json", {"loss": 10**400}),
        ("test.json", {"loss": [1]}),
    ],
)
def test_absurd_results_are_named(file: str, content: dict[str, Any], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=20)
    found = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps({**found, **content}))
    with pytest.raises(DataError, match=file):
        report.read_run(folder)
    assert f"{folder / file}: " in (page := report.render(folder).read_text()) or f"in {folder / file}, " in page
