"""`comera predict`: each row of a file that can be read gets the answer of the trained model, or the reason is said."""

import csv
import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from comera.cli.main import main
from comera.cli.options import saved_config
from comera.errors import ConfigError
from comera.recipes.classify import recipe as classify
from comera.recipes.classify.predict import predict
from comera.recipes.trained import open_trained
from comera.trainer.checkpoint import checkpoints, find_checkpoint

from ..helpers.mnli_rows import DEV, TRAIN, write_jsonl
from ..helpers.review_rows import reviews, write_csv
from ..helpers.tiny_classifier import steps, tiny_config

ROWS = reviews(50, seed=7)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classify")
    config = steps(tiny_config(folder, folder / "run"), 40, eval_every=10, save_every=10)
    classify.run(config)
    return config.folder / "early"


def predicted(capfd: pytest.CaptureFixture[str], *argv: object) -> tuple[list[dict[str, Any]], str]:
    capfd.readouterr()
    assert main(["predict", *map(str, argv)]) == 0
    said = capfd.readouterr()
    return [json.loads(line) for line in said.out.splitlines()], said.err


def refused(capfd: pytest.CaptureFixture[str], *argv: object) -> str:
    capfd.readouterr()
    assert main(["predict", *map(str, argv)]) == 2
    said = capfd.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    return said.err


def test_answers_are_those_of_the_exported_model(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_csv(tmp_path / "new.csv", ROWS)
    found, said = predicted(capfd, run, file, "--batch_size", 8)
    best = find_checkpoint(run, "best")
    assert main(["export", str(best), "--to", "safetensors", "--dense", "--out", str(tmp_path / "dense")]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "dense").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dense")
    right = 0
    for k, ((text, label), row) in enumerate(zip(ROWS, found, strict=True)):
        with torch.no_grad():
            shares = model(**tokenizer(text, truncation=True, max_length=24, return_tensors="pt")).logits.softmax(-1)[0]
        names = [model.config.id2label[n] for n in range(2)]
        assert row["line"] == k + 2
        assert row["label"] == names[int(shares.argmax())]
        assert row["probabilities"] == pytest.approx(dict(zip(names, shares.tolist(), strict=True)), abs=1e-5)
        right += row["label"] == label
    assert f"50 rows predicted by {best}; accuracy {right / 50:.4f} on the 50 with a label" in said


def test_every_form_of_file_gives_the_same(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = [row["label"] for row in predicted(capfd, run, write_csv(tmp_path / "a.csv", ROWS))[0]]
    texts = [text for text, _ in ROWS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"sentence": text}) + "\n" for text in texts))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "a.tsv").write_text("\n".join(["id\tsentence", *(f"{k}\t{text}" for k, text in enumerate(texts))]))
    pyarrow.parquet.write_table(pa.table({"sentence": texts}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.jsonl.gz", "a.tsv", "a.parquet"):
        found, said = predicted(capfd, run, tmp_path / name)
        assert [row["label"] for row in found] == expected
        assert "accuracy" not in said
    assert [row["line"] for row in found] == list(range(1, 51))
    renamed = write_csv(tmp_path / "b.csv", [(1, *row) for row in ROWS], ("number", "remark", "mood"))
    found, said = predicted(capfd, run, renamed, "--text", "remark", "--label", "mood")
    assert [row["label"] for row in found] == expected
    assert "on the 50 with a label" in said


def test_the_columns_of_training_are_read_and_a_guess_is_said(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = [row["label"] for row in predicted(capfd, run, write_csv(tmp_path / "a.csv", ROWS))[0]]
    both = write_csv(tmp_path / "b.csv", [("nothing", text) for text, _ in ROWS], ("text", "sentence"))
    found, said = predicted(capfd, run, both)
    assert [row["label"] for row in found] == expected  # "text" is the more usual name
    assert "a guess" not in said
    said = predicted(capfd, run, write_csv(tmp_path / "c.csv", [(text, 1) for text, _ in ROWS], ("review", "n")))[1]
    assert "read 'review' as the text, a guess: name the column with --text" in said


def test_an_unnamed_column_is_no_label(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [(label, text) for text, label in ROWS]
    file = write_csv(tmp_path / "a.csv", rows, ("", "sentence"))
    assert "accuracy" not in predicted(capfd, run, file)[1]
    assert "on the 50 with a label" in predicted(capfd, run, file, "--label", "")[1]  # unless it is named


def test_pipes_and_folders_are_not_overwritten(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, pipe = write_csv(tmp_path / "new.csv", ROWS), tmp_path / "pipe"
    os.mkfifo(pipe)
    for out in (pipe, tmp_path):
        said = refused(capfd, run, file, "--out", out, "--overwrite")
        assert f"expected a regular file or a new one, got {out}" in said
    assert pipe.is_fifo()


def test_a_table_is_written_at_once(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, out = write_csv(tmp_path / "new.csv", ROWS), tmp_path / "folder" / "out.csv"
    expected, _ = predicted(capfd, run, file)
    assert predicted(capfd, run, file, "--out", out)[0] == []
    with open(out, newline="") as table:
        rows = list(csv.DictReader(table))
    assert [(int(row["line"]), row["label"]) for row in rows] == [(row["line"], row["label"]) for row in expected]
    assert [float(row["probability_positive"]) for row in rows] == [r["probabilities"]["positive"] for r in expected]
    assert "expected a new file" in refused(capfd, run, file, "--out", out)
    assert "expected a new file" in refused(capfd, run, file, "--out", file, "--overwrite")
    before = out.read_text()
    (tmp_path / "empty.csv").write_text("sentence\n,\n")
    assert "can be read" in refused(capfd, run, tmp_path / "empty.csv", "--out", out, "--overwrite")
    assert "which is no file" in refused(capfd, run, tmp_path / "missing.csv", "--out", out, "--overwrite")
    assert [each.name for each in out.parent.iterdir()] == [out.name]  # nothing is left of it
    assert out.read_text() == before
    predicted(capfd, run, file, "--out", out, "--overwrite", "--to", "jsonl")
    assert [json.loads(line) for line in out.read_text().splitlines()] == expected


def test_rows_that_cannot_be_read_are_counted(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [
        '{"sentence": "a good plot", "label": "positive"}',
        "{",
        '{"sentence": 3}',
        '{"sentence": "  "}',
        '{"label": "positive"}',
        '{"sentence": "a bad plot", "label": "neither"}',
        '{"sentence": "a bad ending", "label": null}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found, said = predicted(capfd, run, tmp_path / "a.jsonl", "--batch_size", 2)
    assert [row["line"] for row in found] == [1, 6, 7]
    assert "3 rows predicted" in said
    assert "on the 1 with a label" in said
    assert "skipped 2 rows: unreadable row (the first: " in said
    assert "skipped 2 rows: empty text" in said
    assert "not in the accuracy: 1 rows: a label that the run does not have" in said
    assert "line 6: 'neither'" in said


def test_memory_is_that_of_a_batch(run: Path, tmp_path: Path) -> None:
    """Output comes before the rest of the file is read."""
    (tmp_path / "a.jsonl").write_text('{"sentence": "a good plot"}\n' * 1200 + "\xff")
    lines = (tmp_path / "a.jsonl").read_bytes().replace("\xff".encode(), b"\xff")
    (tmp_path / "a.jsonl").write_bytes(lines)  # ends in what is no text, an error of the file
    shown: list[str] = []
    with pytest.raises(Exception, match="line 1201: expected UTF-8"):
        predict(open_trained(run, saved_config), tmp_path / "a.jsonl", shown.append, batch_size=100)
    assert sum(part.count("\n") for part in shown) == 1200


def test_mistakes_are_one_line(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_csv(tmp_path / "new.csv", ROWS, ("remark", "mood"))
    assert "one column that is likely to hold the text, got remark, mood: set --text" in refused(capfd, run, file)
    said = refused(capfd, run, file, "--text", "review")
    assert "expected the columns review, got remark, mood: name those of this file with --text" in said
    said = refused(capfd, run, file, "--text", "remark", "--label", "label")
    assert "expected the columns label" in said
    assert "which is no file" in refused(capfd, run, tmp_path / "none.csv")
    assert "which is another file" in refused(capfd, run, run / "config.yaml")
    (tmp_path / "a.parquet").write_text("no table")
    assert "cannot be read as Parquet" in refused(capfd, run, tmp_path / "a.parquet")
    assert "batch_size must be at least 1" in refused(capfd, run, file, "--text", "remark", "--batch_size", 0)
    assert "found another folder" in refused(capfd, tmp_path, file)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "tokenizer.json").unlink()
    assert "expected the run's tokenizer" in refused(capfd, copy, file, "--text", "remark")
    for each in checkpoints(copy):
        shutil.rmtree(each)
    assert "found none" in refused(capfd, copy, file)


def test_a_run_of_another_recipe_is_refused(run: Path, tmp_path: Path) -> None:
    trained = open_trained(run, saved_config)
    object.__setattr__(trained, "recipe", "dlrm")
    with pytest.raises(ConfigError, match=r"expected a run of classify or mnli, .* got one of dlrm.*`comera score`"):
        predict(trained, write_csv(tmp_path / "new.csv", ROWS), print)


def test_pairs_of_mnli(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_jsonl(tmp_path / "mnli", TRAIN * 8, DEV * 4)
    options = {
        "data.path": folder,
        "data.cache": tmp_path / "cache",
        "data.max_length": 24,
        "out": tmp_path / "run",
        "late_targets": [],
        "model.hidden": 32,
        "model.layers": 1,
        "model.heads": 2,
        "model.ffn": 64,
        "compress.rank": 4,
        "compress.embedding_rank": 4,
        "train.steps": 2,
        "train.batch_size": 4,
        "train.eval_every": 2,
        "train.progress": "false",
        "train.device": "cpu",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["train", "mnli", *words]) == 0
    found, said = predicted(capfd, tmp_path / "run", folder / "dev_matched.jsonl")
    assert len(found) == 8
    assert found[0]["probabilities"].keys() == {"entailment", "neutral", "contradiction"}
    assert "on the 8 with a label" in said
    rows = [f"{k}\t{first}\t{second}\t-" for k, (first, second, _) in enumerate(DEV)]
    (tmp_path / "dev_matched.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tgold_label", *rows]))
    again, said = predicted(capfd, tmp_path / "run", tmp_path / "dev_matched.tsv")  # the columns of GLUE
    assert [row["label"] for row in again] == [row["label"] for row in found[:2]]
    assert "accuracy" not in said
