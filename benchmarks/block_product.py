"""A linear layer in block tensor train format beside its other forms: forward and backward at equal FLOPs.

`kernel` and `torch`: a product with a block tensor train by the C++ kernel and by torch's batched products. `low_rank`:
the C++ kernel for the two factors of a tensor train, of the rank at which they take as many FLOPs, without the merge of
its cores. `dense`: torch's linear layer between narrower features, of as many FLOPs: what a narrower dense model takes.
The sides alternate in one process; times are medians, `times_low_rank` and `times_dense` medians of the ratios within a
turn. FLOPs are those of the products alone, three times as many forward and backward; the kernel makes h twice.

    python benchmarks/block_product.py [--rows 32 1024] [--repeats 30] [--dry]      3 minutes
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import about, in_turns, update
from torch import Tensor

from comera.kernels.cpp.library import unavailable_reason
from comera.ops.block_product import block_product
from comera.ops.low_rank import LowRankFactors, low_rank
from comera.tt.shapes import btt_spec

LAYERS = [(n, n) for n in (128, 192, 256, 384, 768)] + [(384, 1024), (1024, 384), (768, 2048)]
RANKS = (1, 2)
TRIALS = {32: 200, 1024: 60}  # turns by rows of x
GOAL = 1.0  # time over that of low rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(TRIALS))
    parser.add_argument("--repeats", type=int, help="turns of each case (default: TRIALS in the script)")
    parser.add_argument("--dry", action="store_true", help="one turn of each case; writes nothing")
    options = parser.parse_args()
    if reason := unavailable_reason():
        raise SystemExit(f"this benchmark needs the C++ kernels, but {reason}")
    for rows in options.rows:
        for features, out_features in LAYERS:
            for rank in RANKS:
                repeats = 1 if options.dry else options.repeats or TRIALS.get(rows, 20)
                found = [measure(rows, features, out_features, rank, repeats, backward) for backward in (False, True)]
                for row in found:
                    print(" ".join(f"{value!s:>9}" for value in row.values()), flush=True)
                if not options.dry:
                    key = ("layer", "rank", "rows", "products")
                    update("block_product", [row | about() for row in found], key=key)


def measure(rows: int, features: int, out_features: int, rank: int, repeats: int, backward: bool) -> dict[str, object]:
    """One row of results."""
    torch.manual_seed(0)
    spec = btt_spec(features, out_features, rank=rank)
    (n, m), count = spec.sizes, spec.ranks[1]
    equal = round(count * (n + m) / (features + out_features))  # rank of a tensor train
    x, bias = leaf(rows, features), leaf(out_features)
    r_NK, l_KM = leaf(n, count), leaf(count, m)
    factors = LowRankFactors(leaf(equal, features), leaf(1 + equal, out_features))
    narrow = max(1, round((features * count * (n + m) / out_features) ** 0.5))
    narrow_out = max(1, round(count * (n + m) / narrow))
    narrow_x, weight, narrow_bias = leaf(rows, narrow), leaf(narrow_out, narrow), leaf(narrow_out)

    def blocks() -> Tensor:
        return block_product(x, r_NK, l_KM, spec, bias)

    leaves = [x, r_NK, l_KM, bias]
    dy = torch.randn(rows, out_features)
    run = with_backward if backward else without_grad
    sides = {
        "kernel": run(blocks, leaves, dy, "all"),
        "low_rank": run(lambda: low_rank(x, factors)[0], [x, *factors], dy, "all"),
        "torch": run(blocks, leaves, dy, "none"),
        "dense": run(
            lambda: F.linear(narrow_x, weight, narrow_bias),
            [narrow_x, weight, narrow_bias],
            torch.randn(rows, narrow_out),
            "none",
        ),
    }
    seconds = in_turns(sides, repeats, warm_ups=min(3, repeats))
    ms = {side: statistics.median(times) * 1e3 for side, times in seconds.items()}
    times = {
        side: statistics.median(a / b for a, b in zip(seconds["kernel"], seconds[side], strict=True))
        for side in ("low_rank", "dense")
    }
    flops = 2 * rows * count * (n + m) * (3 if backward else 1)
    return {
        "layer": f"{features} → {out_features}",
        "rank": rank,
        "rows": rows,
        "products": "forward and backward" if backward else "forward",
        **{f"{side}_ms": f"{each:.3f}" for side, each in ms.items()},
        **{f"{side}_gflops": f"{flops / each / 1e6:.0f}" for side, each in ms.items()},
        "times_low_rank": f"{times['low_rank']:.2f}",
        "times_dense": f"{times['dense']:.2f}",
        "goal": f"{GOAL:g}",
        "reached": "yes" if times["low_rank"] <= GOAL else "no",
        "repeats": repeats,
    }


def leaf(*shape: int) -> Tensor:
    """Weights of order one over the root of their first side, where gradients are wanted."""
    weights: Tensor = torch.randn(shape) / shape[0] ** 0.5
    return weights.requires_grad_()


def with_backward(
    function: Callable[[], Tensor], leaves: list[Tensor], dy: Tensor, kernels: str
) -> Callable[[], object]:
    """A call of the function and all gradients, with these kernels."""

    def run() -> None:
        os.environ["COMERA_KERNELS"] = kernels
        torch.autograd.grad(function(), leaves, dy)

    return run


def without_grad(
    function: Callable[[], Tensor], leaves: list[Tensor], dy: Tensor, kernels: str
) -> Callable[[], object]:
    """A call of the function alone."""

    def run() -> None:
        os.environ["COMERA_KERNELS"] = kernels
        with torch.no_grad():
            function()

    return run


if __name__ == "__main__":
    main()
