"""What surrounds the layers of a decoder: our kernels beside torch and transformers, forward and backward.

`attention`: ops.attention with is_causal beside F.scaled_dot_product_attention. `rotary`: ops.rotary beside
transformers' apply_rotary_pos_emb. Heads are laid out as their projections leave them. `norm`, `sum and norm`:
ops.residual_norm beside transformers' LlamaRMSNorm, alone and after the residual sum. `gated`: ops.gated beside
silu(g) * u, four times as wide. `loss`: ops.cross_entropy of a dense head beside its logits and F.cross_entropy. The
sides alternate in one process; times are medians, and `ratio` is the median of the ratios within a turn.

    python benchmarks/decoder.py [--threads 1 2] [--repeats 60] [--dry]      4 minutes
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from common import about, in_turns, update
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from comera.kernels.cpp.library import unavailable_reason
from comera.ops.attention import attention
from comera.ops.cross_entropy import head_cross_entropy
from comera.ops.gated import gated
from comera.ops.residual_norm import residual_rms_norm
from comera.ops.rotary import rotary

# batch, heads of queries and of keys, length, width of a head
SHAPES = [(4, 12, 12, 128, 64), (4, 4, 4, 256, 64), (4, 8, 2, 256, 64), (1, 12, 12, 512, 64)]
ROWS = [(1024, 128), (1024, 256), (1024, 768)]  # tokens, features
HEADS = [(1024, 128, 8192), (1024, 128, 32_768)]  # tokens, features, vocabulary
EPS = 1e-6
GOAL = 1.0  # torch's time over ours

Sides = dict[str, Callable[[], object]]


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
        for shape, found in all_cases():
            for name, sides in found.items():
                row = measure(name, sides, shape, 1 if options.dry else options.repeats)
                print(" ".join(f"{value!s:>12}" for value in row.values()), flush=True)
                if not options.dry:
                    update("decoder", [row | about()], key=("operation", "shape", "threads"))


def all_cases() -> Iterator[tuple[tuple[int, ...], dict[str, Sides]]]:
    """Shapes, and for each of them both sides of each operation."""
    for found, shapes in ((of_heads, SHAPES), (of_rows, ROWS), (of_output, HEADS)):
        for shape in shapes:
            torch.manual_seed(0)
            yield shape, found(*shape)


def call(function: Callable[[], Sequence[Tensor]], leaves: list[Tensor]) -> Callable[[], object]:
    """A forward, and a backward to all leaves."""
    grads = [torch.randn_like(y) for y in function()]
    return lambda: torch.autograd.grad(function(), leaves, grads)


def of_rows(tokens: int, features: int) -> dict[str, Sides]:
    """Norms and gated activation."""
    z, x = (torch.randn(tokens, features, requires_grad=True) for _ in range(2))
    g, u = (torch.randn(tokens, 4 * features, requires_grad=True) for _ in range(2))
    norm = LlamaRMSNorm(features, EPS)
    weight = norm.weight

    def sum_and_norm() -> list[Tensor]:
        s = x + z
        return [s, norm(s)]

    return {
        "norm": {
            "comera": call(lambda: [residual_rms_norm(None, x, weight, EPS)[1]], [x, weight]),
            "torch": call(lambda: [norm(x)], [x, weight]),
        },
        "sum and norm": {
            "comera": call(lambda: residual_rms_norm(z, x, weight, EPS), [z, x, weight]),
            "torch": call(sum_and_norm, [z, x, weight]),
        },
        "gated": {
            "comera": call(lambda: [gated(g, u, "silu")], [g, u]),
            "torch": call(lambda: [F.silu(g) * u], [g, u]),
        },
    }


def of_output(tokens: int, features: int, vocabulary: int) -> dict[str, Sides]:
    """The loss of a dense head."""
    x = torch.randn(tokens, features, requires_grad=True)
    weight = (torch.randn(vocabulary, features) / features).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,))
    return {
        "loss": {
            "comera": call(lambda: [head_cross_entropy(x, labels, vocabulary, F.linear, [weight])], [x, weight]),
            "torch": call(lambda: [F.cross_entropy(F.linear(x, weight), labels, reduction="sum")], [x, weight]),
        }
    }


def of_heads(batch: int, heads: int, groups: int, length: int, width: int) -> dict[str, Sides]:
    """Attention and rotary embedding."""
    q, k, v = (torch.randn(batch, length, n, width).transpose(1, 2).requires_grad_() for n in (heads, groups, groups))
    angles = torch.randn(1, length, width // 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    grouped = heads != groups
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


def measure(name: str, sides: Sides, shape: tuple[int, ...], repeats: int) -> dict[str, object]:
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
