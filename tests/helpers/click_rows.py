"""Random rows of Criteo's form, good and bad, a parser that takes them one field at a time, and prepared data."""

import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comera.files import SUMS
from comera.recipes.dlrm.criteo import ClickData, CriteoConfig, prepare
from comera.recipes.dlrm.criteo import columns as criteo_columns
from comera.recipes.dlrm.criteo import columns as criteo_ids
from comera.recipes.dlrm.criteo import rows as criteo_files
from comera.recipes.dlrm.criteo.columns import features
from comera.recipes.dlrm.criteo.rows import CATEGORY, INTEGER, LABEL, TOO_FEW, TOO_MANY

INTEGERS, CATEGORIES = 13, 26
BAD_FIELDS = {
    LABEL: ["", "2", "-1", "01", "a", "1.0", " 1", "\xb1"],
    INTEGER: [
        "-",
        "+1",
        "1.0",
        "1e3",
        "2147483648",
        "-2147483649",
        "00000000001",
        "9" * 20,
        " 1",
        "a",
        "--1",
        "1-",
        "/",
    ],
    CATEGORY: [
        "0x12",
        "g",
        "123456789",
        "-1",
        " ab",
        "ab ",
        "@",
        "`",
        "G0000000",
        "/0000000",
        ":0000000",
        "\xe9",
        "\x10",
    ],
}


def random_row(rng: random.Random, kinds: int = 40) -> list[str]:
    """The 40 fields of a good row, some empty; categories out of `kinds`."""
    integers = [rng.choice(["", "0", "-1", "7", "-2147483648", "2147483647", "0012345678"]) for _ in range(5)]
    integers += [str(int(rng.lognormvariate(3, 3)) % 2**31) for _ in range(INTEGERS - len(integers))]
    rng.shuffle(integers)
    categories = [
        "" if rng.random() < 0.2 else f"{hash((k, rng.randrange(kinds))) % 2**32:08x}" for k in range(CATEGORIES)
    ]
    categories[rng.randrange(CATEGORIES)] = rng.choice(["A", "0f", "ABCDEF01", "00000000", "ffffffff"])
    return [str(rng.randrange(2)), *integers, *categories]


def spoil(row: list[str], kind: str, rng: random.Random) -> list[str]:
    """The row with one mistake of this kind."""
    row = list(row)
    if kind == TOO_FEW:
        del row[rng.randrange(len(row)) :]
    elif kind == TOO_MANY:
        row.insert(rng.randrange(len(row)), "0")
    else:
        first, count = {LABEL: (0, 1), INTEGER: (1, INTEGERS), CATEGORY: (1 + INTEGERS, CATEGORIES)}[kind]
        row[first + rng.randrange(count)] = rng.choice(BAD_FIELDS[kind])
    return row


def lines_of(rows: Sequence[Sequence[str]], end: str = "\n") -> bytes:
    return "".join("\t".join(row) + end for row in rows).encode("latin-1")


def good_rows(count: int, seed: int = 0, kinds: int = 40) -> list[list[str]]:
    rng = random.Random(seed)
    return [random_row(rng, kinds) for _ in range(count)]


def write(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    path.write_bytes(lines_of(rows))
    return path


Naive = tuple[int, list[float], list[int]]


def naive(line: bytes, labeled: bool = True) -> str | Naive:
    """What is wrong with a line, or its label, logarithms and values."""
    fields = line.decode("latin-1").removesuffix("\r").split("\t")
    expected = 39 + labeled
    if len(fields) != expected:
        return TOO_FEW if len(fields) < expected else TOO_MANY
    if labeled and fields[0] not in ("0", "1"):
        return LABEL
    dense, values = [], []
    for field in fields[labeled : labeled + INTEGERS]:
        if field and (not re.fullmatch(r"-?[0-9]{1,10}", field) or not -(2**31) <= int(field) < 2**31):
            return INTEGER
        dense.append(float(np.float32(math.log1p(max(0, int(field or 0))))))
    for field in fields[labeled + INTEGERS :]:
        if not re.fullmatch(r"[0-9a-fA-F]{0,8}", field):
            return CATEGORY
        values.append(int(field or "0", 16))
    return int(fields[0]) if labeled else 0, dense, values


ROWS = good_rows(1500, kinds=30)


def read(path: Path, **fields: Any) -> ClickData:
    """Prepared, in a cache folder beside the file."""
    return prepare(CriteoConfig(path=str(path), cache=str(path.parent / "cache"), **fields), quiet=True)


def contents(folder: Path) -> dict[str, bytes]:
    """All files of prepared data, but what its manifest says of their origin, and its checksum."""
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != SUMS}
    manifest = json.loads(files.pop("manifest.json"))
    kept = {key: value for key, value in manifest.items() if key not in ("source", "digest", "bad_rows")}
    return {**files, "manifest": json.dumps(kept, sort_keys=True).encode()}


def small_blocks(monkeypatch: pytest.MonkeyPatch, size: int = 8192, checkpoint: int = 1) -> None:
    """As if the data were large."""
    for module in (criteo_files, criteo_columns):
        monkeypatch.setattr(module, "BLOCK", size)
    monkeypatch.setattr(criteo_columns, "CHECKPOINT", checkpoint)
    monkeypatch.setattr(criteo_ids, "CHUNK", size // 8)


def assert_same_rows(left: ClickData, right: ClickData) -> None:
    for name in ("label.bin", "dense.bin", *(f"{feature}.ids.bin" for feature in features())):
        assert (left.folder / name).read_bytes() == (right.folder / name).read_bytes()


def spoiled(kind: str, count: int) -> list[list[str]]:
    """ROWS and `count` bad ones, on the lines 21, 42, ..."""
    rng, result = random.Random(0), [list(row) for row in ROWS]
    for k in range(count):
        result.insert(21 * k + 20, spoil(ROWS[k], kind, rng))
    return result
