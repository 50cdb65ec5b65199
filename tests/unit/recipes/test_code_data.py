"""Source code → packed blocks → masked batches: what is read, what is split, and that all of it repeats exactly."""

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from comera.errors import DataError
from comera.recipes.code_lm import data as code
from comera.recipes.code_lm.data import CodeData, CodeDataConfig, prepare, source_files
from comera.recipes.code_lm.masking import MASK, START
from comera.recipes.data import tokenizer
from comera.recipes.data.documents import Source, split


def write_sources(folder: Path, count: int = 40) -> Path:
    for i in range(count):
        file = folder / f"package{i % 3}" / f"module{i}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(f"def function_{i}_{j}(value):\n    return value + {i * j}\n" for j in range(12)))
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def config(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> CodeDataConfig:
    cache = tmp_path_factory.mktemp("cache")
    return CodeDataConfig(path=str(sources), vocab_size=300, block_size=16, held_out=0.2, cache=str(cache))


@pytest.fixture(scope="module")
def data(config: CodeDataConfig) -> CodeData:
    return prepare(config, quiet=True)


def test_blocks_decode_to_the_files_one_after_the_other(data: CodeData, sources: Path) -> None:
    texts = [p.read_text() for p in sorted(sources.rglob("*.py"))]
    for part in (data.train, data.held_out):
        text = data.tokenizer.decode(part.reshape(-1).tolist(), skip_special_tokens=False)
        pieces = text.removeprefix("<s>").split("</s><s>")
        assert len(pieces) > 1
        assert all(piece in texts for piece in pieces[:-1])  # the last one may be cut by the end of the last block


def test_training_and_held_out_files_are_disjoint_and_cover_all(data: CodeData) -> None:
    assert data.manifest["train"]["files"] + data.manifest["held_out"]["files"] == 40
    assert 2 <= data.manifest["held_out"]["files"] <= 16
    assert set(map(bytes, np.array(data.train))).isdisjoint(map(bytes, np.array(data.held_out)))


def sides(into: Path, sources: Path, config: CodeDataConfig, share: float) -> tuple[set[str], set[str]]:
    """The files to train on and those that are held out."""
    parts = split(into, source_files(sources, config), None, share, None, Counter())
    return {file.key for file in parts["train"].read()}, {file.key for file in parts["held_out"].read()}


def test_a_file_stays_on_its_side_when_others_go(config: CodeDataConfig, sources: Path, tmp_path: Path) -> None:
    for name in ("all", "half"):
        (tmp_path / name).mkdir()
    train, held_out = sides(tmp_path / "all", sources, config, 0.2)
    half = shutil.copytree(sources, tmp_path / "sources")
    for file in sorted(half.rglob("*.py"))[::2]:
        file.unlink()
    train_of_half, held_out_of_half = sides(tmp_path / "half", half, config, 0.2)
    assert train_of_half < train
    assert held_out_of_half < held_out


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_both_sides_get_a_file_however_extreme_the_share(
    config: CodeDataConfig, sources: Path, tmp_path: Path, share: float
) -> None:
    train, held_out = sides(tmp_path, sources, config, share)
    assert min(len(train), len(held_out)) == 1
    assert len(train) + len(held_out) == 40


def test_the_default_is_the_standard_library_without_installed_packages(tmp_path: Path) -> None:
    data = prepare(CodeDataConfig(max_bytes=150_000, vocab_size=300, cache=str(tmp_path)), quiet=True)
    read = data.manifest["train"]["bytes"] + data.manifest["held_out"]["bytes"]
    assert 75_000 < read <= 150_000
    assert data.vocab_size == 300


def test_hidden_and_installed_folders_other_suffixes_and_bad_files_are_skipped(tmp_path: Path) -> None:
    write_sources(tmp_path, 4)
    good = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.py")}
    for name in (".git/a.py", "site-packages/b.py", "package0/node_modules/c.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"x = '{name}'")
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'")
    (tmp_path / "empty.py").touch()
    (tmp_path / "copy.py").write_bytes((tmp_path / "package0" / "module0.py").read_bytes())
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    os.mkfifo(tmp_path / "pipe.py")  # reading it would wait for a writer
    corpus = source_files(tmp_path, CodeDataConfig())
    found, skipped = corpus.identity, corpus.skipped
    assert len(found) == len(good)
    assert {s.path for s in found} <= good | {"copy.py"}
    assert skipped == {"no_file": 1, "unreadable": 1, "not_utf8": 1, "empty": 1, "repeated": 1}


def test_max_bytes_takes_the_same_random_part_every_time(sources: Path) -> None:
    def found(**fields: int) -> list[Source]:
        return list(source_files(sources, CodeDataConfig(**fields)).identity)

    whole, part = found(), found(max_bytes=8_000)
    assert part == found(max_bytes=8_000)
    assert set(part) < set(whole)
    assert sum(s.size for s in part) <= 8_000
    assert part != whole[: len(part)]


def test_special_tokens_written_in_the_code_are_ordinary_text(tmp_path: Path) -> None:
    write_sources(tmp_path / "src", 6)
    for i in range(6):
        (tmp_path / "src" / f"tags{i}.py").write_text(f"text_{i} = '<s> <mask> </s> <pad>'\n" * 9)
    data = prepare(CodeDataConfig(path=str(tmp_path / "src"), vocab_size=300, cache=str(tmp_path)), quiet=True)
    for part, name in ((data.train, "train"), (data.held_out, "held_out")):
        tokens = np.array(part).reshape(-1)
        assert (tokens == MASK).sum() == 0
        assert (tokens == START).sum() <= data.manifest[name]["files"]


def test_preparing_again_elsewhere_gives_the_same_bytes(
    data: CodeData, config: CodeDataConfig, sources: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in sources.rglob("*.py"):
        (moved / file.relative_to(sources)).parent.mkdir(exist_ok=True)
        (moved / file.relative_to(sources)).write_bytes(file.read_bytes())
    again = prepare(CodeDataConfig(**{**vars(config), "path": str(moved), "cache": str(tmp_path / "c")}), quiet=True)
    assert again.folder.name == data.folder.name
    for name in ("train.bin", "held_out.bin", "tokenizer.json", "manifest.json"):
        assert (again.folder / name).read_bytes() == (data.folder / name).read_bytes()


def test_the_cache_is_used_and_a_change_of_contents_or_settings_gives_another(tmp_path: Path) -> None:
    write_sources(tmp_path / "src", 8)
    fields = {"path": str(tmp_path / "src"), "vocab_size": 290, "cache": str(tmp_path / "cache")}
    first = prepare(CodeDataConfig(**fields), quiet=True)
    stamp = (first.folder / "train.bin").stat().st_mtime_ns
    assert prepare(CodeDataConfig(**fields, block_size=32), quiet=True).folder == first.folder
    assert (first.folder / "train.bin").stat().st_mtime_ns == stamp
    assert prepare(CodeDataConfig(**{**fields, "vocab_size": 280}), quiet=True).folder != first.folder
    (tmp_path / "src" / "package0" / "module0.py").write_text("other = 1\n" * 50)
    assert prepare(CodeDataConfig(**fields), quiet=True).folder != first.folder


@pytest.mark.parametrize("damage", ["truncated", "no manifest", "half written"])
def test_a_damaged_or_unfinished_cache_is_made_anew(tmp_path: Path, damage: str) -> None:
    write_sources(tmp_path / "src", 8)
    config = CodeDataConfig(path=str(tmp_path / "src"), vocab_size=290, cache=str(tmp_path / "cache"))
    folder = prepare(config, quiet=True).folder
    good = (folder / "train.bin").read_bytes()
    if damage == "truncated":
        (folder / "train.bin").write_bytes(good[: len(good) // 2])
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    else:  # what a process killed while preparing leaves
        folder.rename(folder.with_name(folder.name + ".partial"))
    assert (prepare(config, quiet=True).folder / "train.bin").read_bytes() == good
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_two_that_prepare_at_once_share_one_result(tmp_path: Path) -> None:
    write_sources(tmp_path / "src", 30)
    config = CodeDataConfig(path=str(tmp_path / "src"), vocab_size=400, cache=str(tmp_path / "cache"))
    with ThreadPoolExecutor(3) as pool:  # the lock is of the file, so threads meet it as processes do
        one, two, three = pool.map(lambda _: prepare(config, quiet=True), range(3))
    assert one.manifest == two.manifest == three.manifest
    np.testing.assert_array_equal(one.train, three.train)
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_train_batches_are_functions_of_index_and_seed(data: CodeData) -> None:
    for ours, again in zip(data.train_batch(5, 4, seed=3), data.train_batch(5, 4, seed=3), strict=True):
        assert torch.equal(ours, again)
    assert not torch.equal(data.train_batch(5, 4, seed=3).input_ids, data.train_batch(6, 4, seed=3).input_ids)
    assert not torch.equal(data.train_batch(5, 4, seed=3).input_ids, data.train_batch(5, 4, seed=4).input_ids)


def test_every_epoch_sees_every_block_once_in_a_new_order(data: CodeData) -> None:
    count = len(data.train)
    batches = [data.train_batch(i, 1, seed=0) for i in range(2 * count)]
    blocks = [_unmasked(b)[0] for b in batches]
    expected = sorted(map(bytes, np.array(data.train).astype(np.int64)))
    assert sorted(map(bytes, blocks[:count])) == expected
    assert sorted(map(bytes, blocks[count:])) == expected
    assert [b.tobytes() for b in blocks[:count]] != [b.tobytes() for b in blocks[count:]]


def _unmasked(batch: code.Batch) -> np.ndarray:
    ids = batch.input_ids.clone()
    ids.view(-1)[batch.positions] = batch.labels
    return ids.numpy()


def test_larger_batches_hold_the_same_blocks_in_the_same_order(data: CodeData) -> None:
    pair = np.concatenate([_unmasked(data.train_batch(i, 2, seed=1)) for i in (2, 3)])
    np.testing.assert_array_equal(_unmasked(data.train_batch(1, 4, seed=1)), pair)


def test_masks_hit_the_exact_share_of_ordinary_tokens_80_10_10(data: CodeData) -> None:
    masked = stayed = total = 0
    for index in range(200):
        batch = data.train_batch(index, 8, seed=0)
        assert batch.input_ids.shape == (8, 16)
        assert len(batch.positions) == len(batch.labels) == round(0.15 * 8 * 16)
        assert len(batch.positions.unique()) == len(batch.positions)
        assert int(batch.labels.min()) > MASK
        shown = batch.input_ids.view(-1)[batch.positions]
        assert ((shown == MASK) | (shown > MASK)).all()
        masked += int((shown == MASK).sum())
        stayed += int((shown == batch.labels).sum())
        total += len(shown)
    # three standard deviations of a binomial share; "random" hits the label itself once in about 300
    assert abs(masked / total - 0.8) < 3 * (0.8 * 0.2 / total) ** 0.5
    assert abs(stayed / total - 0.1 - 0.1 / 300) < 3 * (0.1 * 0.9 / total) ** 0.5


def test_held_out_batches_are_the_same_whatever_the_batch_size(data: CodeData) -> None:
    count = len(data.held_out)
    for size in (2, 3):
        batches = list(data.held_out_batches(size))
        ones = list(data.held_out_batches(1))[: count // size * size]
        assert len(ones) == len(batches) * size
        for field in ("input_ids", "labels"):
            assert torch.equal(
                torch.cat([getattr(b, field) for b in batches]), torch.cat([getattr(b, field) for b in ones])
            )
        np.testing.assert_array_equal(
            np.concatenate([_unmasked(b) for b in batches]), np.concatenate([_unmasked(b) for b in ones])
        )


def test_held_out_batches_cover_the_held_out_part(data: CodeData) -> None:
    everything = np.concatenate([_unmasked(b) for b in data.held_out_batches(1)])
    assert sorted(map(bytes, everything)) == sorted(map(bytes, np.array(data.held_out).astype(np.int64)))
    (single,) = data.held_out_batches(len(data.held_out) + 1)
    assert sorted(map(bytes, _unmasked(single))) == sorted(map(bytes, everything))


def test_a_missing_folder_a_file_or_a_folder_without_code_is_a_data_error(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    with pytest.raises(DataError, match=r"nowhere, which does not exist: check data\.path"):
        prepare(CodeDataConfig(path=str(tmp_path / "nowhere"), cache=cache))
    (tmp_path / "notes.txt").write_text("no code")
    with pytest.raises(DataError, match=r"at least two documents.* in .*notes\.txt, got 1"):
        prepare(CodeDataConfig(path=str(tmp_path / "notes.txt"), cache=cache))
    with pytest.raises(DataError, match=r"at least two source files .* got 0"):
        prepare(CodeDataConfig(path=str(tmp_path), cache=cache))
    (tmp_path / "only.py").write_text("x = 1")
    with pytest.raises(DataError, match=r"at least two source files .* got 1"):
        prepare(CodeDataConfig(path=str(tmp_path), cache=cache))
    assert not [path for path in (tmp_path / "cache").glob("*") if path.is_dir()]


def test_too_little_code_for_a_block_says_so_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f"{name} = 1")
    config = CodeDataConfig(path=str(tmp_path), cache=str(tmp_path / "cache"))
    for _ in range(2):
        with pytest.raises(DataError, match=r"at least one block of 128 tokens .* smaller data\.block_size"):
            prepare(config, quiet=True)


def test_texts_with_endless_words_do_not_train_the_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sources(tmp_path / "src", 8)
    seen: list[str] = []
    train = tokenizer.train_tokenizer
    monkeypatch.setattr(tokenizer, "train_tokenizer", lambda texts, *rest: train(seen_in(texts, seen), *rest))
    fields = {"path": str(tmp_path / "src"), "vocab_size": 290, "cache": str(tmp_path / "cache")}
    assert prepare(CodeDataConfig(**fields)).manifest["long_words"] == 0
    assert "not trained" not in capsys.readouterr().err
    letters = random.Random(0).choices("abcdefgh", k=200_000)
    for name, word in (
        ("letters", "".join(letters)),
        ("rule", "=" * 300),
        ("spaces", " " * 300),
        ("digits", "7" * 300),
    ):
        (tmp_path / "src" / f"{name}.py").write_text(f"x = '{word}'\n")
    (tmp_path / "src" / "fine.py").write_text(f"x = '{'word ' * 5000}'\n")
    seen.clear()
    data = prepare(CodeDataConfig(**fields, held_out=0.01))
    assert data.manifest["long_words"] == 4
    assert max(map(len, seen)) < 30_000
    assert data.manifest["train"]["files"] + data.manifest["held_out"]["files"] == 13  # to learn from all the same
    assert "was not trained on 4 files with words of more than 256 characters" in capsys.readouterr().err


def seen_in(texts: Iterable[str], seen: list[str]) -> Iterator[str]:
    for text in texts:
        seen.append(text)
        yield text
