"""How far a training step is from this machine's limits: its roofline, for cases of step.py and shrunk_step.py.

Ceilings, measured: FLOP/s of a large float32 product, bytes/s of a copy that does not fit into the caches. Operations
are counted below autograd over one whole step: FLOPs, and bytes of operands and results. An operation takes at least
the larger of FLOPs/(FLOP/s) and, if its bytes exceed the caches, bytes/(bytes/s). The sum is the least time of the
step as it is programmed. `products_ms` is what the FLOPs alone would take. `best_ratio` is the ratio dense over fused
that no tuning of single operations on our side can exceed: dense's measured time over our least time; after the cut
to 0.2 of the size, that over the step before it. What recomputation must add is its least time over that without.

A second table says where the time of our own step goes: operations are timed in the counted steps, and what is left of
a step that is not counted is Python, autograd and the dispatcher. Counted, autograd adds gradients out of place, so
`aten.add` is dearer there. No ceiling here knows of exponentials, of random numbers for dropout, or of packing, which
takes as long as the product where there are few rows.

    python benchmarks/roofline.py [--repeats 5]      2 minutes
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import about, in_turns, write
from shrunk_step import make_steps
from step import CASES, LLAMA, make_batch, make_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

WANTED = {
    "batch 32": ("dense", "fused", "fused, recompute"),
    "batch 1": ("dense", "fused"),
    LLAMA: ("dense", "fused"),
}
CUT, CUT_SHAPE, TARGET = "32 × 48, cut to 0.2", (32, 48), 0.2
CACHE = 2**20  # bytes: operations on less are assumed to run in the caches
COUNTED = 3  # steps whose operations are timed
SMALL = 0.01  # operations that take less of the step are one row


@dataclass
class Cost:
    """What calls of one operation took and what they need at least."""

    calls: int = 0
    flops: int = 0
    nbytes: int = 0
    least: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, each) + getattr(other, each) for each in self.__dataclass_fields__))


class Counter(TorchDispatchMode):
    """Costs of what runs inside, by operation."""

    def __init__(self, flops_a_second: float, bytes_a_second: float) -> None:
        super().__init__()
        self.flops_a_second, self.bytes_a_second = flops_a_second, bytes_a_second
        self.costs: dict[str, Cost] = defaultdict(Cost)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - began
        if func.is_view:
            return out
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
        # each tensor once: one written in place is both operand and result
        tensors = {id(t): t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}
        nbytes = sum(_nbytes(tensor) for tensor in tensors.values())
        beyond = nbytes if nbytes > CACHE else 0
        least = max(flops / self.flops_a_second, beyond / self.bytes_a_second)
        self.costs[str(func._overloadpacket)] += Cost(1, flops, nbytes, least, seconds)
        return out


def _nbytes(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor; expanded dimensions count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def ceilings() -> tuple[float, float]:
    """FLOP/s of a product and bytes/s of a copy, counting reads and writes; the best of 15 tries."""
    size = 2048
    x, w, y = (torch.randn(size, size) for _ in range(3))
    source, target = torch.randn(2**25), torch.empty(2**25)
    product = _fastest(lambda: torch.mm(x, w, out=y))
    copy = _fastest(lambda: target.copy_(source))
    return 2 * size**3 / product, 2 * source.nbytes / copy


def _fastest(run: Callable[[], object]) -> float:
    return min(in_turns({"": run}, 15)[""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    operations: list[dict[str, Any]] = []
    for name, sides in WANTED.items():
        batch_size, _, dropout, precision, _ = CASES[name]
        batch = make_batch(name)
        steps = {side: make_step(side, batch, dropout, precision) for side in sides}
        found, parts = measure(name, steps, options.repeats, visit=4 if batch_size == 1 else 1)
        rows, operations = rows + found, operations + parts
        del steps
    rows += measure(CUT, make_steps(CUT_SHAPE, TARGET, multiple=1, dropout=0.1)[0], options.repeats, visit=2)[0]
    write("roofline", rows)
    write("roofline_operations", operations)


def measure(
    case: str, steps: dict[str, Callable[[], object]], repeats: int, visit: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each side, with ratios to the first one, and the parts of the fused side's step."""
    speeds = ceilings()
    times = in_turns(steps, repeats, warm_ups=1, visit=visit)
    seconds = {side: statistics.median(own) for side, own in times.items()}
    first = next(iter(seconds.values()))
    rows, parts = [], []
    for side, step in steps.items():
        costs = count(step, *speeds)
        total = sum(costs.values(), Cost())
        row = {
            "case": case,
            "side": side,
            "gflop": f"{total.flops / 1e9:.1f}",
            "gb": f"{total.nbytes / 1e9:.2f}",
            "operations": total.calls,
            "products_ms": f"{total.flops / speeds[0] * 1e3:.0f}",
            "least_ms": f"{total.least * 1e3:.1f}",
            "step_ms": f"{seconds[side] * 1e3:.0f}",
            "of_least": f"{total.least / seconds[side]:.2f}",
            "ratio": f"{first / seconds[side]:.2f}",
            "best_ratio": f"{first / total.least:.2f}",
            "gflop_per_s": f"{speeds[0] / 1e9:.0f}",
            "gb_per_s": f"{speeds[1] / 1e9:.1f}",
        }
        rows.append({**row, **about()})
        print(" ".join(f"{value!s:>10}" for value in row.values()), flush=True)
        if side == "fused":
            parts = list(by_operation(case, costs, seconds[side]))
    return rows, parts


def count(step: Callable[[], object], flops_a_second: float, bytes_a_second: float) -> dict[str, Cost]:
    """Costs of a step by operation, with the median seconds of a few steps after a first one."""
    step()
    counters = [Counter(flops_a_second, bytes_a_second) for _ in range(COUNTED)]
    for counter in counters:
        with counter:
            step()
    return {
        name: replace(cost, seconds=statistics.median(counter.costs[name].seconds for counter in counters))
        for name, cost in counters[0].costs.items()
    }


def by_operation(case: str, costs: dict[str, Cost], step_seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each operation, the longest first, one for all small ones, and one for what is no operation."""
    small = sum((cost for cost in costs.values() if cost.seconds < SMALL * step_seconds), Cost())
    large = {name: cost for name, cost in costs.items() if cost.seconds >= SMALL * step_seconds}
    rest = Cost(seconds=step_seconds - sum(cost.seconds for cost in costs.values()))
    parts = dict(sorted(large.items(), key=lambda part: -part[1].seconds))
    for name, cost in {**parts, "smaller ones": small, "between them": rest}.items():
        yield {
            "case": case,
            "operation": name,
            "calls": cost.calls,
            "gflop": f"{cost.flops / 1e9:.2f}",
            "gb": f"{cost.nbytes / 1e9:.3f}",
            "ms": f"{cost.seconds * 1e3:.1f}",
            "of_step": f"{cost.seconds / step_seconds:.3f}",
            "least_ms": f"{cost.least * 1e3:.1f}",
            **about(),
        }


if __name__ == "__main__":
    main()
