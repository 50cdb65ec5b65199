"""How far a training step is from this machine's limits: its roofline, for cases of step.py and shrunk_step.py.

Ceilings, measured: FLOP/s of a large float32 product, bytes/s of a copy that does not fit into the caches. Operations
are counted below autograd over one whole step: FLOPs, and bytes of operands and results. An operation takes at least
the larger of FLOPs/(FLOP/s) and, if its bytes exceed the caches, bytes/(bytes/s). The sum is the least time of the
step as it is programmed. `products_ms` is what the FLOPs alone would take. `best_ratio` is the ratio dense over fused
that no tuning of single operations on our side can exceed: dense's measured time over our least time; after the cut
to 0.2 of the size, that over the step before it. What recomputation must add is its least time over that without.

    python benchmarks/roofline.py [--repeats 5]      2 minutes
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
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


class Counter(TorchDispatchMode):
    """Least seconds of what runs inside, with its FLOPs, bytes and operations."""

    def __init__(self, flops_a_second: float, bytes_a_second: float) -> None:
        super().__init__()
        self.flops_a_second, self.bytes_a_second = flops_a_second, bytes_a_second
        self.flops = self.bytes = self.operations = 0
        self.least = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
        # each tensor once: one written in place is both operand and result
        tensors = {id(t): t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}
        nbytes = sum(_nbytes(tensor) for tensor in tensors.values())
        self.flops, self.bytes, self.operations = self.flops + flops, self.bytes + nbytes, self.operations + 1
        beyond = nbytes if nbytes > CACHE else 0
        self.least += max(flops / self.flops_a_second, beyond / self.bytes_a_second)
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
    rows = []
    for name, sides in WANTED.items():
        batch_size, _, dropout, precision, _ = CASES[name]
        batch = make_batch(name)
        steps = {side: make_step(side, batch, dropout, precision) for side in sides}
        rows += measure(name, steps, options.repeats, visit=4 if batch_size == 1 else 1)
        del steps
    rows += measure(CUT, make_steps(CUT_SHAPE, TARGET, multiple=1, dropout=0.1)[0], options.repeats, visit=2)
    write("roofline", rows)


def measure(case: str, steps: dict[str, Callable[[], object]], repeats: int, visit: int) -> list[dict[str, Any]]:
    """A row for each side; ratios are those to the first one."""
    flops_a_second, bytes_a_second = ceilings()
    times = in_turns(steps, repeats, warm_ups=1, visit=visit)
    seconds = {side: statistics.median(own) for side, own in times.items()}
    first = next(iter(seconds.values()))
    rows = []
    for side, step in steps.items():
        with Counter(flops_a_second, bytes_a_second) as counted:
            step()
        row = {
            "case": case,
            "side": side,
            "gflop": f"{counted.flops / 1e9:.1f}",
            "gb": f"{counted.bytes / 1e9:.2f}",
            "operations": counted.operations,
            "products_ms": f"{counted.flops / flops_a_second * 1e3:.0f}",
            "least_ms": f"{counted.least * 1e3:.1f}",
            "step_ms": f"{seconds[side] * 1e3:.0f}",
            "of_least": f"{counted.least / seconds[side]:.2f}",
            "ratio": f"{first / seconds[side]:.2f}",
            "best_ratio": f"{first / counted.least:.2f}",
            "gflop_per_s": f"{flops_a_second / 1e9:.0f}",
            "gb_per_s": f"{bytes_a_second / 1e9:.1f}",
        }
        rows.append({**row, **about()})
        print(" ".join(f"{value!s:>10}" for value in row.values()), flush=True)
    return rows


if __name__ == "__main__":
    main()
