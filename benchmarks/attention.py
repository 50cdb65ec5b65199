"""Causal attention and rotary embedding of decoders: our kernels beside torch, forward and backward.

`attention`: ops.attention with is_causal beside F.scaled_dot_product_attention. `rotary`: ops.rotary beside
transformers' apply_rotary_pos_emb. Heads are laid out as their projections leave them. The sides alternate in one
process; times are medians, and `ratio` is the median of the ratios within a turn.

    python benchmarks/attention.py [--threads 1 2] [--repeats 60] [--dry]      1 minute
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from common import about, in_turns, update
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from comera.kernels.cpp.library import unavailable_reason
from comera.ops.attention import attention
from comera.ops.rotary import rotary

# batch, heads of queries and of keys, length, width of a head
SHAPES = [(4, 12, 12, 128, 64), (4, 4, 4, 256, 64), (4, 8, 2, 256, 64), (1, 12, 12, 512, 64)]
GOAL = 1.0  # torch's time over ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=60, help="turns of each case")
    parser.add_argument("--dry", action="store_true", help="one turn of each case; writes nothing")
    options = parser.parse_args()
    if reason := unavailable_reason():
        raise SystemExit(f"this benchmark needs the C++ kernels, but {reason}")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for shape in SHAPES:
            for name, sides in cases(*shape).items():
                row = measure(name, sides, shape, 1 if options.dry else options.repeats)
                print(" ".join(f"{value!s:>12}" for value in row.values()), flush=True)
                if not options.dry:
                    update("attention", [row | about()], key=("operation", "shape", "threads"))


def cases(batch: int, heads: int, groups: int, length: int, width: int) -> dict[str, dict[str, Callable[[], object]]]:
    """Both sides of both operations: calls with all gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, length, n, width).transpose(1, 2).requires_grad_() for n in (heads, groups, groups))
    angles = torch.randn(1, length, width // 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    grouped = heads != groups

    def call(function: Callable[[], Sequence[Tensor]], leaves: list[Tensor]) -> Callable[[], object]:
        grads = [torch.randn_like(y) for y in function()]
        return lambda: torch.autograd.grad(function(), leaves, grads)

    return {
        "attention": {
            "comera": call(lambda: [attention(q, k, v, is_causal=True)], [q, k, v]),
            "torch": call(
                lambda: [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)], [q, k, v]
            ),
        },
        "rotary": {
            "comera": call(lambda: rotary(q, k, cos, sin), [q, k]),
            "torch": call(lambda: apply_rotary_pos_emb(q, k, cos, sin), [q, k]),
        },
    }


def measure(
    name: str, sides: dict[str, Callable[[], object]], shape: tuple[int, ...], repeats: int
) -> dict[str, object]:
    """One row of results."""
    seconds = in_turns(sides, repeats, warm_ups=min(3, repeats))
    ratio = statistics.median(b / a for a, b in zip(seconds["comera"], seconds["torch"], strict=True))
    return {
        "operation": name,
        "shape": " x ".join(map(str, shape)),
        "threads": torch.get_num_threads(),
        "comera_ms": f"{statistics.median(seconds['comera']) * 1e3:.3f}",
        "torch_ms": f"{statistics.median(seconds['torch']) * 1e3:.3f}",
        "ratio": f"{ratio:.2f}",
        "goal": f"{GOAL:g}",
        "reached": "yes" if ratio >= GOAL else "no",
        "repeats": repeats,
    }


if __name__ == "__main__":
    main()
