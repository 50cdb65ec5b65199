"""Runs on data of one's own, by the command line: clicks and pairs in tables, trackers, exports and scores."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from comera.cli.main import main

from ..helpers.mnli_rows import write_vocabulary
from ..helpers.run_folders import records

FAST = ("--train.steps", "2", "--train.progress", "false", "--train.device", "cpu", "--late_targets", "[]")
COLUMNS = ("--data.label", "clicked", "--data.numbers", "[age, price]", "--data.categories", "[city, site]")


def write_clicks(file: Path, rows: int = 200, *, order: str = "price,city,clicked,site,age") -> Path:
    lines = [order]
    for k in range(rows):
        values = {"price": k / 4, "city": f"town {k % 40}", "clicked": k % 2, "site": f"s{k % 300}", "age": k}
        lines.append(",".join(str(values[name]) for name in order.split(",")))
    file.write_text("\n".join(lines) + "\n")
    return file


def test_clicks_in_a_table_are_trained_on_and_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, run = write_clicks(tmp_path / "rows.csv"), tmp_path / "run"
    options = ("--compress.ratio", "1.5", "--compress.min_rows", "30", *COLUMNS, *FAST)
    sizes = ("--model.dim", "8", "--model.bottom", "[16]", "--model.top", "[16]", "--data.cache", str(tmp_path / "c"))
    assert main(["train", "dlrm", "--data.path", str(rows), "--out", str(run), *options, *sizes]) == 0
    assert {"auc"} <= {name for record in records(run / "early") for name in record.get("metrics", ())}
    other = write_clicks(tmp_path / "new.csv", 30, order="age,site,city,price")  # without labels, in another order
    capsys.readouterr()
    for file, name in ((rows, "one"), (other, "two")):
        assert main(["score", str(run / "early"), str(file), "--out", str(tmp_path / name)]) == 0
    assert "200 rows scored" in capsys.readouterr().out
    one, two = ((tmp_path / name).read_text().splitlines() for name in ("one", "two"))
    assert [line.split(",")[0] for line in one] == ["line", *map(str, range(2, 202))]
    first = [[float(value) for value in line.split(",")] for line in one[1:31]]
    assert [pytest.approx(row, abs=1e-6) for row in first] == [[float(v) for v in line.split(",")] for line in two[1:]]
    (tmp_path / "bad.csv").write_text("age,site\n1,2\n")
    assert main(["score", str(run / "early"), str(tmp_path / "bad.csv"), "--out", str(tmp_path / "three")]) == 2
    assert "expected the columns 'price', 'city', got 'age', 'site'" in capsys.readouterr().err
    for target in ("program", "onnx"):
        assert main(["export", str(run / "early"), "--to", target, "--out", str(tmp_path / target)]) == 0


def test_pairs_in_a_table_are_trained_on_and_exported_with_their_labels(tmp_path: Path) -> None:
    vocab = write_vocabulary(tmp_path / "vocab.txt")
    words = ["".join("abcdefgh"[int(digit)] for digit in f"{k:o}") for k in range(200)]
    lines = [
        "question,answer,good",
        *(f"a {w},{w} he,{('no', 'yes', 'maybe', 'never')[k % 4]}" for k, w in enumerate(words)),
    ]
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    fields = ("--data.premise_field", "question", "--data.hypothesis_field", "answer", "--data.label_field", "good")
    data = ("--data.path", str(tmp_path / "pairs.csv"), "--data.vocab", str(vocab), "--data.cache", str(tmp_path / "c"))
    sizes = ("--model.hidden", "32", "--model.layers", "1", "--model.heads", "2", "--model.ffn", "64")
    ranks = ("--compress.rank", "4", "--compress.embedding_rank", "4")
    run, out = tmp_path / "run", tmp_path / "dense"
    assert main(["train", "mnli", "--out", str(run), *data, *fields, *sizes, *ranks, *FAST]) == 0
    assert main(["export", str(run / "early"), "--to", "safetensors", "--dense", "--out", str(out)]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.id2label == {0: "maybe", 1: "never", 2: "no", 3: "yes"}
    ids = AutoTokenizer.from_pretrained(out)("a bed", "the cafe", return_tensors="pt")
    assert model(**ids).logits.shape == (1, 4)
    assert json.loads((run / "early" / "tokenizer_config.json").read_text())["model_max_length"] == 128
