"""Own data: texts, code and pairs in JSON lines, CSV, TSV and data sets give what the same text in files gives."""

import csv
import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comera.errors import DataError
from comera.recipes.classify import data as classify
from comera.recipes.classify.data import MNLI, PreparedExamples
from comera.recipes.code_lm import data as code
from comera.recipes.data.documents import TextReader, open_corpus
from comera.recipes.data.tables import read_rows
from comera.recipes.dlrm import criteo
from comera.recipes.lm import data as lm

from ...helpers.data_sets import data_set, put_on_hub, save
from ...helpers.mnli_rows import ids_of, write_vocabulary

TEXTS = [f'def f_{i}(x):\n    return "a, b", x + {i}\n' for i in range(60)]
Write = Callable[[Path, Sequence[dict[str, Any]]], Path]


def write_csv(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    with open(folder / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder / "rows.csv"


def write_packed_csv(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    plain = write_csv(folder, rows).read_bytes()
    (folder / "rows.csv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + plain))
    return folder / "rows.csv.gz"


def write_jsonl(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return folder / "rows.jsonl"


def write_tsv(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    lines = ["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)]
    (folder / "rows.tsv").write_text("\r\n".join(lines) + "\r\n", newline="")
    return folder / "rows.tsv"


FILES = pytest.mark.parametrize("write", [write_csv, write_packed_csv, write_jsonl])


@FILES
def test_rows_are_read_with_their_lines(write: Write, tmp_path: Path) -> None:
    rows = [{"id": str(i), "text": text} for i, text in enumerate(TEXTS)]
    read = list(read_rows(write(tmp_path, rows)))
    assert [dict(row.values) for row in read] == rows
    assert [row.line for row in read] == sorted({row.line for row in read})


def test_fields_between_tabs_keep_their_quotes_and_commas(tmp_path: Path) -> None:
    rows = [{"a": '"x', "b": 'y, "z'}, {"a": "'", "b": "\u2028"}]
    assert [dict(row.values) for row in read_rows(write_tsv(tmp_path, rows))] == rows


def read_table(recipe: str, file: Path, tmp_path: Path, **fields: Any) -> Any:
    """What the recipe prepares of a table with the columns text, other and label."""
    fields = {"path": str(file), "cache": str(tmp_path / "cache"), **fields}
    if recipe == "lm":
        return lm.prepare(lm.LMDataConfig(**fields, vocab_size=256, block_size=16), quiet=True)
    if recipe == "classify":
        return classify.prepare(classify.ClassifyDataConfig(**fields, vocab_size=300), quiet=True)
    if recipe == "mnli":
        fields |= {"text": "text", "pair": "other"}
        vocab = write_vocabulary(tmp_path / "words" / "vocab.txt")
        return classify.prepare(replace(MNLI, **fields, tokenizer=str(vocab)), quiet=True)
    if recipe == "dlrm":
        return criteo.prepare(criteo.CriteoConfig(**fields, numbers=("other",), categories=("text",)), quiet=True)
    named = {"code_field": "text"} if recipe == "functions" else {"block_size": 16}
    return code.prepare(code.CodeDataConfig(**fields, **named, form=recipe), quiet=True)


RECIPES = pytest.mark.parametrize("recipe", ["lm", "files", "functions", "classify", "mnli", "dlrm"])


@RECIPES
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz"])
def test_a_column_that_is_named_twice_is_refused(recipe: str, suffix: str, tmp_path: Path) -> None:
    between = "\t" if suffix == ".tsv" else ","
    rows = [("text", "other", "label", "label"), *((f"def f{k}", k, k % 2, k % 3) for k in range(60))]
    content = "".join(between.join(map(str, row)) + "\n" for row in rows).encode()
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    with pytest.raises(DataError, match=rf"rows\{suffix}: expected columns of different names, got 'label' 2 times"):
        read_table(recipe, file, tmp_path)


@pytest.mark.parametrize("recipe", ["lm", "files", "functions", "classify", "mnli"])
def test_a_field_that_is_named_twice_in_a_line_is_refused_with_the_line(recipe: str, tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"def f{k}", "other": "a", "label": k % 2}) for k in range(60)]
    rows[3] = '{"text": "def a", "other": "a", "text": "def b", "label": 1}'
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    said = "line 4: expected fields of different names, got 'text' 2 times"
    if recipe == "classify":  # where a row that cannot be used is counted
        data = read_table(recipe, tmp_path / "rows.jsonl", tmp_path)
        assert data.skipped == {"unreadable row": 1}
        assert said in data.manifest["train"]["first"]["unreadable row"]
    else:
        with pytest.raises(DataError, match=said):
            read_table(recipe, tmp_path / "rows.jsonl", tmp_path)


@RECIPES
def test_columns_without_a_name_may_be_several(recipe: str, tmp_path: Path) -> None:
    """A spreadsheet writes them for cells that are empty or were once filled."""
    rows = ["text,other,label,,", *(f"def a{k}(x): pass,{k},{k % 2},," for k in range(200))]
    if recipe == "functions":
        rows = [rows[0], *(f'"def a{k}(x):\n  y = x\n  return y",{k},{k % 2},,' for k in range(200))]
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    assert read_table(recipe, tmp_path / "rows.csv", tmp_path)


@pytest.mark.parametrize("recipe", ["classify", "mnli"])
@pytest.mark.parametrize("named", [True, False])
def test_first_rows_without_a_label_are_counted_as_others_are(recipe: str, named: bool, tmp_path: Path) -> None:
    rows = [{"text": f"a bed {k}", "other": "a cab"} for k in range(3)]
    rows += [{"text": f"a cab {k}", "other": f"he had {k}", "label": str(k % 2)} for k in range(300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"text": "text", "label": "label"} if named and recipe == "classify" else {}
    data = read_table(recipe, tmp_path / "rows.jsonl", tmp_path, **columns)
    assert data.skipped["no label"] == 3
    assert data.train_size + data.dev_size == 300
    assert data.label_names == ("0", "1")


def test_a_column_that_no_row_has_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "a {k}", "label": {k % 2}}}\n' for k in range(300)))
    with pytest.raises(DataError, match=r"data\.label: expected one of the columns text, label of .*, got 'kind'"):
        read_table("classify", tmp_path / "rows.jsonl", tmp_path, label="kind")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", r"a\.csv: expected a header with the names of the columns, got an empty file"),
        ("a.csv", "x,y\n1,2\n3\n", r"a\.csv, line 3: expected 2 fields as in the header, got 1"),
        ("a.csv", 'x,y\n1,"2\n', r"a\.csv, line 2: expected fields between commas, got a row that cannot be read"),
        ("a.tsv", "x\ty\n1\t2\t3\n", r"a\.tsv, line 2: expected 2 fields as in the header, got 3"),
        ("a.jsonl", '{"x": 1}\n{"x"', r"a\.jsonl, line 2: expected JSON, got '\{\"x\"'"),
        ("a.jsonl", "[1]\n", r"a\.jsonl, line 1: expected a JSON object"),
    ],
)
def test_bad_rows_name_their_line(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(tmp_path / name))


def test_bytes_that_are_no_text_and_cut_archives_name_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"x\n\xff\n")
    with pytest.raises(DataError, match=r"a\.csv, line 2: expected UTF-8"):
        list(read_rows(tmp_path / "a.csv"))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"x\n" + b"abc\n" * 999)[:-20])
    with pytest.raises(DataError, match=r"a\.csv\.gz, line \d+: cannot be read"):
        list(read_rows(tmp_path / "a.csv.gz"))


def documents(path: Path, field: str = "text") -> tuple[list[str], Counter[str]]:
    skipped: Counter[str] = Counter()
    corpus = open_corpus(path, "data.path", (".csv",), TextReader(field), None)
    return [document.text for document in corpus.read(skipped)], skipped


@FILES
def test_texts_in_rows_are_documents_and_empty_ones_are_counted(write: Write, tmp_path: Path) -> None:
    file = write(tmp_path, [{"id": 1, "text": text} for text in (TEXTS[0], "", "x" * 200_000, "")])
    assert documents(file) == ([TEXTS[0], "x" * 200_000], Counter({"rows empty": 2}))
    with pytest.raises(DataError, match=r"field 'body', got one with 'id', 'text': set data\.text_field"):
        documents(file, "body")


def test_tables_in_a_folder_are_read_where_their_suffix_is_asked_for(tmp_path: Path) -> None:
    write_csv(tmp_path, [{"text": text} for text in TEXTS])
    assert documents(tmp_path)[0] == TEXTS
    (tmp_path / "a.txt").write_text("text")
    config = lm.LMDataConfig(path=str(tmp_path), cache=str(tmp_path / "cache"), held_out_path=str(tmp_path / "a.txt"))
    with pytest.raises(DataError, match="more than one block"):
        lm.prepare(config, quiet=True)  # without the table


@FILES
def test_a_language_model_reads_rows(write: Write, tmp_path: Path) -> None:
    file = write(tmp_path, [{"body": text} for text in TEXTS])
    fields = {"text_field": "body", "vocab_size": 256, "block_size": 16, "cache": str(tmp_path / "cache")}
    data = lm.prepare(lm.LMDataConfig(path=str(file), **fields), quiet=True)
    assert sum(data.manifest[part]["documents"] for part in ("train", "held_out")) == 60
    assert sum(data.manifest[part]["bytes"] for part in ("train", "held_out")) == sum(map(len, TEXTS))


@pytest.mark.parametrize("name", ["rows.JSONL", "rows.ndjson", "rows.Ndjson.GZ"])
def test_rows_are_known_by_any_spelling_of_their_suffix(name: str, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path, [{"text": text} for text in TEXTS])
    if name.endswith("GZ"):
        file.write_bytes(gzip.compress(file.read_bytes()))
    data = read_table("lm", file.rename(tmp_path / name), tmp_path)
    assert sum(data.manifest[part]["bytes"] for part in ("train", "held_out")) == sum(map(len, TEXTS))


def test_a_single_json_value_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    with pytest.raises(DataError, match=r"rows\.json, a single JSON value: write an object a line into a \.jsonl file"):
        read_table("lm", tmp_path / "rows.json", tmp_path)


def test_a_file_that_becomes_one_of_rows_is_read_as_such(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path, [{"text": text} for text in TEXTS]).rename(tmp_path / "rows.txt")
    apart = tmp_path / "apart.txt"
    apart.write_text(TEXTS[0] * 9)
    fields = {"vocab_size": 256, "block_size": 16, "cache": str(tmp_path / "cache"), "held_out_path": str(apart)}
    for name, size in (("rows.txt", file.stat().st_size), ("rows.jsonl", sum(map(len, TEXTS)))):
        file = file.rename(tmp_path / name)
        data = lm.prepare(lm.LMDataConfig(path=str(file), **fields), quiet=True)
        assert data.manifest["train"]["bytes"] == size


@FILES
def test_code_lm_reads_rows(write: Write, tmp_path: Path) -> None:
    file = write(tmp_path, [{"content": text} for text in [*TEXTS, ""]])
    config = code.CodeDataConfig(
        path=str(file), text_field="content", vocab_size=300, block_size=16, held_out=0.2, cache=str(tmp_path / "cache")
    )
    data = code.prepare(config, quiet=True)
    assert data.manifest["train"]["files"] + data.manifest["held_out"]["files"] == 60
    assert data.manifest["skipped"] == {"no_file": 0, "unreadable": 0, "not_utf8": 0, "empty": 0, "repeated": 0,
                                        "rows empty": 1}  # fmt: skip
    pieces = data.tokenizer.decode(np.array(data.train).reshape(-1).tolist(), skip_special_tokens=False)
    assert set(pieces.removeprefix("<s>").split("</s><s>")[:-1]) <= set(TEXTS)
    assert code.prepare(config, quiet=True).folder == data.folder


def test_code_lm_reads_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = data_set({"code": TEXTS})
    save(tmp_path / "saved", rows)
    put_on_hub(monkeypatch, {"train": rows})
    config = {"text_field": "code", "vocab_size": 300, "block_size": 16, "cache": str(tmp_path / "cache")}
    saved = code.prepare(code.CodeDataConfig(path=str(tmp_path / "saved"), **config), quiet=True)
    hub = code.prepare(code.CodeDataConfig(path="someone/code", **config), quiet=True)
    np.testing.assert_array_equal(saved.train, hub.train)
    put_on_hub(monkeypatch, ConnectionError("no route"))
    with pytest.raises(DataError, match=r"got someone/code, which could not be loaded \(ConnectionError: no route\)"):
        code.prepare(code.CodeDataConfig(path="someone/code", **config), quiet=True)


WORDS = ["".join("abcdefgh"[int(digit)] for digit in f"{i:o}") for i in range(90)]
PAIRS = [{"first": f"a {w}", "second": f"{w} he", "answer": ("yes", "no")[i % 3 > 0]} for i, w in enumerate(WORDS)]


def pairs(path: Path, tmp_path: Path, **fields: Any) -> PreparedExamples:
    named = {"text": "first", "pair": "second", "label": "answer", "held_out": 0.2}
    vocab = str(write_vocabulary(tmp_path / "words" / "vocab.txt"))
    config = replace(MNLI, path=str(path), tokenizer=vocab, cache=str(tmp_path / "cache"), **(named | fields))
    return classify.prepare(config, quiet=True)


@pytest.mark.parametrize("write", [write_csv, write_packed_csv, write_tsv, write_jsonl])
def test_pairs_with_labels_of_their_own(write: Write, tmp_path: Path) -> None:
    data = pairs(write(tmp_path, [*PAIRS, {"first": "a", "second": "b", "answer": ""}]), tmp_path)
    assert data.label_names == ("no", "yes")
    assert data.train_size + data.dev_size == 90
    assert 5 < data.dev_size < 40
    assert data.skipped["no label"] == 1
    assert {n: sum(counts[n] for counts in data.label_counts.values()) for n in ("no", "yes")} == {"no": 60, "yes": 30}
    rows = {tuple(ids) for ids in ids_of(data.train)}
    assert rows.isdisjoint(tuple(ids) for ids in ids_of(data.dev))


def test_held_out_pairs_in_a_file_of_their_own_and_numbers_as_labels(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    train = write_csv(tmp_path, [row | {"answer": k % 11} for k, row in enumerate(PAIRS)])
    dev = write_jsonl(tmp_path / "dev", [row | {"answer": 10} for row in PAIRS[:5]])
    data = pairs(train, tmp_path, valid=str(dev))
    assert (data.train_size, data.dev_size) == (90, 5)
    assert data.label_names == tuple(map(str, range(11)))
    assert data.label_counts["dev"]["10"] == 5
    other = write_jsonl(tmp_path / "dev", [PAIRS[0] | {"answer": "maybe"}])
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: expected as label 0 \(0\), .* got 'maybe'"):
        pairs(train, tmp_path, valid=str(other))


def test_held_out_and_test_pairs_of_the_same_file_are_different_data(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    train, other = write_csv(tmp_path, PAIRS), write_jsonl(tmp_path / "other", PAIRS[:5])
    held_out, tested = (pairs(train, tmp_path, **{part: str(other)}) for part in ("valid", "test"))
    assert (held_out.train_size, held_out.dev_size, held_out.test) == (90, 5, None)
    assert tested.test is not None
    assert (tested.train_size + tested.dev_size, len(tested.test)) == (90, 5)


def test_mnlis_labels_keep_their_numbers(tmp_path: Path) -> None:
    file = write_csv(tmp_path, [row | {"answer": ("neutral", "entailment")[k % 2]} for k, row in enumerate(PAIRS)])
    assert pairs(file, tmp_path).label_names == ("entailment", "neutral", "contradiction")


def test_a_data_set_of_one_split_and_other_labels_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {name: [row[name] for row in PAIRS] for name in PAIRS[0]}
    columns["answer"] = [int(answer == "yes") for answer in columns["answer"]]
    put_on_hub(monkeypatch, {"train": data_set(columns, answer=["no", "yes"])})
    data = pairs(Path("someone/pairs"), tmp_path)
    assert data.label_names == ("no", "yes")
    read = pairs(write_csv(tmp_path, PAIRS), tmp_path)
    for ours, theirs in ((data.train, read.train), (data.dev, read.dev)):
        assert ids_of(ours) == ids_of(theirs)
        np.testing.assert_array_equal(ours.labels, theirs.labels)
    with pytest.raises(DataError, match=r"expected the columns first, b, answer, got first, second, answer: set data"):
        pairs(Path("someone/pairs"), tmp_path, pair="b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "label"}, r"line 2: expected the fields .* label, got first, second, answer: set"),
        ({"valid": "nowhere.csv"}, r"expected a file of rows .*, got .*nowhere\.csv, which is no file"),
        ({"held_out": 1e-9}, r"\(the 1e-09 of it that is held out\): expected labeled .* and data\.held_out"),
        ({"label": "first"}, r"such as '.*': is data\.label the column of the labels\?"),
    ],
)
def test_pairs_that_cannot_be_read_are_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    many = [row | {"first": f"a{k}"} for k, row in enumerate(PAIRS * 2)]
    with pytest.raises(DataError, match=message) as raised:
        pairs(write_csv(tmp_path, many), tmp_path, **change)
    assert "\n" not in str(raised.value)


def test_one_label_alone_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected two labels or more, got yes alone: check data"):
        pairs(write_csv(tmp_path, [row | {"answer": "yes"} for row in PAIRS]), tmp_path)
    (tmp_path / "pairs.xlsx").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"expected a file of rows \(\.jsonl .*, got .*xlsx, which is another file"):
        pairs(tmp_path / "pairs.xlsx", tmp_path)


OFFLINE = """
import sys
from pathlib import Path
sys.addaudithook(lambda event, args: event.startswith("socket.") and sys.exit(f"network: {event} {args}"))
from comera.recipes.classify.data import ClassifyDataConfig
from comera.recipes.classify.data import prepare as classify
from comera.recipes.lm.data import LMDataConfig
from comera.recipes.lm.data import prepare as lm

folder = Path(sys.argv[1])
lm(LMDataConfig(path=str(folder / "rows.csv"), vocab_size=256, block_size=16, cache=str(folder / "cache")))
classify(ClassifyDataConfig(path=str(folder / "rows.csv"), vocab_size=300, cache=str(folder / "cache")))
"""


def test_local_files_are_read_without_the_network_and_leave_nothing_at_home(tmp_path: Path) -> None:
    write_csv(tmp_path, [{"text": text, "label": k % 2} for k, text in enumerate(TEXTS)])
    (tmp_path / "home").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    away = kept | {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", OFFLINE, str(tmp_path)], env=away, check=True, capture_output=True)
    assert list((tmp_path / "home").rglob("*")) == []
    assert {path.name for path in tmp_path.iterdir()} == {"rows.csv", "home", "cache"}


OPENED: list[Any] = []  # an audit hook stays until the process ends
sys.addaudithook(
    lambda event, args: event == "open" and str(args[0]).endswith("rows.csv") and OPENED.append(str(args[0]))
)


@pytest.mark.parametrize("recipe", ["lm", "files", "functions", "classify", "mnli"])
def test_what_is_prepared_is_read_twice_at_most(recipe: str, tmp_path: Path) -> None:
    code = '"def f{0}(a):\n  b = a + {0}\n  return b"'
    rows = ["text,other,label", *(f"{code.format(k)},he had {k},{k % 2}" for k in range(200))]
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    for most in (2, 1):  # the second time the prepared data is opened
        OPENED.clear()
        assert read_table(recipe, tmp_path / "rows.csv", tmp_path, **FIELDS.get(recipe, {}))
        assert 1 <= list(map(str, OPENED)).count(str(tmp_path / "rows.csv")) <= most


FIELDS: dict[str, dict[str, Any]] = {"classify": {"text": "text", "label": "label"}}
