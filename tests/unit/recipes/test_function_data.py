"""Functions → sequences → masked, padded batches: what is read, what is cut, and that all of it repeats exactly."""

import ast
import json
import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comera.errors import ConfigError, DataError
from comera.recipes.code_lm import data as function_data
from comera.recipes.code_lm.data import (
    BUCKETS,
    IGNORED,
    PAIR,
    CodeDataConfig,
    FunctionData,
    FunctionReader,
    PaddedBatch,
    prepare,
)
from comera.recipes.code_lm.functions import Example, functions_of, mined, split_row
from comera.recipes.code_lm.masking import Special
from comera.recipes.data.documents import Document

from ...helpers.data_sets import data_set, save
from ...helpers.function_files import function, write_modules, write_roberta, write_rows

SUFFIXES = (".py", ".jsonl", ".jsonl.gz")
WIDTH = 48


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> CodeDataConfig:
    folder = tmp_path_factory.mktemp("functions")
    return CodeDataConfig(
        form="functions",
        path=str(write_modules(folder / "src")),
        suffixes=SUFFIXES,
        vocab_size=300,
        block_size=WIDTH,
        held_out=0.25,
        cache=str(folder / "cache"),
    )


@pytest.fixture(scope="module")
def data(config: CodeDataConfig) -> FunctionData:
    return prepare(config, quiet=True)


def in_rows(tmp_path: Path, rows: Any, name: str = "rows.jsonl", **fields: Any) -> FunctionData:
    file = write_rows(tmp_path / name, rows)
    shared: dict[str, Any] = {"vocab_size": 300, "block_size": 128, "held_out": 0.2, "cache": str(tmp_path / "cache")}
    return prepare(CodeDataConfig(form="functions", path=str(file), **{**shared, **fields}), quiet=True)


def sequences(data: FunctionData, part: str = "train") -> list[list[int]]:
    examples = getattr(data, part)
    return [examples.tokens[a:b].tolist() for a, b in zip(examples.offsets, examples.offsets[1:], strict=False)]


def texts(data: FunctionData) -> set[str]:
    decode = data.tokenizer.decode
    return {decode(ids, skip_special_tokens=False) for part in ("train", "held_out") for ids in sequences(data, part)}


def unmasked(batch: PaddedBatch) -> list[list[int]]:
    """The rows of a batch before they were masked, without padding."""
    ids = batch.input_ids.clone()
    real = batch.labels != IGNORED
    ids.view(-1)[batch.positions[real]] = batch.labels[real]
    return [row[mask].tolist() for row, mask in zip(ids, batch.attention_mask, strict=True)]


def test_every_function_is_a_sequence_alone_or_after_its_docstring(config: CodeDataConfig) -> None:
    data = prepare(replace(config, block_size=256), quiet=True)
    assert config.path is not None
    examples = [each for file in Path(config.path).glob("*.py") for each in functions_of(file.read_text())]
    assert texts(data) == {
        f"<s>{each.docstring}</s>{each.code}</s>" if each.docstring else f"<s>{each.code}</s>" for each in examples
    }
    sides = [data.manifest[part] for part in ("train", "held_out")]
    assert sum(side["examples"] for side in sides) == len(examples) == 72
    assert sum(side["pairs"] for side in sides) == 36
    assert sum(side["cut"] for side in sides) == 0
    for examples_of, side in ((data.train, sides[0]), (data.held_out, sides[1])):
        assert int((examples_of.labels == PAIR).sum()) == side["pairs"]


def test_long_functions_are_cut_and_counted(data: FunctionData, config: CodeDataConfig) -> None:
    whole = prepare(replace(config, block_size=256), quiet=True)
    for part in ("train", "held_out"):
        long, short = sequences(whole, part), sequences(data, part)
        assert max(map(len, short)) == WIDTH
        assert data.manifest[part]["cut"] == sum(len(ids) > WIDTH for ids in long) > 0
        for before, after in zip(long, short, strict=True):
            assert after.count(data.special.end) == before.count(data.special.end)  # a pair keeps both sides
            assert after[-1] == data.special.end
            if len(before) <= WIDTH:
                assert before == after


def test_functions_of_a_file_are_on_one_side_and_none_is_on_both(config: CodeDataConfig, tmp_path: Path) -> None:
    assert config.path is not None
    for name in ("copy", "other"):  # of the same functions, under names that may fall on the other side
        write_modules(tmp_path / "src" / name)
    data = prepare(replace(config, path=str(tmp_path / "src"), block_size=256), quiet=True)
    train, held_out = (set(map(tuple, sequences(data, part))) for part in ("train", "held_out"))
    assert train.isdisjoint(held_out)
    assert len(train) + len(held_out) == 72
    sides = [{text.partition("def add_")[2].partition("(")[0] for text in map(data.tokenizer.decode, each)}
             for each in (train, held_out)]  # fmt: skip
    modules = [{int(number) // 6 for number in side} for side in sides]
    assert modules[0].isdisjoint(modules[1])


@pytest.mark.parametrize(
    "names",
    [
        ("code", "docstring"),
        ("original_string", "docstring"),
        ("func_code_string", "func_documentation_string"),
        ("whole_func_string", "func_documentation_string"),
    ],
)
@pytest.mark.parametrize("file", ["rows.jsonl", "rows.jsonl.gz"])
def test_rows_of_code_search_net(names: tuple[str, str], file: str, tmp_path: Path) -> None:
    code, docstring = names
    rows: list[dict[str, Any]] = [
        {code: function(k, documented=True), docstring: f"Words {k}.", "language": "python", "tokens": []}
        for k in range(20)
    ]
    rows += [{code: function(20, documented=False), docstring: None}, {code: function(21, documented=False)}]
    rows += [{code: "", docstring: ""}, {code: None, docstring: "Words alone."}, {}]
    data = in_rows(tmp_path, rows, file)
    assert data.manifest["skipped"]["rows without_code"] == 3
    found = texts(data)
    assert len(found) == 22
    for k in range(22):
        start = f"<s>Words {k}.</s>" if k < 20 else "<s>"
        assert f"{start}{function(k, documented=False).rstrip()}</s>" in found


def test_rows_of_a_file_stay_together(tmp_path: Path) -> None:
    rows = [{"code": function(k, documented=False), "path": f"{k // 10}.py"} for k in range(60)]
    data = in_rows(tmp_path, rows)
    assert {data.manifest[part]["examples"] % 10 for part in ("train", "held_out")} == {0}


def test_own_columns_are_named_and_unknown_ones_refused(tmp_path: Path) -> None:
    rows = [{"body": function(k, documented=False), "words": f"Words {k}.", "id": k} for k in range(20)]
    data = in_rows(tmp_path, rows, code_field="body", docstring_field="words")
    assert sum(data.manifest[part]["pairs"] for part in ("train", "held_out")) == 20
    with pytest.raises(DataError, match=r"one of the fields original_string, .*, got one with 'body', 'words', 'id'"):
        in_rows(tmp_path, rows)
    for name in ("code_field", "docstring_field"):
        with pytest.raises(DataError, match=rf"data\.{name}: expected rows with the field 'none', got one with 'body'"):
            in_rows(tmp_path, rows, **{"code_field": "body", name: "none"})
    with pytest.raises(DataError, match=r"a text in the field 'id', got .*: set data\.code_field"):
        in_rows(tmp_path, rows, code_field="id")
    assert {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()} == {data.folder.name}


def test_rows_that_cannot_be_written_are_counted() -> None:
    rows: Counter[str] = Counter()
    reader = FunctionReader(None, None)
    assert list(reader.row({"code": "x \ud800", "docstring": "a"}, rows)) == []
    assert list(reader.row({"code": "x", "docstring": "\udfff"}, rows)) == []
    assert rows == {"rows not_utf8": 2}


def test_a_folder_of_datasets(tmp_path: Path) -> None:
    codes = [function(k, documented=True) for k in range(9)]
    rows = data_set({"func_code_string": codes, "func_documentation_string": ["Words."] * 9})
    save(tmp_path / "saved", {"train": rows})
    config = CodeDataConfig(
        form="functions", path=str(tmp_path / "saved"), vocab_size=300, held_out=0.3, cache=str(tmp_path / "cache")
    )
    assert len(texts(prepare(config, quiet=True))) == 9


def test_files_and_rows_in_one_folder_and_files_that_do_not_parse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_modules(tmp_path / "src", 6)
    write_rows(source / "rows.jsonl.gz", [{"code": function(k, documented=False)} for k in range(100, 110)])
    (source / "old.py").write_text("print 'Python 2'\n")
    (source / "other.c").write_text("int main() {}\n")
    fields: dict[str, Any] = {"suffixes": SUFFIXES, "vocab_size": 300, "held_out": 0.3}
    config = CodeDataConfig(form="functions", path=str(source), block_size=32, cache=str(tmp_path / "cache"), **fields)
    data = prepare(config)
    assert sum(data.manifest[part]["examples"] for part in ("train", "held_out")) == 46
    said = capsys.readouterr().err
    assert "skipped: 1 files not_parsed" in said
    assert f"{data.manifest['train']['cut']:,} cut to 32 tokens" in said
    assert f"{data.manifest['held_out']['pairs']:,} pairs" in said


def test_by_default_the_library_and_the_installed_packages_are_mined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {name: str(tmp_path / name) for name in ("stdlib", "purelib")}
    write_modules(tmp_path / "stdlib", 4)
    write_modules(tmp_path / "purelib", 8)
    (tmp_path / "stdlib" / "site-packages").mkdir()
    (tmp_path / "stdlib" / "site-packages" / "inside.py").write_text(function(900, documented=False))
    missing = str(tmp_path / "nowhere")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {**paths, "platlib": missing})
    config = CodeDataConfig(form="functions", vocab_size=300, block_size=64, cache=str(tmp_path / "cache"))
    data = prepare(config, quiet=True)
    assert len(texts(data)) == 48
    assert data.manifest["skipped"]["functions repeated"] == 24  # those of the library are in the packages, too
    small = prepare(replace(config, max_bytes=3000), quiet=True)
    assert 2 <= sum(small.manifest[part]["files"] for part in ("train", "held_out")) <= 8


def test_train_batches_are_functions_of_index_and_seed(data: FunctionData) -> None:
    for one, two in zip(data.train_batch(5, 4, seed=3), data.train_batch(5, 4, seed=3), strict=True):
        assert torch.equal(one, two)
    assert unmasked(data.train_batch(5, 4, seed=3)) != unmasked(data.train_batch(5, 4, seed=4))


def test_every_epoch_sees_every_example_once_under_new_masks(data: FunctionData) -> None:
    steps = data.steps_per_epoch(4)
    assert steps == -(-len(data.train) // 4)
    epochs = [[data.train_batch(first + k, 4, seed=0) for k in range(steps)] for first in (0, steps)]
    rows = [[row for batch in epoch for row in unmasked(batch)] for epoch in epochs]
    assert sorted(rows[0]) == sorted(rows[1]) == sorted(sequences(data))
    assert rows[0] != rows[1]


def test_masks_hit_the_share_of_real_tokens_and_their_number_follows_from_the_shape(data: FunctionData) -> None:
    special, by_shape = set(data.special), dict[tuple[int, ...], int]()
    masked = total = 0
    for index in range(60):
        batch = data.train_batch(index, 4, seed=0)
        shape = tuple(batch.input_ids.shape)
        assert shape[1] % (WIDTH // BUCKETS) == 0
        assert by_shape.setdefault(shape, len(batch.labels)) == len(batch.labels)
        real = batch.labels != IGNORED
        ordinary = sum(id not in special for row in unmasked(batch) for id in row)
        assert int(real.sum()) == max(1, round(0.15 * ordinary))
        assert special.isdisjoint(batch.labels[real].tolist())
        positions = batch.positions[real]
        assert len(positions.unique()) == len(positions)
        assert bool(batch.attention_mask.view(-1)[positions].all())
        assert (batch.input_ids[~batch.attention_mask] == data.special.pad).all()
        shown = batch.input_ids.view(-1)[positions]
        masked, total = masked + int((shown == data.special.mask).sum()), total + len(shown)
    assert abs(masked / total - 0.8) < 3 * (0.8 * 0.2 / total) ** 0.5  # three standard deviations


def test_held_out_batches_are_the_same_whatever_the_batch_size(data: FunctionData) -> None:
    def rows(size: int) -> dict[tuple[int, ...], tuple[int, ...]]:
        """What each example looks like masked, by what it was."""
        found = {}
        for batch in data.held_out_batches(size):
            shown = [tuple(row[mask].tolist()) for row, mask in
                     zip(batch.input_ids, batch.attention_mask, strict=True)]  # fmt: skip
            found |= dict(zip(map(tuple, unmasked(batch)), shown, strict=True))
        return found

    assert rows(1) == rows(3) == rows(100)
    assert set(rows(3)) == set(map(tuple, sequences(data, "held_out")))


def test_frequencies_are_those_of_the_training_tokens(data: FunctionData) -> None:
    counts = np.bincount(data.train.tokens, minlength=data.vocab_size) + 1.0
    np.testing.assert_allclose(data.log_frequencies().exp().numpy(), counts / counts.sum(), rtol=1e-5)


def test_robertas_vocabulary_is_taken_as_it_is(config: CodeDataConfig, tmp_path: Path) -> None:
    assert config.path is not None
    vocab = write_roberta(tmp_path / "roberta", [file.read_text() for file in Path(config.path).glob("*.py")])
    ids = json.loads((vocab / "vocab.json").read_text())
    for form in ("functions", "files"):
        given = replace(config, form=form, tokenizer=str(vocab), vocab_size=len(ids))  # type: ignore[arg-type]
        data = prepare(given, quiet=True)
        assert data.vocab_size == len(ids)
        assert data.special == Special(0, 1, 2, 3, len(ids) - 1)
        assert data.folder != prepare(replace(config, form=form), quiet=True).folder  # type: ignore[arg-type]
        batch = next(iter(data.held_out_batches(4)))
        assert (batch.input_ids == len(ids) - 1).any()
        assert batch.labels.max() < len(ids) - 1
    encoded = data.tokenizer.encode("<mask> </s>", add_special_tokens=False)
    assert {0, 1, 2, 3, len(ids) - 1}.isdisjoint(encoded.ids)  # in source code they are ordinary text
    with pytest.raises(ConfigError, match=rf"data\.vocab_size: expected the {len(ids)} tokens of .*, got 400: set"):
        prepare(replace(config, tokenizer=str(vocab), vocab_size=400), quiet=True)


def test_a_tokenizer_without_the_tokens_of_the_form_is_refused(config: CodeDataConfig, tmp_path: Path) -> None:
    path = prepare(config, quiet=True).folder / "tokenizer.json"
    about = json.loads(path.read_text())
    about["added_tokens"] = [token for token in about["added_tokens"] if token["content"] != "<mask>"]
    about["model"]["vocab"]["no mask"] = about["model"]["vocab"].pop("<mask>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=r"data\.tokenizer: expected a tokenizer with .*, got one without mask"):
        prepare(replace(config, tokenizer=str(tmp_path / "tokenizer.json")), quiet=True)
    with pytest.raises(ConfigError, match=r"data\.tokenizer: expected "):
        prepare(replace(config, tokenizer=str(tmp_path)[:-1] + "nowhere"), quiet=True)


def test_preparing_again_opens_the_cache_and_elsewhere_gives_the_same_bytes(
    data: FunctionData, config: CodeDataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = prepare(replace(config, cache=str(tmp_path / "cache")), quiet=True)
    assert again.folder.name == data.folder.name
    for file in data.folder.iterdir():
        assert (again.folder / file.name).read_bytes() == file.read_bytes(), file.name
    monkeypatch.setattr(function_data, "mined", None)  # not called any more
    assert prepare(config, quiet=True).folder == data.folder


@pytest.mark.parametrize("contents", [None, "x = 1\n", "def f(): pass\n"], ids=["empty", "no function", "short"])
def test_a_folder_without_functions_leaves_nothing(contents: str | None, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for k in range(0 if contents is None else 4):
        (tmp_path / "src" / f"{k}.py").write_text(f"{contents}# {k}\n")
    config = CodeDataConfig(form="functions", path=str(tmp_path / "src"), cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"expected (at least two documents|functions in the train part).*data\.path"):
        prepare(config, quiet=True)
    assert not [path for path in (tmp_path / "cache").glob("*") if path.is_dir()]


def test_options_of_the_other_form_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.code_field is for data\.form functions"):
        CodeDataConfig(code_field="code")
    with pytest.raises(ConfigError, match=r"data\.text_field is for data\.form files: set data\.code_field"):
        CodeDataConfig(form="functions", text_field="code")
    with pytest.raises(ConfigError, match=r"data\.form must be one of files, functions, got 'pairs'"):
        CodeDataConfig(form="pairs")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"data\.block_size must be at least 8 tokens, got 5"):
        CodeDataConfig(form="functions", block_size=5)


# --- functions out of source code -------------------------------------------------------------------------------------


FILE = '''"""Of the module."""
import os

@cached
@other(
    "argument")
def first(a, b=1):
    r"""What the first one does.

    More of it.
    """
    def inner():
        """Stays: it is a part of the function around it."""
        return a
    return inner() + b

class Thing:
    """Of the class."""

    async def second(self):
        x = self.value  # no docstring
        return x

    class Inside:
        if True:
            def third(self): "Short and sweet."; return 3

def only_words():
    """Nothing else."""
'''


def test_functions_are_found_in_order_and_separated_from_their_docstrings() -> None:
    first, second, third, words = functions_of(FILE)
    assert first.docstring == "What the first one does.\n\nMore of it."
    assert first.code == (
        '@cached\n@other(\n    "argument")\ndef first(a, b=1):\n    def inner():\n'
        '        """Stays: it is a part of the function around it."""\n        return a\n    return inner() + b'
    )
    assert second == Example("", "async def second(self):\n    x = self.value  # no docstring\n    return x")
    assert third == Example("Short and sweet.", "def third(self): return 3")
    assert words == Example("Nothing else.", "")


@pytest.mark.parametrize("path", sorted(Path(json.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_real_functions_parse_and_do_what_they_did(path: Path) -> None:
    source = path.read_text()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    bodies = {ast.dump(ast.Module(node.body[ast.get_docstring(node) is not None :], [])) for node in nodes}
    names = {node.name for node in nodes}
    for example in functions_of(source):
        (node,) = ast.parse(example.code).body
        assert isinstance(node, ast.FunctionDef)
        assert node.name in names
        assert ast.get_docstring(node) is None
        assert ast.dump(ast.Module(node.body, [])) in bodies


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("\ufeffdef f():\r\n    'Words.'\r\n    return 1\r\n", Example("Words.", "def f():\n    return 1")),
        ("class A:\n\tdef f(self):\n\t\treturn '''\nx'''\n", Example("", "def f(self):\n\treturn '''\nx'''")),
        (
            "def f():\n    'naïve 🙂'; x = 'é'\n    return x\n",
            Example("naïve 🙂", "def f():\n    x = 'é'\n    return x"),
        ),
        ('def f():\n    "half \\ud800 pair"\n    return 1\n', Example("half  pair", "def f():\n    return 1")),
        ('def f():\n    ""\n    return 1\n', Example("", "def f():\n    return 1")),
        ('def f():\n    "\\d is no escape"\n    return 1\n', Example("\\d is no escape", "def f():\n    return 1")),
    ],
    ids=["byte order mark and returns", "tabs", "beyond ASCII", "surrogate", "empty docstring", "invalid escape"],
)
def test_odd_texts(source: str, expected: Example) -> None:
    assert list(functions_of(source)) == [expected]


def test_the_docstring_of_a_row_is_taken_out_of_its_code() -> None:
    code = 'def f(x):\n    """Adds one.\n\n    Always.\n    """\n    return x + 1\n'
    alone = "def f(x):\n    return x + 1"
    assert split_row(code, "Adds one.") == Example("Adds one.", alone)  # the row's wins: it is what was published
    assert split_row(code, "") == Example("Adds one.\n\nAlways.", alone)
    assert split_row(alone, "") == Example("", alone)
    java = "/** Adds one. */ int f(int x) { return x + 1; }"
    assert split_row(java, "Adds one.") == Example("Adds one.", "/**  */ int f(int x) { return x + 1; }")
    old = 'def f(x):\n    """Prints."""\n    print x'  # Python 2
    assert split_row(old, "Prints.") == Example("Prints.", 'def f(x):\n    """"""\n    print x')


def test_what_is_left_out_is_counted_and_no_function_comes_twice() -> None:
    skipped: Counter[str] = Counter()
    seen: set[bytes] = set()
    long = "def f(x):\n    y = x\n    return y\n"
    documents = [
        Document("a.py", long),
        Document("again.py", f"{long}\ndef g(x): return x\n"),
        Document("two.py", "print 'not this Python'"),
        Document("null.py", "x = '\0'"),
        Document("deep.py", "x = " + "(" * 5000 + ")" * 5000),
        Document("row", "def g(x): return x", "Itself."),  # rows are as their publisher chose them
        Document("words", 'def h():\n    "Words alone."', "Words alone."),
    ]
    found = list(mined(documents, skipped, seen))
    assert found == [Example("", long.rstrip()), Example("Itself.", "def g(x): return x")]
    assert skipped == {"files not_parsed": 3, "functions short": 1, "functions repeated": 1, "functions empty": 1}
    assert list(mined(documents[:1], skipped, seen)) == []  # as in the held-out part
    assert skipped["functions repeated"] == 2


def test_long_chains_of_conditions_are_walked() -> None:
    chain = "if a:\n    pass\n" + "".join(f"elif a == {k}:\n    pass\n" for k in range(150))
    source = f"{chain}else:\n    def f():\n        x = 1\n        return x\n"
    assert [example.code for example in functions_of(source)] == ["def f():\n    x = 1\n    return x"]
