"""The output head of a language model, forward and backward: dense, and over a table of plain low rank.

`dense`: torch's linear layer, features to vocabulary. `low_rank`: logits = (x Rᵀ) Lᵀ + bias of a `TTM.low_rank` table
by the C++ kernel, `torch` the same by torch's products. The sides alternate in one process; times are medians.

    python benchmarks/heads.py [--repeats 20] [--dry]      half a minute
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
from common import about, in_turns, update
from torch import nn

from comera import TTM
from comera.kernels.cpp.library import unavailable_reason
from comera.nn import TTMProjection

# rows, features, vocabulary and rank: CodeBERT in small (the masked tokens), a language model of the frontier,
# CodeBERT (the masked tokens of eight sequences)
CASES = [(154, 192, 8_192, 64), (1024, 256, 32_768, 32), (614, 768, 50_265, 160)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="turns of each case")
    parser.add_argument("--dry", action="store_true", help="one turn of each case; writes nothing")
    options = parser.parse_args()
    if reason := unavailable_reason():
        raise SystemExit(f"this benchmark needs the C++ kernels, but {reason}")
    found = [measure(*case, 1 if options.dry else options.repeats) for case in CASES]
    for row in found:
        print(" ".join(f"{value!s:>9}" for value in row.values()), flush=True)
    if not options.dry:
        update("heads", [row | about() for row in found], key=("rows", "features", "vocabulary", "rank"))


def measure(rows: int, features: int, vocabulary: int, rank: int, repeats: int) -> dict[str, object]:
    """One row of results."""
    torch.manual_seed(0)
    dense = nn.Linear(features, vocabulary)
    low_rank = TTMProjection(TTM.low_rank(rank).spec(vocabulary, features))
    x, dy = torch.randn(rows, features, requires_grad=True), torch.randn(rows, vocabulary)

    def both_ways(head: nn.Module, kernels: str) -> Callable[[], object]:
        leaves = [x, *head.parameters()]

        def run() -> None:
            os.environ["COMERA_KERNELS"] = kernels
            torch.autograd.grad(head(x), leaves, dy)

        return run

    sides = {
        "dense": both_ways(dense, "all"),
        "low_rank": both_ways(low_rank, "all"),
        "torch": both_ways(low_rank, "none"),
    }
    seconds = in_turns(sides, repeats, warm_ups=min(3, repeats))
    ms = {side: statistics.median(times) * 1e3 for side, times in seconds.items()}
    return {
        "rows": rows,
        "features": features,
        "vocabulary": vocabulary,
        "rank": rank,
        **{f"{side}_ms": f"{each:.2f}" for side, each in ms.items()},
        "times_dense": f"{ms['dense'] / ms['low_rank']:.2f}",
        "times_torch": f"{ms['torch'] / ms['low_rank']:.2f}",
        "repeats": repeats,
    }


if __name__ == "__main__":
    main()
