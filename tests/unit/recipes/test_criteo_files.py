"""Criteo's files: which are read, as blocks of whole lines from any place, and every file that cannot be."""

import gzip
import os
import random
from pathlib import Path

import pytest

from comera.errors import DataError
from comera.recipes.dlrm.criteo import rows as criteo_files
from comera.recipes.dlrm.criteo.rows import Place, find_files, read_blocks, stamp

LINES = [b"%d\t" % k + b"x" * (k * 37 % 90) + b"\n" for k in range(400)]
TEXT = b"".join(LINES)


@pytest.fixture(params=[128, 257, 4096, 2**21])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    size: int = request.param
    monkeypatch.setattr(criteo_files, "BLOCK", size)
    return size


def plain(path: Path, text: bytes = TEXT) -> Path:
    path.write_bytes(text)
    return path


def zipped(path: Path, text: bytes = TEXT, members: int = 1) -> Path:
    size = -(-len(text) // members)
    path.write_bytes(b"".join(gzip.compress(text[k : k + size]) for k in range(0, len(text), size)))
    return path


def names(path: Path) -> list[str]:
    return [file.name for file in find_files(str(path))]


# Which files.


def test_a_folder_with_the_training_file(tmp_path: Path) -> None:
    for name in ("test.txt", "readme.txt", "train.txt.gz"):
        zipped(tmp_path / name)
    assert names(tmp_path) == ["train.txt.gz"]
    plain(tmp_path / "train.txt")
    assert names(tmp_path) == ["train.txt"]
    assert names(tmp_path / "test.txt") == ["test.txt"]


def test_days_are_in_order_and_each_one_once(tmp_path: Path) -> None:
    for name in ("day_10", "day_2.gz", "day_0.txt", "day_2", "day_11.tsv.gz", "day_1", "days", "today_3"):
        (zipped if name.endswith(".gz") else plain)(tmp_path / name)
    assert names(tmp_path) == ["day_0.txt", "day_1", "day_2", "day_10", "day_11.tsv.gz"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "nothing", "nothing, which does not exist: check data.path"),
        (lambda root: root, "expected train.txt or train.txt.gz or day_0, .* in .*, got nothing"),
        (lambda root: plain(root / "test.txt").parent, r"got test\.txt: check data\.path"),
        (lambda root: plain(root / "train.txt", b""), r"train\.txt: .* got an empty file"),
        (lambda root: plain(root / "train.txt.gz", b""), r"train\.txt\.gz: .* got an empty file"),
        (lambda root: plain(root / "train.txt.gz"), r"train\.txt\.gz: expected gzip, as the name says, got other data"),
        (lambda root: zipped(root / "dac.tar.gz"), r"dac\.tar\.gz: .* got an archive: unpack it"),
    ],
    ids=["missing", "empty folder", "folder without rows", "empty", "empty gz", "no gzip", "archive"],
)
def test_what_is_no_click_log(tmp_path: Path, make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(DataError, match=message):
        find_files(str(make(tmp_path)))


def test_a_stamp_tells_files_apart(tmp_path: Path) -> None:
    file = plain(tmp_path / "train.txt")
    first = stamp(file)
    assert stamp(file) == first
    status = file.stat()
    plain(file, TEXT[:-2] + b"y\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert stamp(file) != first


# Blocks.


def assert_whole(files: list[Path], texts: list[bytes], place: Place = criteo_files.START) -> list[Place]:
    """All blocks together are the texts from `place` on, and each stands where it says; returns their ends."""
    ends = []
    for block in read_blocks(files, place):
        assert block.begin == place or (block.begin.file > place.file and block.begin[1:] == (0, 0))
        text = texts[block.begin.file][block.begin.offset :]
        assert text.startswith(block.text) or text + b"\n" == block.text
        assert block.text.endswith(b"\n")
        assert block.begin.line == texts[block.begin.file][: block.begin.offset].count(b"\n")
        assert block.end.line == block.begin.line + block.text.count(b"\n")
        place = block.end
        ends.append(place)
    return ends


@pytest.mark.parametrize("make", [plain, zipped, lambda path: zipped(path, members=5)], ids=["plain", "gz", "members"])
def test_blocks_hold_each_line_once(tmp_path: Path, block: int, make: object) -> None:
    assert callable(make)
    files = [make(tmp_path / "day_0"), make(tmp_path / "day_1")]
    blocks = list(read_blocks(files))
    assert b"".join(b.text for b in blocks) == TEXT * 2
    assert blocks[-1].read == sum(file.stat().st_size for file in files)
    assert [b.read for b in blocks] == sorted(b.read for b in blocks)
    ends = assert_whole(files, [TEXT, TEXT])
    for place in ends[:: max(1, len(ends) // 7)]:  # reading goes on from any of them
        rest = b"".join(b.text for b in read_blocks(files, place))
        assert rest == (TEXT * 2)[place.file * len(TEXT) + place.offset :]
        assert_whole(files, [TEXT, TEXT], place)


@pytest.mark.parametrize("make", [plain, zipped])
def test_a_last_line_without_end_gets_one(tmp_path: Path, block: int, make: object) -> None:
    assert callable(make)
    files = [make(tmp_path / name, TEXT[:-1]) for name in ("day_0", "day_1")]
    assert b"".join(b.text for b in read_blocks(files)) == TEXT * 2
    assert_whole(files, [TEXT[:-1]] * 2)


def test_a_little_gzip_that_is_a_large_text_comes_in_small_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_files, "BLOCK", 4096)
    file = zipped(tmp_path / "train.txt", b"0\n" * 1_000_000)
    blocks = list(read_blocks([file]))
    assert max(len(block.text) for block in blocks) <= 2 * 4096
    assert sum(block.end.line - block.begin.line for block in blocks) == 1_000_000


def test_padding_behind_a_gzip_is_no_data(tmp_path: Path, block: int) -> None:
    file = zipped(tmp_path / "train.txt.gz", members=2)
    file.write_bytes(file.read_bytes() + b"\0" * 700)
    assert b"".join(b.text for b in read_blocks([file])) == TEXT


@pytest.mark.parametrize("share", [0.2, 0.5, 0.99])
def test_a_gzip_that_is_cut_short_ends_with_the_last_whole_line(tmp_path: Path, block: int, share: float) -> None:
    rng = random.Random(0)
    text = b"".join(b"%d\t%d\n" % (k, rng.randrange(10**9)) for k in range(3000))
    file = zipped(tmp_path / "train.txt.gz", text)
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    *blocks, last = read_blocks([file, plain(tmp_path / "day_1")])
    cut = next(block for block in [*blocks, last] if block.cut_short)
    read = b"".join(block.text for block in blocks if block.begin.file == 0)
    assert text.startswith(read)
    assert read.endswith(b"\n")
    assert (cut.text, cut.begin.offset, cut.end) == (b"", len(read), Place(1))
    assert b"".join(block.text for block in [*blocks, last] if block.begin.file == 1) == TEXT  # the next file is read


@pytest.mark.parametrize("damage", ["middle", "checksum", "behind"])
def test_a_damaged_gzip_names_file_and_line(tmp_path: Path, block: int, damage: str) -> None:
    data = bytearray(zipped(tmp_path / "train.txt.gz").read_bytes())
    if damage == "behind":
        data += b"no gzip"
    else:
        data[-6 if damage == "checksum" else len(data) // 2] ^= 0xFF
    (tmp_path / "train.txt.gz").write_bytes(data)
    with pytest.raises(DataError, match=r"train\.txt\.gz, line \d+: cannot be read .*: is the file complete"):
        list(read_blocks(find_files(str(tmp_path))))


def test_a_gzip_without_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.txt\.gz: expected rows of a click log, got no text"):
        list(read_blocks([empty_gzip(tmp_path / "train.txt.gz")]))


def empty_gzip(path: Path) -> Path:
    path.write_bytes(gzip.compress(b""))
    return path


def test_lines_without_end_are_no_click_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo_files, "BLOCK", 1000)
    file = plain(tmp_path / "train.txt", b"0\n1\n" + b"x" * 5000)
    with pytest.raises(DataError, match=r"train\.txt, line 3: expected lines of 40 fields, got 1,\d\d\d bytes without"):
        list(read_blocks([file]))
