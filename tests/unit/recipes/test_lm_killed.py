"""A preparation of text that was killed while it tokenized: it goes on where it was, to the byte."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from comera.files import SUMS
from comera.recipes.data import prepared
from comera.recipes.data.cache import RESUME
from comera.recipes.data.documents import PASSAGE
from comera.recipes.lm.data import LMData, LMDataConfig, prepare

# A child that dies when the bar of its `calls`-th chunk is to move: what it has written then is partly not noted.
KILLED = """
import os, signal, sys
from comera.recipes.data import prepared
from comera.recipes.lm.data import LMDataConfig, prepare
path, cache, calls = sys.argv[1:]
prepared.ENCODE_BYTES, prepared.KEPT_BYTES = 500, 1500
move, left = prepared.Progress.add, int(calls)
def killed(*args):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return move(*args)
prepared.Progress.add = killed
prepare(LMDataConfig(path=path, cache=cache, vocab_size=290, block_size=16, held_out=0.2), quiet=True)
"""
TEXTS = [f"Document {i}: é, 漢字.\n" + f"def f_{i}(x):\n    return x + {i}\n" * (5 + i % 7) for i in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(text)
    (folder / "long.txt").write_text("x" * 300)  # no text for a tokenizer: a word that is too long
    return folder


def config(folder: Path, cache: Path) -> LMDataConfig:
    return LMDataConfig(path=str(folder), cache=str(cache), vocab_size=290, block_size=16, held_out=0.2)


def contents(data: LMData) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data.folder.iterdir()}


def kill(folder: Path, cache: Path, calls: int) -> Path:
    """Start a child that is killed; the folder that it left."""
    command = [sys.executable, "-c", KILLED, str(folder), str(cache), str(calls)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    (partial,) = cache.glob("*.partial")
    assert not (cache / partial.stem).exists()
    return partial


def test_a_killed_preparation_goes_on_to_the_byte(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = contents(prepare(config(folder, tmp_path / "straight"), quiet=True))
    assert SUMS in expected
    assert RESUME not in expected
    cache = tmp_path / "cache"
    kept = []
    for calls in (8, 12):  # what the second one does, it does after what the first one has left
        partial = kill(folder, cache, calls)
        assert (partial / RESUME).exists()
        kept.append((partial / "train.bin").stat().st_size)
    assert 0 < kept[0] < kept[1] < len(expected["train.bin"])

    def again(*_: object) -> None:
        raise AssertionError("the tokenizer was trained again")

    monkeypatch.setattr(prepared, "train_on", again)
    capsys.readouterr()
    assert contents(prepare(config(folder, cache))) == expected
    said = capsys.readouterr().err
    assert "text: goes on after " in said
    assert "bytes of train" in said
    assert "the tokenizer was not trained on 1 files with words of more than 256 characters, such as long.txt" in said
    assert not list(cache.glob("*.partial"))


@pytest.mark.parametrize("calls", [0, 1, 34])
def test_killed_before_the_first_note_and_in_the_held_out_part(folder: Path, tmp_path: Path, calls: int) -> None:
    partial = kill(folder, tmp_path / "cache", calls)
    assert (partial / "held_out.bin").exists() == (calls > 31)
    expected = contents(prepare(config(folder, tmp_path / "straight"), quiet=True))
    assert contents(prepare(config(folder, tmp_path / "cache"), quiet=True)) == expected


@pytest.mark.parametrize("name", [RESUME, "train.bin"])
def test_what_the_disk_has_lost_is_made_anew(folder: Path, tmp_path: Path, name: str) -> None:
    partial = kill(folder, tmp_path / "cache", 20)
    (partial / name).write_bytes(b"")
    expected = contents(prepare(config(folder, tmp_path / "straight"), quiet=True))
    assert contents(prepare(config(folder, tmp_path / "cache"), quiet=True)) == expected


def test_an_interrupted_preparation_is_kept_and_a_failed_one_is_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "ENCODE_BYTES", 500)
    monkeypatch.setattr(prepared, "KEPT_BYTES", 1500)
    for error, kept in ((KeyboardInterrupt, True), (RuntimeError, False)):
        calls = []

        def stopped(*_: object, error: type[BaseException] = error, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) > 12:
                raise error

        with monkeypatch.context() as patch:
            patch.setattr(prepared.Progress, "add", stopped)
            with pytest.raises(error):
                prepare(config(folder, tmp_path / "cache"), quiet=True)
        assert bool(list((tmp_path / "cache").glob("*.partial"))) == kept


def test_a_long_text_is_cut_as_it_was_when_it_was_read_whole(tmp_path: Path) -> None:
    lines = "".join(f"line {i} of a long text\n" for i in range(90_000))
    text = lines + "é" * (3 * PASSAGE) + "\n" + lines[: PASSAGE // 2]  # a line of several passages
    (tmp_path / "long.txt").write_text(text)
    settings = LMDataConfig(path=str(tmp_path / "long.txt"), cache=str(tmp_path / "cache"), vocab_size=256)
    data = prepare(settings, quiet=True)
    cuts, start = 0, 0
    while start < len(text):
        start = text.rfind("\n", start, start + PASSAGE) + 1 or start + PASSAGE
        cuts += 1
    assert sum(data.manifest[part]["documents"] for part in ("train", "held_out")) == cuts
    assert sum(data.manifest[part]["bytes"] for part in ("train", "held_out")) == len(text.encode())
