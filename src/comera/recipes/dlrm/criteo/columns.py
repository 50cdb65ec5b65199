"""Criteo's rows as columns on disk: parsed by several processes, written in order, resumable.

    blocks of text -> parsing processes -> label.bin (N,) uint8, dense.bin (N, 13) float32, C01.raw, … (N,) uint32

The columns grow as rows arrive; state.json regularly records how far they are good, and a killed preparation resumes
there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, cast

import numpy as np

from comera.errors import ComeraError, DataError
from comera.files import replace_file
from comera.recipes.dlrm.criteo import parse as parsing
from comera.recipes.dlrm.criteo.config import CriteoConfig
from comera.recipes.dlrm.criteo.files import BLOCK, END_MISSING, START, Block, Place, read_blocks
from comera.recipes.dlrm.criteo.ids import IDS
from comera.recipes.dlrm.criteo.parse import CATEGORIES, CUT_SHORT, INTEGERS, KINDS, Array, Rows
from comera.recipes.progress import Progress

FEATURES = tuple(f"C{k:02}" for k in range(1, CATEGORIES + 1))
LABELS, DENSE, RAW, STATE = "label.bin", "dense.bin", "raw", "state.json"
ROW_BYTES = {LABELS: 1, DENSE: 4 * INTEGERS, **{f"{name}.{RAW}": 4 for name in FEATURES}}
CHECKPOINT = 100  # blocks between two saves of the state
BLOCKS_EACH = 4  # that make a process worth starting
SHOWN = 3  # bad rows of each kind to show
# Parsing processes keep freed memory (glibc): fresh pages for each block took a third of their time.
ENVIRONMENT = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "1000000000")
ENVIRONMENT |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass
class State:
    """How far the columns are good. rows: good rows written. bad: bad rows by kind. shown: the first few of each kind,
    with file, line and mistake."""

    place: Place = START
    rows: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    shown: dict[str, list[str]] = field(default_factory=dict)
    complete: bool = False

    def save(self, folder: Path) -> None:
        replace_file(folder / STATE, json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> State | None:
        """The state of unfinished columns; None if there are none or they are damaged."""
        try:
            values = json.loads((folder / STATE).read_text("utf-8"))
            state = cls(**{**values, "place": Place(*values["place"])})
            whole = all(_column(folder, name).stat().st_size >= state.rows * size for name, size in ROW_BYTES.items())
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return state if whole else None

    @property
    def bad_rows(self) -> int:
        return sum(self.bad.values())


def _column(folder: Path, name: str) -> Path:
    """The file of a column: the ids, once they have replaced the values."""
    ids = folder / f"{name.split('.')[0]}.{IDS}"
    return ids if ids.exists() else folder / name


class Columns(ExitStack):
    """The files of the columns, open for appending; anything after the first `rows` rows is cut off."""

    def __init__(self, folder: Path, rows: int = 0) -> None:
        super().__init__()
        self._files = [self.enter_context(open(folder / name, "ab", buffering=0)) for name in ROW_BYTES]  # noqa: SIM115
        for file, size in zip(self._files, ROW_BYTES.values(), strict=True):
            file.truncate(rows * size)

    def append(self, labels: Array, dense: Array, values: Array) -> None:
        """Add rows: labels (R,), dense (13, R), values (26, R)."""
        for file, array in zip(self._files, [labels, dense.T, *values], strict=True):
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            while data:
                data = data[file.write(data) :]


def read_columns(files: Sequence[Path], folder: Path, config: CriteoConfig, progress: Progress) -> State:
    """Parse the files into columns in `folder`, from where an earlier call stopped; returns the complete state. Raises
    DataError, with file and line, for the first bad row beyond max_bad_rows, and for unreadable files."""
    if (state := State.load(folder)) is None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        state = State()
    if state.complete:
        return state
    size, max_rows = sum(file.stat().st_size for file in files), config.max_rows
    progress.start("reading the click log", size, "rows")
    workers = min(config.processes, size // (BLOCK * BLOCKS_EACH))
    with Columns(folder, state.rows) as columns, closing(parsed(read_blocks(files, state.place), workers)) as blocks:
        for number, (block, rows) in enumerate(blocks, 1):
            if max_rows is not None and len(rows.labels) > max_rows - state.rows:
                rows = _first(rows, max_rows - state.rows)
            _note_bad(state, files, block, rows, config.max_bad_rows)
            columns.append(rows.labels, rows.dense, rows.values)
            state.rows += len(rows.labels)
            state.place = block.end
            progress.to(block.read, state.rows)
            if state.rows == max_rows:
                break
            if number % CHECKPOINT == 0:
                state.save(folder)
    state.complete = True
    state.save(folder)
    return state


def _first(rows: Rows, count: int) -> Rows:
    """The first `count` good rows, with the bad ones between them."""
    end = int(np.delete(np.arange(rows.lines), rows.bad_lines)[count - 1]) + 1
    bad = rows.bad_lines < end
    good = (rows.labels[:count], rows.dense[:, :count], rows.values[:, :count])
    return Rows(*good, end, rows.bad_lines[bad], rows.bad_kinds[bad])


def _note_bad(state: State, files: Sequence[Path], block: Block, rows: Rows, limit: int) -> None:
    """Count the bad rows of a block; raises DataError for the first one beyond the limit."""
    found = [(line, KINDS[kind]) for line, kind in zip(rows.bad_lines.tolist(), rows.bad_kinds.tolist(), strict=True)]
    if block.cut_short:
        found.append((0, CUT_SHORT))
    lines: list[bytes] = []
    for line, kind in found:
        state.bad[kind] = state.bad.get(kind, 0) + 1
        shown = state.shown.setdefault(kind, [])
        over = state.bad_rows > limit
        if over or len(shown) < SHOWN:
            lines = lines or block.text.split(b"\n")
            what = END_MISSING if kind == CUT_SHORT else parsing.explain(lines[line])
            shown.append(f"{files[block.begin.file]}, line {block.begin.line + line + 1}: {what}")
            if over:
                raise too_many_bad(state.bad, shown[-1], limit)


def too_many_bad(bad: dict[str, int], last: str, limit: int) -> DataError:
    """The error for more bad rows than allowed; last: one of them, with file and line."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in bad.items())
    return DataError(
        f"{last}; that makes {sum(bad.values()):,} bad rows ({kinds}), and data.max_bad_rows allows {limit:,}: is this "
        "Criteo's click log, and complete? Repair the file, or raise data.max_bad_rows to skip such rows"
    )


def parsed(blocks: Iterable[Block], workers: int) -> Generator[tuple[Block, Rows], None, None]:
    """Blocks with their rows, in order, parsed by `workers` processes (in this one if below 2), a few at a time."""
    if workers < 2:
        for block in blocks:
            yield block, parsing.parse(block.text)
        return
    waiting: deque[tuple[Block, Future[Rows]]] = deque()
    with Parsers(workers) as parsers, ThreadPoolExecutor(workers) as pool:
        for block in blocks:
            waiting.append((block, pool.submit(parsers.parse, block.text)))
            if len(waiting) > 2 * workers:
                block, rows = waiting.popleft()
                yield block, rows.result()
        yield from ((block, rows.result()) for block, rows in waiting)


class Parsers(ExitStack):
    """Processes that parse blocks; they end with this process, however it ends."""

    def __init__(self, count: int) -> None:
        super().__init__()
        # not run as a script: its folder would shadow the standard library
        run = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
        command, pipe = [sys.executable, "-c", run, parsing.__file__], subprocess.PIPE
        environment = {**os.environ, **ENVIRONMENT}
        self._all: list[subprocess.Popen[bytes]] = []
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for _ in range(count):
            # in a new session, as this process handles keyboard interrupts
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
            self.enter_context(process)
            self.callback(process.kill)
            self._all.append(process)
            self._idle.put(process)

    def parse(self, text: bytes) -> Rows:
        """The rows of a block, parsed by an idle process; raises ComeraError if that has died."""
        process = self._idle.get()
        stdin, stdout = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
        try:
            stdin.write(len(text).to_bytes(8, "little"))
            stdin.write(text)
            stdin.flush()
            return parsing.receive(stdout)
        except (OSError, EOFError) as error:
            raise ComeraError(
                f"a process that parses the click log ended with exit code {process.wait()}: is there enough memory? "
                "Run again, with data.workers=1 to parse without further processes"
            ) from error
        finally:
            self._idle.put(process)
