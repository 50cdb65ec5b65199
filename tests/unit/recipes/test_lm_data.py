"""Text of every kind → one stream of tokens → blocks: what is read, split and skipped, and that all of it repeats."""

import gzip
import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from comera.errors import ConfigError, DataError
from comera.files import SUMS
from comera.recipes.data import prepared
from comera.recipes.data.cache import RESUME
from comera.recipes.data.documents import LARGE_FILE, PASSAGE
from comera.recipes.data.tokenizer import train_tokenizer
from comera.recipes.lm.data import LMData, LMDataConfig, prepare
from comera.recipes.lm.ngrams import NAMES, ngram_losses
from comera.recipes.lm.tokenizer import END_OF_TEXT, byte_tokenizer, run_files, separator_of, token_bytes

from ...helpers.data_sets import data_set, put_on_hub, save

TEXTS = [f"Document {i}: é, 漢字 and 🙂.\n" + f"def f_{i}(x):\n    return x + {i}\n" * 9 for i in range(30)]


def config(tmp_path: Path, path: Path, **fields: Any) -> LMDataConfig:
    settings = {"vocab_size": 290, "block_size": 16, "held_out": 0.2, "cache": str(tmp_path / "cache"), **fields}
    return LMDataConfig(path=str(path), **settings)


def folder(tmp_path: Path) -> Path:
    for i, text in enumerate(TEXTS):
        file = tmp_path / "folder" / f"{i % 3}" / f"{i}{('.txt', '.md', '.py')[i % 3]}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "folder"


def jsonl(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"n": 1, "text": text}) + "\n" for text in TEXTS))
    return tmp_path / "rows.jsonl"


def jsonl_gz(tmp_path: Path) -> Path:
    (tmp_path / "packed").mkdir()
    content = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS)
    (tmp_path / "packed" / "rows.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    return tmp_path / "packed"


def saved_dataset(tmp_path: Path) -> Path:
    return save(tmp_path / "saved", data_set({"text": TEXTS}))


def hub(tmp_path: Path) -> Path:
    return Path("someone/some-texts")


def documents(data: LMData) -> list[str]:
    whole = b"".join(data.bytes.bytes_of(np.array(part)).tobytes() for part in (data.train, data.held_out))
    return whole.decode().split("\0")[:-1]


@pytest.mark.parametrize("kind", [folder, jsonl, jsonl_gz, saved_dataset, hub])
def test_every_kind_of_data_gives_all_its_documents(
    kind: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_hub(monkeypatch, {"train": data_set({"text": TEXTS})})
    data = prepare(config(tmp_path, kind(tmp_path)), quiet=True)
    assert sorted(documents(data)) == sorted(TEXTS)
    assert data.vocab_size == 290
    for part in ("train", "held_out"):
        assert data.manifest[part]["documents"] >= 1
    assert data.manifest["held_out"]["documents"] < 15


def test_one_large_file_is_read_as_passages_and_a_part_of_it_held_out(tmp_path: Path) -> None:
    lines = [f"line {i} of a long text\n" for i in range(LARGE_FILE // 18)]
    (tmp_path / "long.txt").write_text("".join(lines))
    data = prepare(config(tmp_path, tmp_path / "long.txt", vocab_size=256), quiet=True)
    assert sorted("".join(documents(data)).splitlines()) == sorted(line.rstrip("\n") for line in lines)
    share = data.manifest["held_out"]["bytes"] / sum(map(len, lines))
    assert 0.02 < share < 0.6
    (tmp_path / "short.txt").write_text("short\n" * 50)
    with pytest.raises(DataError, match=r"two documents, .* got 1 .*data\.held_out_path"):
        prepare(config(tmp_path, tmp_path / "short.txt"), quiet=True)
    apart = config(tmp_path, tmp_path / "long.txt", held_out_path=str(tmp_path / "short.txt"), vocab_size=256)
    data = prepare(apart, quiet=True)
    assert data.manifest["held_out"] == {"documents": 1, "bytes": 300, "tokens": 301}


def test_every_token_but_the_first_is_predicted_once_by_what_is_before_it(tmp_path: Path) -> None:
    data = prepare(config(tmp_path, folder(tmp_path)), quiet=True)
    batches = list(data.held_out_batches(3))
    ids, labels = torch.cat([b.input_ids for b in batches]), torch.cat([b.labels for b in batches])
    assert torch.equal(ids[:, 1:], labels[:, :-1])
    assert ids.shape == (data.blocks(data.held_out), 16)
    flat = np.array(data.held_out).astype(np.int64)
    expected = [flat[i * 16 : i * 16 + 17].tolist() for i in range(len(ids))]
    assert sorted(torch.cat([ids, labels[:, -1:]], 1).tolist()) == sorted(expected)
    for batch in batches:  # each row's bytes, counted by the tokenizer itself
        for row, size in zip(batch.labels, batch.sizes.tolist(), strict=True):
            assert len(data.bytes.bytes_of(row.numpy())) == size
    text = data.bytes.bytes_of(flat).tobytes().decode().rstrip("\0")
    assert text.replace("\0", "") == data.tokenizer.decode(flat.tolist())


def test_batches_are_functions_of_index_and_seed_and_epochs_see_every_block_once(tmp_path: Path) -> None:
    data = prepare(config(tmp_path, folder(tmp_path)), quiet=True)
    for ours, again in zip(data.train_batch(5, 4, seed=3), data.train_batch(5, 4, seed=3), strict=True):
        assert torch.equal(ours, again)
    assert not torch.equal(data.train_batch(5, 4, seed=3).labels, data.train_batch(5, 4, seed=4).labels)
    blocks = data.blocks(data.train)
    seen = [bytes(data.train_batch(i, 1, seed=0).labels.numpy()) for i in range(2 * blocks)]
    assert sorted(seen[:blocks]) == sorted(seen[blocks:])
    assert seen[:blocks] != seen[blocks:]


def test_plain_bytes_are_their_own_ids(tmp_path: Path) -> None:
    data = prepare(config(tmp_path, folder(tmp_path), vocab_size=256), quiet=True)
    assert (data.vocab_size, data.separator) == (256, 0)
    assert data.bytes.lengths.tolist() == [1] * 256
    assert np.array(data.train).tobytes()[::2].decode() == data.bytes.bytes_of(np.array(data.train)).tobytes().decode()
    assert token_bytes(byte_tokenizer()) == [bytes([i]) for i in range(256)]


def test_a_tokenizer_given_is_used_as_it_is(tmp_path: Path) -> None:
    given = train_tokenizer(TEXTS[:5], 300, ["</s>", "<pad>"])
    (tmp_path / "given").mkdir()
    given.save(str(tmp_path / "given" / "tokenizer.json"))
    for path in (tmp_path / "given", tmp_path / "given" / "tokenizer.json"):
        settings = config(tmp_path, folder(tmp_path), vocab_size=None, tokenizer=str(path))
        assert settings.expected_vocabulary() == 300
        data = prepare(settings, quiet=True)
        assert (data.vocab_size, data.separator) == (300, 0)
        assert data.tokenizer.get_vocab() == given.get_vocab()
        assert sorted(documents(data)) == sorted(TEXTS)
    assert prepare(replace(settings, vocab_size=300), quiet=True).folder == data.folder
    with pytest.raises(ConfigError, match=r"expected the 300 tokens of .*, got 290: leave data\.vocab_size out"):
        prepare(replace(settings, vocab_size=290), quiet=True)


def test_a_tokenizer_that_does_not_stand_for_the_bytes_is_refused(tmp_path: Path) -> None:
    def settings(tokenizer: Tokenizer) -> LMDataConfig:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return config(tmp_path, folder(tmp_path), vocab_size=None, tokenizer=str(tmp_path / "tokenizer.json"))

    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    lower = train_tokenizer(TEXTS, 300, [END_OF_TEXT])
    lower.normalizer = normalizers.Replace("Document", "D")
    for tokenizer, message in (
        (words, "a byte-level tokenizer, as of GPT-2"),
        (train_tokenizer(TEXTS, 300, ["<x>"]), "a token between documents"),
        (lower, "exactly the bytes of a text, got others for 'Document"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(settings(tokenizer), quiet=True)
    for path, message in ((tmp_path / "none", "No such file"), (jsonl(tmp_path), r"expected tokenizer\.json of a")):
        with pytest.raises(ConfigError, match=message):
            prepare(config(tmp_path, folder(tmp_path), vocab_size=None, tokenizer=str(path)), quiet=True)
    cache = tmp_path / "cache"
    assert not cache.exists() or all(p.suffix == ".lock" for p in cache.iterdir())


def test_what_is_no_text_is_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = folder(tmp_path)
    (root / "latin.txt").write_bytes(b"caf\xe9")
    (root / "empty.md").touch()
    (root / "copy.txt").write_text(TEXTS[0])
    (root / "broken.jsonl.gz").write_bytes(b"no gzip")
    (root / "image.png").write_bytes(b"\x89PNG")
    (root / "rows.jsonl").write_text('{"text": "one more \\ud800"}\n\n{"text": ""}\n{"text": "a good row"}\n')
    data = prepare(config(tmp_path, root))
    said = capsys.readouterr().err
    assert "skipped files: 1 unreadable, 1 not_utf8, 1 empty, 1 repeated, 1 rows not_utf8, 1 rows empty" in said
    assert sorted(documents(data)) == sorted([*TEXTS, "a good row"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("no json\n", r"rows\.jsonl, line 1: expected JSON, got 'no json'"),
        ('{"text": "a"}\n[1]\n', "line 2: expected a JSON object"),
        ('{"content": "a"}\n', r"a text in the field 'text', got one with 'content': set data\.text_field"),
    ],
)
def test_malformed_rows_are_errors(rows: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(rows)
    with pytest.raises(DataError, match=message):
        prepare(config(tmp_path, tmp_path / "rows.jsonl"), quiet=True)


def test_no_text_and_no_folder_are_errors(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "image.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=r"two documents.*got 0 \(skipped: none\): check data\.path, data\.suffixes"):
        prepare(config(tmp_path, tmp_path / "bare"), quiet=True)
    with pytest.raises(DataError, match=r"nowhere, which does not exist: check data\.path"):
        prepare(config(tmp_path, tmp_path / "nowhere"), quiet=True)
    for path in (tmp_path / "a", tmp_path / "b"):
        path.mkdir()
        (path / "tiny.txt").write_text(path.name)
    with pytest.raises(DataError, match=r"more than one block of 16 tokens in the train part, got 2 .*block_size"):
        prepare(config(tmp_path, tmp_path / "a", held_out_path=str(tmp_path / "b"), vocab_size=256), quiet=True)


def test_the_hub_says_what_it_did_not_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_hub(monkeypatch, FileNotFoundError("Dataset 'someone/some-texts' does not exist"))
    with pytest.raises(DataError, match=r"data\.path: expected a file, a folder or a data set .*does not exist"):
        prepare(config(tmp_path, hub(tmp_path)), quiet=True)
    put_on_hub(monkeypatch, {"test": data_set({"text": TEXTS})})
    with pytest.raises(DataError, match=r"a data set with the split train, got .* with test"):
        prepare(config(tmp_path, hub(tmp_path)), quiet=True)


def test_the_cache_is_used_and_a_change_gives_another(tmp_path: Path) -> None:
    settings = config(tmp_path, folder(tmp_path))
    first = prepare(settings, quiet=True)
    stamp = (first.folder / "train.bin").stat().st_mtime_ns
    assert prepare(replace(settings, block_size=8), quiet=True).folder == first.folder
    assert (first.folder / "train.bin").stat().st_mtime_ns == stamp
    changes: list[dict[str, Any]] = [{"vocab_size": 280}, {"held_out": 0.3}, {"max_bytes": 4000}, {"vocab_size": 256}]
    others = {prepare(replace(settings, **change), quiet=True).folder for change in changes}
    assert len(others | {first.folder}) == 5
    part = prepare(replace(settings, max_bytes=4000), quiet=True)
    assert set(documents(part)) < set(TEXTS)
    assert sum(part.manifest[name]["bytes"] for name in ("train", "held_out")) < 8000


def test_a_document_keeps_its_side_when_others_go(tmp_path: Path) -> None:
    def sides(texts: list[str]) -> tuple[set[str], set[str]]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        data = prepare(config(tmp_path, tmp_path / "rows.jsonl", vocab_size=256, held_out=0.4), quiet=True)
        train, held_out = (data.bytes.bytes_of(np.array(p)).tobytes().decode() for p in (data.train, data.held_out))
        return set(train.split("\0")), set(held_out.split("\0"))

    train, held_out = sides(TEXTS)
    fewer_train, fewer_held_out = sides(TEXTS[::2])
    assert fewer_train <= train
    assert fewer_held_out <= held_out


def test_ngrams_are_those_of_the_formula(tmp_path: Path) -> None:
    train, blocks = b"abracadabra, abracadabra and abba", [b"abra and ba", b"xabba", b"a"]
    counts = [Counter(train[i : i + n] for i in range(len(train) - n + 1)) for n in (1, 2, 3)]

    def p(history: bytes, w: int) -> float:
        lower = p(history[1:], w) if history else 1 / 256
        after = {gram[-1]: count for gram, count in counts[len(history)].items() if gram[:-1] == history}
        if not after:
            return lower
        return (after.get(w, 0) + len(after) * lower) / (sum(after.values()) + len(after))

    given = [1, 2, 0]
    found = ngram_losses(
        np.frombuffer(train, np.uint8),
        np.frombuffer(b"".join(blocks), np.uint8),
        np.array([len(b) for b in blocks]),
        np.array(given),
    )
    for order, name in enumerate(NAMES):
        scored = [
            (b[max(0, i - order) : i], b[i]) for b, g in zip(blocks, given, strict=True) for i in range(g, len(b))
        ]
        expected = sum(-math.log(p(*pair)) for pair in scored) / len(scored)
        assert found[name] == pytest.approx(expected, rel=1e-12)


def test_ngrams_that_are_longer_than_the_training_text_are_those_of_the_lower_order() -> None:
    found = ngram_losses(np.frombuffer(b"ab", np.uint8), np.frombuffer(b"abba", np.uint8), np.array([4]), np.array([1]))
    assert found["trigrams"] == found["bigrams"] < found["unigrams"]


def test_ngrams_score_the_bytes_of_the_held_out_batches(tmp_path: Path) -> None:
    data = prepare(config(tmp_path, folder(tmp_path), vocab_size=290), quiet=True)
    train = [data.bytes.bytes_of(data.train[i * 16 : i * 16 + 16]) for i in range(data.blocks(data.train))]
    for batches in (1, 0):
        held_out = list(data.held_out_batches(2))[: batches or None]
        ids = torch.cat([torch.cat([b.input_ids[:, :1], b.labels], 1) for b in held_out]).numpy()
        rows = [data.bytes.bytes_of(row) for row in ids]
        given = np.array([len(data.bytes.bytes_of(row[:1])) for row in ids])
        expected = ngram_losses(np.concatenate(train), np.concatenate(rows), np.array([*map(len, rows)]), given)
        assert data.ngram_losses(2, batches) == expected
    assert data.ngram_losses(3) == expected
    assert expected["unigrams"] > expected["bigrams"] > expected["trigrams"] > 0


def test_ngrams_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(tmp_path, folder(tmp_path))
    data = prepare(settings, quiet=True)
    counted: list[int] = []

    def count(train: Any, *rest: Any) -> dict[str, float]:
        counted.append(len(train))
        return ngram_losses(train, *rest)

    monkeypatch.setattr("comera.recipes.lm.data.ngram_losses", count)
    first = data.ngram_losses(2, batches=2)
    assert prepare(settings, quiet=True).ngram_losses(4, batches=1) == first  # the same blocks
    assert len(counted) == 1
    others = [data.ngram_losses(2), prepare(replace(settings, block_size=8), quiet=True).ngram_losses(2, batches=2)]
    assert first not in others
    assert len(counted) == 3
    (stored,) = (tmp_path / "cache").glob("*-ngrams-16-4/losses.json")
    stored.write_text(stored.read_text().replace("1", "2"))
    assert data.ngram_losses(2, batches=2) == first
    assert "losses.json differs from its checksum): it is made anew" in caplog.text
    assert len(counted) == 4


def test_files_of_the_run_name_the_separator_unless_it_is_a_byte() -> None:
    trained = train_tokenizer(TEXTS, 300, [END_OF_TEXT])
    settings = json.loads(run_files(trained, separator_of(trained), 64)["tokenizer_config.json"])
    assert (settings["eos_token"], settings["model_max_length"]) == (END_OF_TEXT, 64)
    assert "eos_token" not in json.loads(run_files(byte_tokenizer(), 0, 64)["tokenizer_config.json"])


# --- a preparation that was killed while it tokenized -----------------------------------------------------------------


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


MORE_TEXTS = [f"Document {i}: é, 漢字.\n" + f"def f_{i}(x):\n    return x + {i}\n" * (5 + i % 7) for i in range(60)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = tmp_path_factory.mktemp("texts")
    for i, text in enumerate(MORE_TEXTS):
        (texts / f"{i}.txt").write_text(text)
    (texts / "long.txt").write_text("x" * 300)  # no text for a tokenizer: a word that is too long
    return texts


def settings_of(texts: Path, cache: Path) -> LMDataConfig:
    return LMDataConfig(path=str(texts), cache=str(cache), vocab_size=290, block_size=16, held_out=0.2)


def contents(data: LMData) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data.folder.iterdir()}


def kill(texts: Path, cache: Path, calls: int) -> Path:
    """Start a child that is killed; the folder that it left."""
    command = [sys.executable, "-c", KILLED, str(texts), str(cache), str(calls)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    (partial,) = cache.glob("*.partial")
    assert not (cache / partial.stem).exists()
    return partial


def test_a_killed_preparation_goes_on_to_the_byte(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = contents(prepare(settings_of(texts, tmp_path / "straight"), quiet=True))
    assert SUMS in expected
    assert RESUME not in expected
    cache = tmp_path / "cache"
    kept = []
    for calls in (8, 12):  # what the second one does, it does after what the first one has left
        partial = kill(texts, cache, calls)
        assert (partial / RESUME).exists()
        kept.append((partial / "train.bin").stat().st_size)
    assert 0 < kept[0] < kept[1] < len(expected["train.bin"])

    def again(*_: object) -> None:
        raise AssertionError("the tokenizer was trained again")

    monkeypatch.setattr(prepared, "train_on", again)
    capsys.readouterr()
    assert contents(prepare(settings_of(texts, cache))) == expected
    said = capsys.readouterr().err
    assert "text: goes on after " in said
    assert "bytes of train" in said
    assert "the tokenizer was not trained on 1 files with words of more than 256 characters, such as long.txt" in said
    assert not list(cache.glob("*.partial"))


@pytest.mark.parametrize("calls", [0, 1, 34])
def test_killed_before_the_first_note_and_in_the_held_out_part(texts: Path, tmp_path: Path, calls: int) -> None:
    partial = kill(texts, tmp_path / "cache", calls)
    assert (partial / "held_out.bin").exists() == (calls > 31)
    expected = contents(prepare(settings_of(texts, tmp_path / "straight"), quiet=True))
    assert contents(prepare(settings_of(texts, tmp_path / "cache"), quiet=True)) == expected


@pytest.mark.parametrize("name", [RESUME, "train.bin"])
def test_what_the_disk_has_lost_is_made_anew(texts: Path, tmp_path: Path, name: str) -> None:
    partial = kill(texts, tmp_path / "cache", 20)
    (partial / name).write_bytes(b"")
    expected = contents(prepare(settings_of(texts, tmp_path / "straight"), quiet=True))
    assert contents(prepare(settings_of(texts, tmp_path / "cache"), quiet=True)) == expected


def test_an_interrupted_preparation_is_kept_and_a_failed_one_is_not(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
                prepare(settings_of(texts, tmp_path / "cache"), quiet=True)
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
