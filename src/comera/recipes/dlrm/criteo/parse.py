"""Parses rows of Criteo's click log, thousands at a time and without a loop over rows.

    label \\t 13 integers \\t 26 hexadecimal categories \\n

A good row has 40 fields between 39 tabs; any other is bad and skipped. The value of a field is read from the eight
bytes that end with it, as one 64-bit word whose lanes are folded in pairs: 8 × 1 digit, 4 × 2, 2 × 4, 1 × 8. A column
thus takes about twenty vector operations, however long its fields are.
As in the published DLRM, a missing or negative integer is 0, an integer x becomes log(1 + x), a missing category is 0.
Threads would spend most of their time waiting for one another, as the operations are many and short. So this file is
also a program that parses blocks from its standard input: as a separate process it starts as fast as numpy loads,
without torch, and without running the caller's script again, as `multiprocessing` would.
B bytes of a block, R good rows, F fields."""

import pickle
import re
import sys
from typing import Any, BinaryIO, NamedTuple

import numpy as np

INTEGERS, CATEGORIES = 13, 26
TOO_FEW, TOO_MANY, LABEL, INTEGER, CATEGORY = KINDS = (
    "too few fields",
    "too many fields",
    "label other than 0 or 1",
    "unparsable integer",
    "category that is not hexadecimal",
)
CUT_SHORT = "file cut short"  # a compressed file lacks its end, and part of its last row
FORMS = {"label": rb"[01]", "integer": rb"(-?[0-9]{1,10})?", "category": rb"[0-9a-fA-F]{0,8}"}
WORD = 8  # bytes

Array = np.ndarray[Any, Any]


class Rows(NamedTuple):
    """The good rows of a block, and the places of the bad ones. labels: (R,) uint8; dense: (13, R) float32, log(1 + x);
    values: (26, R) uint32, 0 where missing. lines: in the block. bad_lines: int64 indices, from 0, of the bad lines;
    bad_kinds: uint8 indices into KINDS of their first mistakes."""

    labels: Array
    dense: Array
    values: Array
    lines: int
    bad_lines: Array
    bad_kinds: Array


def parse(block: bytes, labeled: bool = True) -> Rows:
    """Parse a block of whole lines, each ended by a newline (a carriage return before it is ignored). labeled: whether
    rows begin with a label; otherwise labels are 0."""
    bytes_B = np.zeros(WORD + len(block), np.uint8)  # room for the word that ends with the first field
    bytes_B[WORD:] = np.frombuffer(block, np.uint8)
    separators = np.flatnonzero(bytes_B - np.uint8(ord("\t")) < 2)  # tab and newline are adjacent codes
    last = np.flatnonzero(bytes_B[separators] == ord("\n"))  # of each line
    fields = np.diff(last, prepend=-1)
    expected = labeled + INTEGERS + CATEGORIES
    whole = fields == expected
    lines = np.flatnonzero(whole)

    begins = np.concatenate([[WORD], separators[last[:-1]] + 1])[whole] if len(last) else last
    ends_FR = np.ascontiguousarray(separators[np.repeat(whole, fields)].reshape(-1, expected).T)
    ends_FR[-1] -= bytes_B[ends_FR[-1] - 1] == ord("\r")
    reader = _Reader(bytes_B, begins, ends_FR)

    kinds = np.full(len(lines), len(KINDS), np.uint8)  # of the first mistake in each row
    if labeled:
        labels, valid = reader.labels()
        kinds[~valid] = KINDS.index(LABEL)
    else:
        labels = np.zeros(len(lines), np.uint8)
    dense = np.empty((INTEGERS, len(lines)), np.float32)
    for k in range(INTEGERS):
        integers, valid = reader.integers(labeled + k)
        dense[k] = log_integers(integers)
        kinds[~valid] = np.minimum(kinds[~valid], KINDS.index(INTEGER))
    values = np.empty((CATEGORIES, len(lines)), np.uint32)
    for k in range(CATEGORIES):
        values[k], valid = reader.categories(labeled + INTEGERS + k)
        kinds[~valid] = np.minimum(kinds[~valid], KINDS.index(CATEGORY))

    good = kinds == len(KINDS)
    bad_lines = np.concatenate([np.flatnonzero(~whole), lines[~good]])
    miscounted = np.where(fields[~whole] < expected, KINDS.index(TOO_FEW), KINDS.index(TOO_MANY))
    bad_kinds = np.concatenate([miscounted.astype(np.uint8), kinds[~good]])
    if not good.all():
        labels, dense, values = labels[good], dense[:, good], values[:, good]
    order = np.argsort(bad_lines)
    return Rows(labels, dense, values, len(last), bad_lines[order], bad_kinds[order])


def log_integers(integers: Array) -> Array:
    """log(1 + x), 0 for negative x, rounded once from double precision: float32."""
    return np.log1p(np.maximum(integers, 0), dtype=np.float64).astype(np.float32)


def explain(line: bytes, labeled: bool = True) -> str:
    """What is wrong with a bad line: the field, what was expected and what came."""
    fields = line.rstrip(b"\n").removesuffix(b"\r").split(b"\t")
    expected = labeled + INTEGERS + CATEGORIES
    if len(fields) != expected:
        return f"expected {expected} fields between tabs, got {len(fields)} ({_quote(line)})"
    counts = {"integer": INTEGERS, "category": CATEGORIES}
    names = ["label"] * labeled + [f"{kind} {k + 1}" for kind, count in counts.items() for k in range(count)]
    wanted = {"label": "0 or 1", "integer": "a decimal integer of 32 bits", "category": "up to 8 hexadecimal digits"}
    for name, field in zip(names, fields, strict=True):
        kind = name.split()[0]
        if not re.fullmatch(FORMS[kind], field) or (kind == "integer" and field and not -(2**31) <= int(field) < 2**31):
            return f"expected {wanted[kind]} as {name}, got {_quote(field)}"
    raise AssertionError(f"a good line: {line!r}")


def _quote(text: bytes) -> str:
    return repr(text[:60].decode("utf-8", "replace")) + ("…" if len(text) > 60 else "")


def _lanes(byte: int) -> np.uint64:
    """A word with this byte in each of its lanes."""
    word: np.uint64 = np.uint64(int.from_bytes(bytes([byte]) * WORD, "little"))
    return word


# A word of n characters, the last one highest, keeps its upper n lanes; the rest are filled with "0".
KEEP = np.array([(2**64 - 1) << 8 * (WORD - n) & (2**64 - 1) for n in range(WORD + 1)], np.uint64)
FILL = ~KEEP & _lanes(ord("0"))
HIGH_BITS, HIGH_NIBBLES, LOW_NIBBLES = _lanes(0x80), _lanes(0xF0), _lanes(0x0F)
PAIRS, QUADS, OCTET = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFFFFFF)


class _Reader:
    """Reads the fields of a block. ends_FR: place of the separator after each field; begins: start of each row."""

    def __init__(self, bytes_B: Array, begins: Array, ends_FR: Array) -> None:
        self.bytes_B, self.begins, self.ends_FR = bytes_B, begins, ends_FR
        # overlapping words, one ending before each place
        self.words = np.ndarray((len(bytes_B) - WORD + 1,), "<u8", bytes_B.data, strides=(1,))

    def _field(self, index: int) -> tuple[Array, Array, Array]:
        begins = self.ends_FR[index - 1] + 1 if index else self.begins
        ends = self.ends_FR[index]
        return begins, ends, ends - begins

    def _word(self, ends: Array, lengths: Array) -> Array:
        """The last characters before `ends`, at most 8, padded with zeros in front."""
        word: Array = self.words[ends - WORD]
        word &= KEEP[lengths]
        word |= FILL[lengths]
        return word

    def labels(self) -> tuple[Array, Array]:
        """Values, uint8, and whether each is valid."""
        begins, _, lengths = self._field(0)
        labels = self.bytes_B[begins] - np.uint8(ord("0"))
        return labels, (lengths == 1) & (labels < 2)

    def integers(self, index: int) -> tuple[Array, Array]:
        """Values, int64, and whether each is valid."""
        begins, ends, lengths = self._field(index)
        negative = self.bytes_B[begins] == ord("-")
        digits = lengths - negative
        values, valid = _decimals(self._word(ends, np.minimum(digits, WORD)))
        long = np.flatnonzero(digits > WORD)
        if len(long):
            upper = np.minimum(digits[long] - WORD, WORD)
            above, valid_above = _decimals(self._word(ends[long] - WORD, upper))
            values[long] += above * 10**WORD
            valid[long] &= valid_above & (digits[long] <= 10) & (values[long] < 2**31 + negative[long])
        valid &= (digits > 0) | (lengths == 0)
        return np.where(negative, -values, values), valid

    def categories(self, index: int) -> tuple[Array, Array]:
        """Values, uint64 below 2³², and whether each is valid."""
        _, ends, lengths = self._field(index)
        values, valid = _hexadecimals(self._word(ends, np.minimum(lengths, WORD)))
        return values, valid & (lengths <= WORD)


def _decimals(words: Array) -> tuple[Array, Array]:
    """The number, int64, that eight decimal digits stand for, and whether they are digits."""
    lanes = words ^ _lanes(ord("0"))
    valid = ((lanes | (lanes + _lanes(6))) & HIGH_NIBBLES) == 0  # 10 + 6 reaches the upper nibble
    for scale, mask in ((10, PAIRS), (100, QUADS), (10_000, OCTET)):
        lanes = (lanes * np.uint64(scale) + (lanes >> np.uint64(8 * (scale.bit_length() // 3)))) & mask
    return lanes.astype(np.int64), valid


def _hexadecimals(words: Array) -> tuple[Array, Array]:
    """The number, uint64, that eight hexadecimal digits stand for, and whether they are digits."""
    letters = words | _lanes(0x20)  # lower case
    digit = (words + _lanes(0x80 - ord("0"))) & ~(words + _lanes(0x80 - ord("9") - 1))
    letter = (letters + _lanes(0x80 - ord("a"))) & ~(letters + _lanes(0x80 - ord("f") - 1))
    valid = ((digit | letter) & ~words & HIGH_BITS) == HIGH_BITS
    lanes = (words & LOW_NIBBLES) + ((words >> np.uint64(6)) & _lanes(1)) * np.uint64(9)
    for bits, mask in ((4, PAIRS), (8, QUADS), (16, OCTET)):
        lanes = ((lanes << np.uint64(bits)) | (lanes >> np.uint64(8 if bits == 4 else 2 * bits))) & mask
    return lanes, valid


def send(stream: BinaryIO, rows: Rows) -> None:
    """Write rows in the form that `receive` reads."""
    pickle.dump(tuple(rows), stream, protocol=5)
    stream.flush()


def receive(stream: BinaryIO) -> Rows:
    """Read rows; raises EOFError if the other process has ended."""
    try:
        return Rows(*pickle.load(stream))
    except pickle.UnpicklingError as error:  # cut short
        raise EOFError from error


def main() -> None:
    """Read blocks from standard input, each after its length, and write their rows, until the input ends."""
    while size := sys.stdin.buffer.read(8):
        send(sys.stdout.buffer, parse(sys.stdin.buffer.read(int.from_bytes(size, "little"))))


if __name__ == "__main__":
    main()
