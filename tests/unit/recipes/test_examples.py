"""Batches of pairs: every pair once an epoch, near-equal lengths, few shapes, pure; and the cache that holds them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device

from comera.errors import ConfigError, DataError
from comera.files import SUMS
from comera.recipes.classify.data import MNLI, ClassifyDataConfig, PreparedExamples, prepare
from comera.recipes.data import cache
from comera.recipes.data import prepared as examples
from comera.recipes.data.cache import open_or_make
from comera.recipes.data.prepared import Example, ExampleBatch, Examples, write_examples
from comera.recipes.dlrm.criteo.batches import RowEncoder

from ...helpers.click_rows import ROWS, read, write

COUNT = 1003
PAD = 0


def make_pairs(folder: Path, count: int = COUNT, max_length: int = 64, buckets: int = 4) -> Examples:
    """Pairs identified by their second token, their own index."""
    rng = np.random.default_rng(0)
    written: list[Example] = []
    for number in range(count):
        length = int(rng.integers(5, max_length + 1))
        ids = [1, number + 10, *rng.integers(3, 9, length - 2)]
        written.append((np.array(ids, np.int32), int(rng.integers(3, length)), number % 3))
    assert write_examples(folder, "train", written)["examples"] == count
    return Examples(folder, "train", max_length, buckets, PAD)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    return make_pairs(tmp_path_factory.mktemp("pairs"))


def numbers(batches: Iterable[ExampleBatch]) -> list[int]:
    return [number for batch in batches for number in (batch.input_ids[:, 1] - 10).tolist()]


def epoch(data: Examples, size: int, seed: int, number: int = 0) -> list[ExampleBatch]:
    count = data.batches_per_epoch(size)
    return [data.shuffled(i, size, seed) for i in range(number * count, (number + 1) * count)]


def test_a_batch_holds_the_pairs_as_they_were_written(many: Examples) -> None:
    rows = np.array([5, 0, 700])
    batch = many.batch(rows)
    assert [tensor.dtype for tensor in batch] == [torch.int64, torch.int64, torch.bool, torch.int64]
    assert batch.input_ids.shape == batch.token_type_ids.shape == batch.attention_mask.shape
    for i, row in enumerate(rows):
        start, end, boundary = many.offsets[row], many.offsets[row + 1], many.boundaries[row]
        length = end - start
        assert batch.input_ids[i, :length].tolist() == many.tokens[start:end].tolist()
        assert (batch.input_ids[i, length:] == PAD).all()
        assert batch.attention_mask[i].tolist() == [place < length for place in range(batch.input_ids.shape[1])]
        assert batch.token_type_ids[i].nonzero().flatten().tolist() == list(range(boundary, length))
        assert batch.labels[i] == row % 3


@pytest.mark.parametrize("size", [1, 7, 32, 1003, 5000])
def test_every_pair_comes_once_an_epoch_and_epochs_differ(many: Examples, size: int) -> None:
    first, second = epoch(many, size, seed=3), epoch(many, size, seed=3, number=1)
    for batches in (first, second):
        assert sorted(numbers(batches)) == list(range(COUNT))
        assert [len(batch.labels) for batch in batches[:-1]] == [size] * (len(batches) - 1)
        assert len(batches[-1].labels) == (COUNT - 1) % size + 1
    if 1 < size < COUNT:
        assert numbers(first) != numbers(second)
        assert {frozenset(numbers([b])) for b in first} != {frozenset(numbers([b])) for b in second}


def test_batches_are_functions_of_index_size_and_seed(many: Examples) -> None:
    places = (40, 3, 77, 3)
    ours = [many.shuffled(i, 16, seed=1) for i in places]
    examples._epoch.cache_clear()
    for batch, again in zip(ours, [many.shuffled(i, 16, seed=1) for i in places], strict=True):
        assert all(torch.equal(one, two) for one, two in zip(batch, again, strict=True))
    assert numbers([many.shuffled(3, 16, seed=2)]) != numbers([ours[1]])
    assert numbers([many.shuffled(4, 16, seed=1)]) != numbers([ours[1]])


def test_batches_have_near_equal_lengths_in_an_order_without_trend(many: Examples) -> None:
    batches = epoch(many, 16, seed=0)
    lengths = [batch.attention_mask.sum(1) for batch in batches[:-1]]
    spans = torch.stack([own.max() - own.min() for own in lengths]).float()
    assert spans.mean() < 2  # of 60, where pairs at random span about 53
    means = torch.stack([own.float().mean() for own in lengths])
    trend = torch.corrcoef(torch.stack([means, torch.arange(len(means)).float()]))[0, 1]
    assert abs(trend) < 3 / len(means) ** 0.5  # three standard deviations of a correlation by chance


def test_what_fills_no_batch_is_not_the_shortest_or_longest(many: Examples) -> None:
    lengths = torch.cat([many.shuffled(i * 16 + 15, 63, seed=0).attention_mask.sum(1) for i in range(40)]).float()
    assert len(lengths) == 40 * (COUNT - 15 * 63)
    error = many.lengths.std() / len(lengths) ** 0.5
    assert abs(lengths.mean() - many.lengths.mean()) < 3 * error


def test_every_pool_is_sorted_for_itself(many: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "POOL", 1)
    examples._epoch.cache_clear()
    spans = [b.attention_mask.sum(1).max() - b.attention_mask.sum(1).min() for b in epoch(many, 16, seed=0)]
    examples._epoch.cache_clear()
    assert torch.stack(spans).float().mean() > 40  # a pool of one batch: as at random


@pytest.mark.parametrize(
    ("max_length", "buckets", "expected"),
    [(64, 4, {16, 32, 48, 64}), (64, 1, {64}), (50, 3, {17, 34, 50}), (16, 16, set(range(5, 17)))],
)
def test_batches_are_padded_to_few_lengths(tmp_path: Path, max_length: int, buckets: int, expected: set[int]) -> None:
    data = make_pairs(tmp_path, 300, max_length, buckets)
    widths = set()
    for batch in epoch(data, 4, seed=0):
        longest, width = int(batch.attention_mask.sum(1).max()), batch.input_ids.shape[1]
        assert width == min(w for w in expected if w >= longest)
        widths.add(width)
    assert widths == expected


def test_held_out_batches_go_by_length_and_cover_all_once(many: Examples) -> None:
    batches = list(many.sorted(64))
    lengths = torch.cat([batch.attention_mask.sum(1) for batch in batches])
    assert (lengths.diff() >= 0).all()
    assert sorted(numbers(batches)) == list(range(COUNT))
    assert numbers(batches) == numbers(many.sorted(10)) == numbers(many.sorted(64))


def test_a_batch_travels_to_a_device_as_it_is(many: Examples) -> None:
    batch = send_to_device(many.shuffled(0, 4, seed=0), torch.device("meta"))
    assert isinstance(batch, ExampleBatch)
    assert {tensor.device.type for tensor in batch} == {"meta"}


@pytest.mark.parametrize(("top", "dtype"), [(2**16 - 1, np.uint16), (2**16, np.int32)])
def test_tokens_are_stored_as_small_as_they_are(tmp_path: Path, top: int, dtype: type) -> None:
    write_examples(tmp_path, "dev", [(np.array([1, top, 2, 3, 2], np.int32), 3, 2)])
    data = Examples(tmp_path, "dev", 8, 2, PAD)
    assert (data.tokens.dtype, data.labels.dtype, data.offsets.dtype) == (dtype, np.int8, np.int64)
    assert data.batch(np.array([0])).input_ids.tolist() == [[1, top, 2, 3, 2, 0, 0, 0]]


# The cache, with MNLI in it.


def write_mnli(folder: Path) -> ClassifyDataConfig:
    data = folder / "mnli"
    data.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]
    (data / "vocab.txt").write_text("\n".join(words))
    for name, count in (("train", 21), ("dev_matched", 5)):
        lines = [f'{{"premise": "{"a b " * (i + 1)}", "hypothesis": "c", "label": {i % 3}}}' for i in range(count)]
        (data / f"{name}.jsonl").write_text("\n".join(lines))
    return replace(MNLI, path=str(data), max_length=32, cache=str(folder / "cache"))


def contents(data: PreparedExamples) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in data.folder.iterdir()}


def test_steps_per_epoch_and_batches_of_the_data(tmp_path: Path) -> None:
    data = prepare(write_mnli(tmp_path), quiet=True)
    assert [data.steps_per_epoch(*a) for a in ((1,), (4,), (21,), (64,), (4, 2), (4, 4), (4, 8))] == [
        21,
        6,
        1,
        1,
        3,
        2,
        1,
    ]
    rows = [tuple(row) for i in range(6) for row in data.train_batch(i, 4, seed=0).input_ids.tolist()]
    assert len(rows) == 21
    assert sum(len(batch.labels) for batch in data.dev.sorted(2)) == 5
    assert torch.equal(next(data.dev.sorted(2)).input_ids, next(data.dev.sorted(2)).input_ids)


def test_the_second_time_the_cache_is_opened_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_mnli(tmp_path)
    first = prepare(config, quiet=True)
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # not even the library is needed
    again = prepare(replace(config, buckets=2), quiet=True)
    assert again.folder == first.folder
    assert again.train_batch(0, 21, seed=0).input_ids.shape == (21, 32)


def test_other_contents_vocabulary_or_settings_give_another_cache(tmp_path: Path) -> None:
    config = write_mnli(tmp_path)
    data = Path(config.path)
    fields = ({}, {"max_length": 16}, {"max_examples": 7})
    folders = [prepare(replace(config, **field), quiet=True).folder for field in fields]
    for file in (data / "vocab.txt", data / "dev_matched.jsonl", data / "train.jsonl"):
        file.write_text(file.read_text().replace("f", "g").replace('"c"', '"d"'))
        folders.append(prepare(config, quiet=True).folder)
    assert len(set(folders)) == 6


def test_preparing_again_elsewhere_gives_the_same_bytes(tmp_path: Path) -> None:
    config = write_mnli(tmp_path)
    one = prepare(config, quiet=True)
    moved = Path(config.path).rename(tmp_path / "moved")
    two = prepare(replace(MNLI, path=str(moved), max_length=32, cache=str(tmp_path / "other")), quiet=True)
    assert one.folder.name == two.folder.name
    ours, theirs = contents(one), contents(two)
    noted = [json.loads(each.pop("manifest.json")) for each in (ours, theirs)]
    assert noted[0] | {"names": noted[1]["names"]} == noted[1]  # which say where the pairs were
    assert {**ours, SUMS: b""} == {**theirs, SUMS: b""}


@pytest.mark.parametrize("file", ["manifest.json", "train.tokens.npy", "train.labels.npy", "dev.offsets.npy"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, file: str, damage: str) -> None:
    config = write_mnli(tmp_path)
    data = prepare(config, quiet=True)
    good = contents(data)
    (data.folder / file).unlink()
    if damage == "truncated":
        (data.folder / file).write_bytes(good[file][:-3])
    assert contents(prepare(config, quiet=True)) == good


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_preparation_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    config = write_mnli(tmp_path)

    def interrupted(folder: Path, part: str, written: list[Example]) -> dict[str, int]:
        if part == "dev":
            raise error
        return write_examples(folder, part, written)

    with monkeypatch.context() as patch:
        patch.setattr(examples, "write_examples", interrupted)
        with pytest.raises(error):
            prepare(config, quiet=True)
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]
    assert prepare(config, quiet=True).train_size == 21


def test_a_killed_preparation_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    config = write_mnli(tmp_path)
    program = f"""
import json
import os
from comera.recipes.classify import data as mnli
from comera.recipes.data import prepared
write = prepared.write_examples
prepared.write_examples = lambda folder, part, rows: write(folder, part, rows) if part == "train" else os._exit(9)
mnli.prepare(mnli.{config!r}, quiet=True)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    left = {file.suffix for file in (tmp_path / "cache").iterdir()}
    assert left == {".lock", ".partial"}
    data = prepare(config, quiet=True)
    assert data.train_size == 21
    assert {file.name for file in (tmp_path / "cache").iterdir()} == {data.folder.name, f"{data.folder.name}.lock"}


def test_two_that_prepare_at_once_share_one_result(tmp_path: Path) -> None:
    config = write_mnli(tmp_path)
    with ThreadPoolExecutor(3) as pool:  # the lock is of the file, so threads meet it as processes do
        one, two, three = pool.map(lambda _: prepare(config, quiet=True), range(3))
    assert one.folder == two.folder == three.folder
    np.testing.assert_array_equal(one.train.tokens, three.train.tokens)


def test_the_lock_is_free_after_success_and_after_failure(tmp_path: Path) -> None:
    config = write_mnli(tmp_path)
    prepare(config, quiet=True)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(prepare, config, quiet=True).result(timeout=10).dev_size == 5


def test_a_cache_that_is_a_file_is_a_config_error(tmp_path: Path) -> None:
    config = write_mnli(tmp_path)
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match=r"data\.cache: expected a writable folder, got .*cache \("):
        prepare(config, quiet=True)


@pytest.mark.skipif("COMERA_DATA" not in os.environ, reason="COMERA_DATA names no folder with mnli/ and vocab/")
def test_the_real_sample(tmp_path: Path) -> None:
    config = replace(MNLI, path=str(Path(os.environ["COMERA_DATA"], "mnli")), cache=str(tmp_path))
    data = prepare(config, quiet=True)
    assert (data.train_size, data.dev_size, data.vocab_size) == (41_379, 9_815, 30_522)
    assert data.label_counts["dev"] == {"entailment": 3_479, "neutral": 3_123, "contradiction": 3_213}
    assert sum(data.skipped.values()) == 0
    padded = sum(data.train_batch(i, 64, seed=0).input_ids.numel() for i in range(data.steps_per_epoch(64)))
    assert padded / data.train_size < 60  # of 128; the tokens themselves are 39.5


# --- checksums of prepared data ---------------------------------------------------------------------------------------


def write_two(folder: Path) -> None:
    (folder / "small").write_bytes(bytes(10))
    (folder / "large").write_bytes(bytes(1000))


def load(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("small", "large")]


def test_of_large_data_only_small_files_are_compared_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "VERIFIED_BYTES", 1000)
    monkeypatch.setattr(cache, "SMALL_BYTES", 500)
    folder, good = tmp_path / "data", [bytes(10), bytes(1000)]
    assert open_or_make(folder, load, write_two) == good
    assert not caplog.text
    (folder / "large").write_bytes(b"1" * 1000)
    assert open_or_make(folder, load, write_two)[1] == b"1" * 1000
    assert "to compare all, run xxh128sum -c XXH128SUMS" in caplog.text
    (folder / "small").write_bytes(b"1" * 10)
    assert open_or_make(folder, load, write_two) == good
    (folder / "large").unlink()
    assert open_or_make(folder, load, write_two) == good


def test_data_of_before_checksums_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_or_make(tmp_path / "data", load, write_two)
    (tmp_path / "data" / "XXH128SUMS").unlink()
    assert open_or_make(tmp_path / "data", load, write_two) == [bytes(10), bytes(1000)]
    assert "it has no XXH128SUMS" in caplog.text
    assert (tmp_path / "data" / "XXH128SUMS").exists()


def test_rows_are_not_encoded_with_damaged_dictionaries(tmp_path: Path) -> None:
    folder = read(write(tmp_path / "train.txt", ROWS[:60])).folder
    RowEncoder(folder)
    path = folder / "C03.table.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match=r"C03\.table\.npy differs from its checksum"):
        RowEncoder(folder)
    (folder / "XXH128SUMS").unlink()  # prepared before there were checksums
    path.write_bytes(whole)
    RowEncoder(folder)
