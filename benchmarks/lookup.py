"""Lookup of rows in a compressed table and their sums over bags, forward and backward, against three alternatives.

    comera        TTMEmbeddingBag
    comera, torch the same without the C++ kernel for lookups, which makes rows that are not summed over bags
    plain         every id gathers its slice of each core and multiplies them core by core, under autograd
    dense         nn.EmbeddingBag with a gradient of the whole table
    dense sparse  nn.EmbeddingBag(sparse=True), whose optimizer must support sparse gradients
    one call      ten tables by lookup_tables
    ten calls     the same tables one by one

Tables of order 4 and rank 32, float32: 10 M rows of 64 in bags of 10 ids, and one of Criteo's large Kaggle tables
with one id per bag; BERT's table of rank 30, whose vectors are not full. Ids uniform or by a power law (exponent 1.05).
The ten tables are Criteo's largest, of order 2 and rank 16, with one id per bag.
The sides alternate in one process, the slow ones less often. The added peak is the most that one step holds beyond the
table and its ids.

    python benchmarks/lookup.py [--threads 2] [--seconds 2.5]      2 minutes, 12 GB
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from common import about, write
from torch import Tensor, nn

from comera.kernels import select
from comera.memory.estimate import MemoryMeter
from comera.nn import TTMEmbeddingBag, lookup_tables
from comera.recipes.dlrm.criteo import KAGGLE_TABLES
from comera.tt.shapes import ttm_spec

# rows, columns, rank, bags, ids in a bag
CASES = [
    (10_000_000, 64, 32, 10_000, 10),
    (8_351_593, 16, 32, 10_000, 1),
    (8_351_593, 128, 32, 10_000, 1),
    (30_522, 768, 30, 4_096, 1),
]
TABLES, BATCHES = sorted(KAGGLE_TABLES)[-10:], (128, 2048)  # of the ten tables
LEAST, MOST = 2, 21  # measured steps per side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.5, help="of measured steps per side, roughly")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for table_rows, columns, rank, bags, width in CASES:
        sides = make_sides(table_rows, columns, rank)
        for law in ("uniform", "power law"):
            torch.manual_seed(0)
            ids, dsums = draw_ids(law, table_rows, (bags, width)), torch.randn(bags, columns)
            steps = {name: step(layer, ids, dsums) for name, layer in sides.items()}
            steps["comera, torch"] = without_kernel(steps["comera"])
            for name in ("comera", "comera, torch"):
                steps[name]()  # makes plans
            memory = {name: added_peak(sides[name.partition(",")[0]], run) for name, run in steps.items()}
            times = in_turns(steps, options.seconds)
            for name, (fastest, median) in times.items():
                row = {
                    "table": f"{table_rows} x {columns}",
                    "ids": f"{bags} x {width} {law}",
                    "different": ids.unique().numel(),
                    "side": name,
                    "fwd_bwd_ms": f"{median * 1e3:.1f}",
                    "fastest_ms": f"{fastest * 1e3:.1f}",
                    "times_torch": f"{times['comera, torch'][1] / median:.2f}",
                    "times_plain": f"{times['plain'][1] / median:.1f}",
                    "times_dense": f"{times['dense'][1] / median:.1f}",
                    "times_sparse": f"{times['dense sparse'][1] / median:.2f}",
                    "times_ten_calls": "",
                    "added_peak_MB": f"{memory[name] / 1e6:.0f}",
                }
                rows.append({**row, **about()})
                print(" ".join(map(str, row.values())), flush=True)
        del sides, steps
    rows += ten_tables(options.seconds)
    write("lookup", rows)


def ten_tables(seconds: float) -> list[dict[str, object]]:
    """Rows of the results for many tables, by one call and one by one."""
    torch.manual_seed(0)
    tables = nn.ModuleList(TTMEmbeddingBag(ttm_spec(size, 16, order=2, rank=16)) for size in TABLES)
    rows = []
    for batch in BATCHES:
        ids = torch.stack([torch.randint(size, (batch,)) for size in TABLES], 1)
        drows = [torch.randn(batch, 16) for _ in TABLES]
        steps = steps_of_ten(tables, ids, drows)
        for run in steps.values():
            run()  # makes plans
        memory = {name: added_peak(tables, run) for name, run in steps.items()}
        times = in_turns(steps, seconds)
        for name, (fastest, median) in times.items():
            row = {
                "table": "ten of Criteo x 16",
                "ids": f"{batch} x 1 uniform",
                "different": sum(each.unique().numel() for each in ids.unbind(1)),
                "side": name,
                "fwd_bwd_ms": f"{median * 1e3:.2f}",
                "fastest_ms": f"{fastest * 1e3:.2f}",
                **dict.fromkeys(("times_torch", "times_plain", "times_dense", "times_sparse"), ""),
                "times_ten_calls": f"{times['ten calls'][1] / median:.2f}",
                "added_peak_MB": f"{memory[name] / 1e6:.0f}",
            }
            rows.append({**row, **about()})
            print(" ".join(map(str, row.values())), flush=True)
    return rows


def steps_of_ten(tables: nn.ModuleList, ids: Tensor, drows: Sequence[Tensor]) -> dict[str, Callable[[], None]]:
    """Forward and backward of all tables, with new gradients each time."""

    def one_call() -> None:
        tables.zero_grad()
        torch.autograd.backward(lookup_tables(list(tables), ids), drows)

    def ten_calls() -> None:
        tables.zero_grad()
        columns = zip(tables, ids.unbind(1), strict=True)
        torch.autograd.backward([table(ids_B.unsqueeze(1)) for table, ids_B in columns], drows)

    return {"one call": one_call, "ten calls": ten_calls}


def draw_ids(law: str, rows: int, shape: tuple[int, int]) -> Tensor:
    """Ids of a table; for the power law in a random order of the rows, because frequent rows may be anywhere."""
    if law == "uniform":
        return torch.randint(rows, shape)
    tail = 1 - 1.05
    place = (1 - torch.rand(shape, dtype=torch.float64) * (1 - rows**tail)) ** (1 / tail)
    return torch.randperm(rows)[place.long().clamp(1, rows) - 1]


def make_sides(rows: int, columns: int, rank: int) -> dict[str, nn.Module]:
    """The layers to compare; the two dense ones share their table."""
    ours = TTMEmbeddingBag(ttm_spec(rows, columns, order=4, rank=rank))
    table = torch.full((rows, columns), 0.1)
    sides: dict[str, nn.Module] = {"comera": ours, "plain": Plain(ours)}
    for name, sparse in (("dense sparse", True), ("dense", False)):
        sides[name] = nn.EmbeddingBag(rows, columns, mode="sum", sparse=sparse, _weight=table)
    return sides


class Plain(nn.Module):
    """The cores multiplied one after the other for every id."""

    def __init__(self, layer: TTMEmbeddingBag) -> None:
        super().__init__()
        self.tt, self.spec = layer.tt, layer.spec

    def forward(self, ids: Tensor) -> Tensor:
        spec, rest = self.spec, ids.flatten()
        digits = []
        for mode in reversed(spec.row_modes):
            digits.append(rest % mode)
            rest = rest // mode
        rows = torch.ones(ids.numel(), 1, 1)
        for core, digit in zip(self.tt.effective_cores(), reversed(digits), strict=True):
            slices = core.transpose(0, 1)[digit]
            rows = torch.bmm(rows, slices.flatten(2)).view(ids.numel(), -1, core.shape[3])
        return rows.view(*ids.shape, -1)[..., : spec.embedding_dim].sum(1)


def step(layer: nn.Module, ids: Tensor, dsums: Tensor) -> Callable[[], None]:
    """Forward and backward, with new gradients each time."""

    def run() -> None:
        layer.zero_grad()
        layer(ids).backward(dsums)

    return run


def without_kernel(run: Callable[[], None]) -> Callable[[], None]:
    """A step with all kernels but that for lookups."""
    names = ",".join(name for name in select.NAMES if name != "lookup")

    def without() -> None:
        os.environ["COMERA_KERNELS"] = names
        try:
            run()
        finally:
            del os.environ["COMERA_KERNELS"]

    return without


def added_peak(layer: nn.Module, run: Callable[[], None]) -> int:
    """Peak bytes that a step adds to the process, gradients included."""
    layer.zero_grad()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    meter = MemoryMeter.start()
    run()
    return meter.added


def in_turns(steps: dict[str, Callable[[], None]], seconds: float) -> dict[str, tuple[float, float]]:
    """Fastest and median seconds of each side; every round runs the sides that are not done."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(MOST):
        for name, run in steps.items():
            taken = times[name]
            if len(taken) < LEAST or sum(taken) < seconds:
                started = time.perf_counter()
                run()
                taken.append(time.perf_counter() - started)
    return {name: (min(taken), statistics.median(taken)) for name, taken in times.items()}


if __name__ == "__main__":
    main()
