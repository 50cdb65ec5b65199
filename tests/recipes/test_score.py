"""`comera score`: rows of a file get the logits that the trained model gives, each beside its line, or none at all."""

import gzip
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from comera import load_pretrained
from comera.cli.main import main
from comera.fp8 import fp8_
from comera.recipes.dlrm import recipe as dlrm
from comera.recipes.dlrm.criteo import ClickData, CriteoConfig, prepare
from comera.recipes.dlrm.criteo import rows as criteo_files
from comera.recipes.dlrm.criteo.synthetic import ClickLog
from comera.recipes.dlrm.model import DLRMConfig
from comera.trainer.checkpoint import find_checkpoint
from comera.trainer.config import TrainConfig

ROWS, BATCH = 300, 64


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A click log in Criteo's form; the run's dictionaries number the categories of these rows."""
    return ClickLog(3).write(tmp_path_factory.mktemp("log") / "train.txt", ROWS)


@pytest.fixture(scope="module")
def config(log: Path, tmp_path_factory: pytest.TempPathFactory) -> dlrm.DLRMTaskConfig:
    folder = tmp_path_factory.mktemp("dlrm")
    train = TrainConfig(steps=4, batch_size=BATCH, lr=1e-2, progress=False, device="cpu")
    config = dlrm.DLRMTaskConfig(
        out=str(folder / "run"),
        late_targets=(),
        data=CriteoConfig(path=str(log), workers=1, cache=str(folder / "cache")),
        model=DLRMConfig(dim=8, bottom=(16,), top=(16,)),
        compress=dlrm.CompressConfig(ratio=2, min_rows=100),
        train=train,
    )
    dlrm.run(config)
    return config


@pytest.fixture(scope="module")
def run(config: dlrm.DLRMTaskConfig) -> Path:
    return config.folder / "early"


@pytest.fixture(scope="module")
def data(config: dlrm.DLRMTaskConfig) -> ClickData:
    return prepare(config.data, quiet=True)


@pytest.fixture(scope="module")
def score_of(config: dlrm.DLRMTaskConfig, run: Path, data: ClickData) -> Callable[[slice], Tensor]:
    """Logits of prepared rows, as the evaluation of the training computes them."""
    task = dlrm.DLRMTask(config, data)
    model = load_pretrained(task.model, find_checkpoint(run)).eval()

    @torch.no_grad()
    def logits(rows: slice) -> Tensor:
        _, _, scored = task.evaluate(model, data._read(rows))
        return scored[:, 0]

    return logits


def table(path: Path) -> dict[int, tuple[float, float]]:
    """Logit and probability by line."""
    header, *lines = path.read_text().splitlines()
    assert header == "line,logit,probability"
    rows = [line.split(",") for line in lines]
    return {int(line): (float(logit), float(share)) for line, logit, share in rows}


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """What is said when a file is not scored, in one line."""
    assert main(["score", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("comera: ")
    assert said.count("\n") == 1
    return said


def test_logits_are_those_of_the_model_in_training(
    run: Path, log: Path, score_of: Callable[[slice], Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.csv"
    assert main(["score", str(run), str(log), "--out", str(out), "--batch_size", str(BATCH)]) == 0
    shown = capsys.readouterr().out
    assert f"{ROWS} rows scored, " in shown
    assert "log loss" in shown
    assert "bad rows" not in shown
    found = table(out)
    assert list(found) == list(range(1, ROWS + 1))
    scores = np.array(list(found.values()))
    for first in range(0, ROWS, BATCH):
        rows = slice(first, min(first + BATCH, ROWS))
        assert torch.equal(torch.tensor(scores[rows, 0]).float(), score_of(rows))  # to the bit
    np.testing.assert_allclose(scores[:, 1], 1 / (1 + np.exp(-scores[:, 0])), rtol=1e-6)


def test_rows_without_labels_compressed_and_from_a_checkpoint_score_the_same(
    run: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["score", str(run), str(log), "--out", str(tmp_path / "first.csv")])
    capsys.readouterr()
    monkeypatch.setattr(criteo_files, "BLOCK", 20_000)  # several blocks
    bare = b"".join(line.partition(b"\t")[2] for line in log.read_bytes().splitlines(keepends=True))
    (tmp_path / "test.txt.gz").write_bytes(gzip.compress(bare))
    checkpoint, out = find_checkpoint(run), tmp_path / "new" / "second.csv"
    assert main(["score", str(checkpoint), str(tmp_path / "test.txt.gz"), "--out", str(out), "--batch_size", "7"]) == 0
    assert "log loss" not in capsys.readouterr().out
    first, second = (np.array(list(table(path).values())) for path in (tmp_path / "first.csv", out))
    np.testing.assert_allclose(second, first, rtol=1e-5, atol=1e-6)


def test_a_run_in_fp8_scores_in_fp8(config: dlrm.DLRMTaskConfig, data: ClickData, log: Path, tmp_path: Path) -> None:
    config = replace(
        config,
        out=str(tmp_path / "run"),
        model=DLRMConfig(dim=16, bottom=(256, 256), top=(16,)),
        compress=replace(config.compress, mlp_rank=8),
        train=replace(config.train, precision="fp8", fuse=False),
    )
    dlrm.run(config)
    run = config.folder / "early"
    assert main(["score", str(run), str(log), "--out", str(tmp_path / "scores.csv"), "--batch_size", str(BATCH)]) == 0
    task = dlrm.DLRMTask(config, data)
    report = fp8_(load_pretrained(task.model, find_checkpoint(run)).eval())
    assert [row.name for row in report.rows if not row.reason] == ["bottom.2"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, _, scored = task.evaluate(task.model, data._read(slice(0, BATCH)))
    logits = [logit for logit, _ in list(table(tmp_path / "scores.csv").values())[:BATCH]]
    assert torch.equal(torch.tensor(logits), scored[:, 0].float())


def test_a_dense_run_scores_too_and_what_is_not_known_gets_a_score(config: dlrm.DLRMTaskConfig, tmp_path: Path) -> None:
    train = replace(config.train, optimizer="sgd")
    dlrm.run(replace(config, method="dense", train=train, out=str(tmp_path / "run")))
    later = tmp_path / "later.txt"
    later.write_text("\t".join(["1", *["5"] * 13, *["ffffffff"] * 26]) + "\n")
    assert main(["score", str(tmp_path / "run"), str(later), "--out", str(tmp_path / "scores.csv")]) == 0
    assert list(table(tmp_path / "scores.csv")) == [1]


def test_bad_rows_are_skipped_up_to_the_limit_and_then_named(
    run: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = log.read_text().splitlines()
    for place, wrong in ((0, "1\t2"), (99, "\t".join(["7", *lines[99].split("\t")[1:]])), (249, lines[249] + "\tx")):
        lines[place] = wrong
    (tmp_path / "log.txt").write_text("\n".join(lines))
    monkeypatch.setattr(criteo_files, "BLOCK", 20_000)
    out = tmp_path / "scores.csv"
    argv = [str(run), str(tmp_path / "log.txt"), "--out", str(out), "--max_bad_rows"]
    for limit, line, wrong in (("0", 1, "expected 40 fields"), ("1", 100, "as label, got '7'"), ("2", 250, "got 41")):
        said = refused(capsys, [*argv, limit])
        assert f"log.txt, line {line}: " in said
        assert wrong in said
        assert f"max_bad_rows ({limit}) allows" in said
        assert not list(tmp_path.glob("*scores*"))
    assert main(["score", *argv, "3"]) == 0
    assert "297 rows scored, 3 bad rows skipped" in capsys.readouterr().out
    assert sorted({*range(1, ROWS + 1)} - set(table(out))) == [1, 100, 250]


def test_a_gzip_that_is_cut_short_leaves_no_scores(
    run: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.gz").write_bytes(gzip.compress(log.read_bytes())[:-400])
    said = refused(capsys, [str(run), str(tmp_path / "log.gz"), "--out", str(tmp_path / "scores.csv")])
    assert "the compressed file ends here, cut short" in said
    assert "log.gz, line 2" in said
    assert [path.name for path in tmp_path.iterdir()] == ["log.gz"]


def test_other_mistakes_are_one_line(
    run: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dlrm.DLRMTaskConfig
) -> None:
    out = ["--out", str(tmp_path / "scores.csv")]
    assert "nothing.txt, where there is nothing" in refused(capsys, [str(run), str(tmp_path / "nothing.txt"), *out])
    assert "expected a file of rows, got the folder" in refused(capsys, [str(run), str(tmp_path), *out])
    assert "found nothing" in refused(capsys, [str(tmp_path / "nothing"), str(log), *out])
    assert "batch_size must be at least 1" in refused(capsys, [str(run), str(log), *out, "--batch_size", "0"])
    assert "max_bad_rows must be at least 0" in refused(capsys, [str(run), str(log), *out, "--max_bad_rows", "-1"])
    assert main(["score", str(run), str(log), *out]) == 0
    assert "expected a new file" in refused(capsys, [str(run), str(log), *out])
    assert main(["score", str(run), str(log), *out, "--overwrite"]) == 0
    (tmp_path / "taken").write_text("")
    under = ["--out", str(tmp_path / "taken" / "scores.csv")]
    assert "expected a writable file" in refused(capsys, [str(run), str(log), *under])
    moved = shutil.copytree(run, tmp_path / "moved")
    saved = moved / "config.yaml"
    saved.write_text(saved.read_text().replace(str(config.data.cache), str(tmp_path / "empty")))
    assert "expected prepared click data" in refused(capsys, [str(moved), str(log), "--out", str(tmp_path / "b.csv")])


def test_only_scores_are_overwritten(run: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = shutil.copy(log, tmp_path / "rows.txt")
    for taken in (rows, tmp_path):  # the very file that is to be scored, and a folder
        said = refused(capsys, [str(run), str(rows), "--out", str(taken), "--overwrite"])
        assert f"expected scores to overwrite, got {taken} with something else" in said
    assert rows.read_bytes() == log.read_bytes()
    out = tmp_path / "scores.csv"
    assert main(["score", str(run), str(rows), "--out", str(out)]) == 0
    scores = out.read_text()
    rows.write_bytes(log.read_bytes() + b"1\t2\n")
    assert "line 301: expected 40 fields" in refused(capsys, [str(run), str(rows), "--out", str(out), "--overwrite"])
    assert out.read_text() == scores
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.txt", "scores.csv"]


def test_hashed_categories_need_no_prepared_data(
    config: dlrm.DLRMTaskConfig, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    hashing = replace(config.data, table_sizes=(500, *(5,) * 25), cache=str(cache))
    hashed = replace(config, data=hashing, out=str(tmp_path / "run"))
    dlrm.run(hashed)
    argv = [str(tmp_path / "run" / "early"), str(log), "--batch_size", str(BATCH), "--out"]
    shutil.rmtree(cache)
    assert main(["score", *argv, str(tmp_path / "scores.csv")]) == 0
    assert f"{ROWS} rows scored" in capsys.readouterr().out
    task = dlrm.DLRMTask(hashed, prepare(hashing, quiet=True))
    model = load_pretrained(task.model, find_checkpoint(tmp_path / "run" / "early")).eval()
    batch = task.data._read(slice(0, BATCH))
    with torch.no_grad():
        logits = model(batch.dense, batch.ids)
    found = list(table(tmp_path / "scores.csv").values())[:BATCH]
    assert torch.equal(torch.tensor([logit for logit, _ in found]), logits)  # to the bit


def test_a_run_of_another_recipe_is_refused(
    run: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from comera.recipes import trained

    opened = trained.open_trained
    monkeypatch.setattr(trained, "open_trained", lambda *a: replace(opened(*a), recipe="mnli"))
    out = tmp_path / "scores.csv"
    said = refused(capsys, [str(run), str(log), "--out", str(out)])
    assert "expected a run of dlrm, whose input is a file of rows, got one of mnli" in said
    assert "`comera export`" in said
    assert not out.exists()
