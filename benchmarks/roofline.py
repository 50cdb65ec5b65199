"""How far a training step is from this machine's limits: its roofline, for cases of step.py and shrunk_step.py.

Ceilings, measured: FLOP/s of a large float32 product, bytes/s of a copy that does not fit into the caches, and the
seconds of an exponential, an activation, its derivative and a random factor of dropout, by our kernels in the caches.
Operations are counted below autograd over one whole step: FLOPs, bytes of operands and results, and these functions.
An operation takes at least the larger of two: FLOPs/(FLOP/s) and its functions, which want the same units of a core;
and, if its bytes exceed the caches, bytes/(bytes/s). The sum is the least time of the step as it is programmed.
`products_ms` is what the FLOPs alone would take, `functions_ms` the functions. `best_ratio` is the ratio dense over
fused that no tuning of single operations on our side can exceed: dense's measured time over our least time; after the
cut to 0.2 of the size, that over the step before it. What recomputation must add is its least time over that without.

A second table says where the time of our own step goes: operations are timed in the counted steps, and what is left of
a step that is not counted is Python, autograd and the dispatcher. Counted, autograd adds gradients out of place, so
`aten.add` is dearer there. No ceiling here knows of packing, which takes as long as the product where rows are few.

    python benchmarks/roofline.py [--repeats 5]      2 minutes
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from common import about, in_turns, write
from shrunk_step import make_steps
from step import CASES, LLAMA, make_batch, make_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from comera.kernels.cpp.gated import ACTIVATIONS, gated, gated_backward
from comera.kernels.cpp.residual_norm import dropout

WANTED = {
    "batch 32": ("dense", "fused", "fused, recompute"),
    "batch 1": ("dense", "fused"),
    LLAMA: ("dense", "fused"),
}
CUT, CUT_SHAPE, TARGET = "32 × 48, cut to 0.2", (32, 48), 0.2
NOTHING = {f"aten.{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view")}
READS_ROWS = {"aten.embedding", "aten.index", "aten.index_select", "aten.gather"}  # as much as they make, and indices
COUNTED = 3  # steps whose operations are timed
SMALL = 0.01  # operations that take less of the step are one row


@dataclass
class Cost:
    """What calls of one operation took and what they need at least. functions: seconds of their functions alone.
    products: seconds of the FLOPs alone. beyond: bytes of calls that do not fit into the caches."""

    calls: int = 0
    flops: int = 0
    nbytes: int = 0
    functions: float = 0.0
    least: float = 0.0
    seconds: float = 0.0
    products: float = 0.0
    beyond: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, each) + getattr(other, each) for each in self.__dataclass_fields__))


@dataclass
class Ceilings:
    """What a machine does at most. functions: seconds of one, by name. cache: an operation on no more bytes is assumed
    to run in the caches. half_flops_a_second: of half precision, where it has units for that."""

    flops_a_second: float
    bytes_a_second: float
    functions: dict[str, float]
    cache: int = 2**20
    half_flops_a_second: float | None = None


class Counter(TorchDispatchMode):
    """Costs of what runs inside, by operation."""

    def __init__(self, ceilings: Ceilings) -> None:
        super().__init__()
        self.ceilings = ceilings
        self.costs: dict[str, Cost] = defaultdict(Cost)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - began
        name, ceilings, rows = str(func._overloadpacket), self.ceilings, str(func._overloadpacket) in READS_ROWS
        # each tensor once: one written in place is both operand and result
        tensors = {id(t): t for t in tree_leaves((args[rows:], kwargs, out)) if isinstance(t, Tensor)}
        # no views, nor what only allocates, or asks a tensor of Python's for its device
        if func.is_view or func.namespace in ("prim", "profiler") or name in NOTHING or not tensors:
            return out
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
        nbytes = sum(map(_nbytes, tensors.values())) + (_nbytes(out) if rows else 0)
        beyond = nbytes if nbytes > ceilings.cache else 0
        functions = sum(ceilings.functions[kind] * how_many for kind, how_many in functions_of(name, args))
        half = ceilings.half_flops_a_second if any(t.dtype.itemsize == 2 for t in tensors.values()) else None
        products = flops / (half or ceilings.flops_a_second)
        least = max(products + functions, beyond / ceilings.bytes_a_second)
        self.costs[name] += Cost(1, flops, nbytes, functions, least, seconds, products, beyond)
        return out


def functions_of(name: str, args: Any) -> Iterator[tuple[str, int]]:
    """The functions that an operation of ours evaluates, and how often."""
    match name.removeprefix("comera."), args:
        case "mlp", (x, _, bs, activation):
            yield activation, x.shape[0] * bs[0].shape[1]
        case "mlp_backward", (x, _, _, _, _, bs, activation, _):
            yield f"{activation} backward", x.shape[0] * bs[0].shape[1]
        case "gated", (g, _, activation):
            yield activation, g.numel()
        case "gated_backward", (_, g, _, activation):
            yield f"{activation} backward", g.numel()
        case "attention", (q, k, _, _, seed, _, _, is_causal):
            yield from _of_scores(q, k, seed, is_causal)
        case "attention_backward", (_, _, _, q, k, _, _, seed, _, _, is_causal):
            yield from _of_scores(q, k, seed, is_causal)
        case "residual_norm", (_, x, _, _, seed, *_) if seed is not None:
            yield "dropout", x.numel()
        case "residual_norm_backward", (_, s, _, _, _, seed, *_) if seed is not None:
            yield "dropout", s.numel()
        case "dropout", (x, *_):
            yield "dropout", x.numel()
        case "mlp" | "mlp_backward" | "gated" | "gated_backward" | "attention" | "attention_backward", _:
            raise TypeError(f"expected the operands of {name} as they are counted here, got {len(args)}")


def _of_scores(q: Tensor, k: Tensor, seed: Tensor | None, is_causal: bool) -> Iterator[tuple[str, int]]:
    scores = q.shape[:3].numel() * k.shape[2] // (2 if is_causal else 1)
    yield "exponential", scores
    if seed is not None:
        yield "dropout", scores


def _nbytes(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor; expanded dimensions count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def measured_ceilings() -> Ceilings:
    """FLOP/s of a product, bytes/s of a copy, which reads and writes, and seconds of functions; the best of tries."""
    size = 2048
    x, w, y = (torch.randn(size, size) for _ in range(3))
    source, target = torch.randn(2**25), torch.empty(2**25)
    product = _fastest(lambda: torch.mm(x, w, out=y), 15)
    copy = _fastest(lambda: target.copy_(source), 15)
    return Ceilings(2 * size**3 / product, 2 * source.nbytes / copy, seconds_of_functions())


def seconds_of_functions() -> dict[str, float]:
    """Each beyond a ReLU in the same kernel, which costs a pass over the caches. An exponential counts as SiLU's."""
    x, seed = torch.randn(2**17), torch.tensor(1)
    values = {name: _fastest(partial(gated, x, None, name), 200) for name in ACTIVATIONS}
    slopes = {name: _fastest(partial(gated_backward, x, x, None, name), 200) for name in ACTIVATIONS}
    found = {name: seconds - values["relu"] for name, seconds in values.items()}
    found |= {f"{name} backward": seconds - slopes["relu"] for name, seconds in slopes.items()}
    found |= {"exponential": found["silu"], "dropout": _fastest(partial(dropout, x, seed, 0.1), 200) - values["relu"]}
    return {name: max(0.0, seconds) / x.numel() for name, seconds in found.items()}


def _fastest(run: Callable[[], object], tries: int) -> float:
    return min(in_turns({"": run}, tries)[""])


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
    rows += measure(CUT, make_steps(CUT_SHAPE, TARGET, 1, 0.1, "eager")[0], options.repeats, visit=2)[0]
    write("roofline", rows)
    write("roofline_operations", operations)


def measure(
    case: str, steps: dict[str, Callable[[], object]], repeats: int, visit: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each side, with ratios to the first one, and the parts of the fused side's step."""
    ceilings = measured_ceilings()
    times = in_turns(steps, repeats, warm_ups=1, visit=visit)
    seconds = {side: statistics.median(own) for side, own in times.items()}
    first = next(iter(seconds.values()))
    rows, parts = [], []
    for side, step in steps.items():
        costs = count(step, ceilings)
        total = sum(costs.values(), Cost())
        row = {
            "case": case,
            "side": side,
            "gflop": f"{total.flops / 1e9:.1f}",
            "gb": f"{total.nbytes / 1e9:.2f}",
            "operations": total.calls,
            "products_ms": f"{total.flops / ceilings.flops_a_second * 1e3:.0f}",
            "functions_ms": f"{total.functions * 1e3:.1f}",
            "least_ms": f"{total.least * 1e3:.1f}",
            "step_ms": f"{seconds[side] * 1e3:.0f}",
            "of_least": f"{total.least / seconds[side]:.2f}",
            "ratio": f"{first / seconds[side]:.2f}",
            "best_ratio": f"{first / total.least:.2f}",
            "gflop_per_s": f"{ceilings.flops_a_second / 1e9:.0f}",
            "gb_per_s": f"{ceilings.bytes_a_second / 1e9:.1f}",
        }
        rows.append({**row, **about()})
        print(" ".join(f"{value!s:>10}" for value in row.values()), flush=True)
        if side == "fused":
            parts = list(by_operation(case, costs, seconds[side]))
    return rows, parts


def count(step: Callable[[], object], ceilings: Ceilings) -> dict[str, Cost]:
    """Costs of a step by operation, with the median seconds of a few steps after a first one."""
    step()
    counters = [Counter(ceilings) for _ in range(COUNTED)]
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
            "functions_ms": f"{cost.functions * 1e3:.1f}",
            "ms": f"{cost.seconds * 1e3:.1f}",
            "of_step": f"{cost.seconds / step_seconds:.3f}",
            "least_ms": f"{cost.least * 1e3:.1f}",
            **about(),
        }


if __name__ == "__main__":
    main()
