"""Finds the files of Criteo's click log and reads them as blocks of whole lines, in bounded memory.

The Kaggle data is one file, train.txt, in time order; the larger sets have one file a day. Either may be gzipped."""

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from comera.errors import DataError
from comera.files import typed_path

TRAIN = ("train.txt", "train.txt.gz")  # as published, in a folder with a test file that has no labels
DAY = re.compile(r"day_?(\d+)(\.txt|\.tsv)?(\.gz)?")
GZIP = b"\x1f\x8b"
BLOCK = 2 * 2**20  # bytes of text at a time: fits the caches, yet large enough to amortize the calls
END_MISSING = "the compressed file ends here, cut short"
GZIP_ERRORS = (OSError, EOFError, zlib.error)
STAMP = 2**20  # bytes at either end that identify a file, besides its size and time


class Place(NamedTuple):
    """Where reading resumes: index of the file, bytes of its text read, lines read."""

    file: int = 0
    offset: int = 0
    line: int = 0


START = Place()


class Block(NamedTuple):
    """Whole lines of a file, each ended by a newline. begin, end: their places. read: bytes of all files read so far
    (compressed bytes, for a progress bar). cut_short: the file is compressed and ends in the middle of what follows."""

    text: bytes
    begin: Place
    end: Place
    read: int
    cut_short: bool = False


def find_files(path: str) -> list[Path]:
    """The file `path`; for a folder, its train.txt, or else its files day_0, day_1, … in that order. Files may be
    gzipped. Raises DataError if there are none, or one is empty, an archive, or named .gz but not gzip."""
    root = typed_path(path, "data.path")
    if root.is_dir():
        present = sorted(root.iterdir(), reverse=True)  # if a day is both plain and compressed, the plain file counts
        days = {int(match[1]): file for file in present if (match := DAY.fullmatch(file.name))}
        train = [file for file in map(root.joinpath, TRAIN) if file.is_file()][:1]
        files = train or [days[day] for day in sorted(days)]
        if not files:
            names = ", ".join(file.name for file in present[::-1][:10]) or "nothing"
            raise DataError(f"expected {' or '.join(TRAIN)} or day_0, day_1, … in {root}, got {names}: check data.path")
    elif root.exists():
        files = [root]
    else:
        raise DataError(
            f"expected Criteo's click log, a file or a folder, got {root}, which does not exist: check data.path"
        )
    for file in files:
        _check(file)
    return files


def stamp(file: Path) -> list[object]:
    """Identifies a file without reading all of it: size, modification time, digest of both ends."""
    status = file.stat()
    with open(file, "rb") as raw:
        ends = raw.read(STAMP)
        raw.seek(max(0, status.st_size - STAMP))
        ends += raw.read(STAMP)
    return [status.st_size, status.st_mtime_ns, hashlib.blake2b(ends, digest_size=16).hexdigest()]


def read_blocks(files: Sequence[Path], place: Place = START) -> Iterator[Block]:
    """The text of all files from `place` on, a few megabytes at a time; adds a missing newline at the end of a file.
    Raises DataError, with file and line, for unreadable files, endless lines and files without lines."""
    before = sum(file.stat().st_size for file in files[: place.file])
    for number in range(place.file, len(files)):
        file = files[number]
        yield from _read_file(file, place if place.file == number else Place(number), before)
        before += file.stat().st_size


def first_line(file: Path) -> bytes:
    """The first line of a file, plain or gzipped, with its end; raises GZIP_ERRORS."""
    with open(file, "rb") as raw:
        compressed = raw.read(len(GZIP)) == GZIP
        raw.seek(0)
        return (gzip.GzipFile(fileobj=raw) if compressed else raw).readline(BLOCK)


def _check(file: Path) -> None:
    if file.exists() and not file.is_file():
        raise DataError(f"{file}: expected a file, got a folder, pipe or device: check data.path")
    try:
        with open(file, "rb") as raw:
            start = raw.read(len(GZIP))
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}): check data.path") from error
    if not start:
        raise DataError(f"{file}: expected rows of a click log, got an empty file: fetch it again")
    if file.name.endswith((".tar.gz", ".tgz", ".tar", ".zip")):
        raise DataError(f"{file}: expected the rows themselves, got an archive: unpack it and name the file inside")
    if file.suffix == ".gz" and start != GZIP:
        raise DataError(f"{file}: expected gzip, as the name says, got other data: rename it or fetch it again")


def _read_file(file: Path, place: Place, before: int) -> Iterator[Block]:
    text, whole = bytearray(), False  # read, but not yet part of a block
    try:
        with open(file, "rb") as raw:
            compressed = raw.read(len(GZIP)) == GZIP
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if compressed else raw
            stream.seek(place.offset)  # in a compressed file: reads up to there
            while chunk := stream.read1(BLOCK - len(text)):
                text += chunk
                if len(text) < BLOCK:
                    continue
                cut = text.rfind(b"\n") + 1
                if not cut:
                    raise DataError(
                        f"{file}, line {place.line + 1}: expected lines of 40 fields, got {len(text):,} bytes without "
                        "a newline: is this Criteo's click log? Check data.path"
                    )
                block = _block(bytes(text[:cut]), place, before + raw.tell())
                yield block
                place = block.end
                del text[:cut]
            whole = True
    except EOFError:
        del text[text.rfind(b"\n") + 1 :]  # the rows so far are good; the caller decides
    except (OSError, zlib.error) as error:
        raise DataError(
            f"{file}, line {place.line + 1}: cannot be read ({error}): is the file complete? Fetch it again"
        ) from error
    size = before + file.stat().st_size
    if text:
        block = _block(bytes(text), place, size)
        yield block
        place = block.end
    if not whole:
        yield Block(b"", place, Place(place.file + 1), size, cut_short=True)
    elif not place.offset:
        raise DataError(f"{file}: expected rows of a click log, got no text in it: fetch it again")


def _block(text: bytes, begin: Place, read: int) -> Block:
    """A block that begins with this text, with a newline at its end."""
    whole = text if text.endswith(b"\n") else text + b"\n"
    return Block(whole, begin, Place(begin.file, begin.offset + len(text), begin.line + whole.count(b"\n")), read)
