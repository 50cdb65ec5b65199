"""A linear layer in block tensor train format beside its other forms: forward and backward at equal FLOPs.

`kernel` and `torch`: a product with a block tensor train by the C++ kernel and by torch's batched products. `low_rank`:
the C++ kernel for the two factors of a tensor train, of the rank at which they take as many FLOPs, without the merge of
its cores. `dense`: torch's linear layer. The sides alternate in one process; times are medians, and `times_low_rank` is
the median of the ratios within a turn.

    python benchmarks/block_product.py [--rows 32 512 4096] [--repeats 30] [--dry]      3 minutes
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

LAYERS = [(384, 384), (768, 768), (768, 3072), (3072, 768)]
RANKS = (1, 2)
TRIALS = {32: 300, 512: 60, 4096: 20}  # turns by rows of x
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
    factors, weight = LowRankFactors(leaf(equal, features), leaf(1 + equal, out_features)), leaf(out_features, features)

    def blocks() -> Tensor:
        return block_product(x, r_NK, l_KM, spec, bias)

    leaves = [x, r_NK, l_KM, bias]
    dy = torch.randn(rows, out_features)
    run = with_backward if backward else without_grad
    sides = {
        "kernel": run(blocks, leaves, dy, "all"),
        "low_rank": run(lambda: low_rank(x, factors)[0], [x, *factors], dy, "all"),
        "torch": run(blocks, leaves, dy, "none"),
        "dense": run(lambda: F.linear(x, weight, bias), [x, weight, bias], dy, "none"),
    }
    seconds = in_turns(sides, repeats, warm_ups=min(3, repeats))
    ms = {side: statistics.median(times) * 1e3 for side, times in seconds.items()}
    ratio = statistics.median(a / b for a, b in zip(seconds["kernel"], seconds["low_rank"], strict=True))
    flops = 2 * rows * count * (n + m) * (3 if backward else 1)  # h, which the backward makes again, is counted once
    return {
        "layer": f"{features} → {out_features}",
        "rank": rank,
        "rows": rows,
        "products": "forward and backward" if backward else "forward",
        "kernel_ms": f"{ms['kernel']:.3f}",
        "low_rank_ms": f"{ms['low_rank']:.3f}",
        "torch_ms": f"{ms['torch']:.3f}",
        "dense_ms": f"{ms['dense']:.3f}",
        "kernel_gflops": f"{flops / ms['kernel'] / 1e6:.0f}",
        "low_rank_gflops": f"{flops / ms['low_rank'] / 1e6:.0f}",
        "times_low_rank": f"{ratio:.2f}",
        "goal": f"{GOAL:g}",
        "reached": "yes" if ratio <= GOAL else "no",
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
