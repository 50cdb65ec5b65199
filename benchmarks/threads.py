"""C++ kernels on one and on two threads, and how many of 16 threads would have work.

Forward and backward of each kernel at the sizes of the six-encoder transformer (768 wide, 12 heads, feed-forward 3,072,
rank 30, 128 tokens a sample). `times`: speed with two threads over that with one, the median of turns that alternate.
`busy_of_16`: of 16 threads, those that computed for at least a quarter of an equal share, by the scheduler's clock; a
machine with fewer cores runs them one after the other. Merges hand their trains out as threads come, so their figure is
a lower bound.

    python benchmarks/threads.py [--batches 1 32] [--repeats 30]        2 minutes, on a quiet machine
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from common import about, in_turns, update

from comera.kernels.cpp import (
    adamw,
    attention,
    block_product,
    cross_entropy,
    gated,
    gradients,
    lookup,
    low_rank,
    low_rank_cross_entropy,
    merge,
    mlp,
    residual_norm,
    rotary,
)
from comera.kernels.cpp.library import unavailable_reason
from comera.tt.shapes import btt_spec, tt_spec

WIDE, HIDDEN, HEADS, RANK, TOKENS, CLASSES = 768, 3072, 12, 30, 128, 8192
MANY = 16
SHARE = 0.25  # of an equal share of the time: less is not having work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="samples of 128 tokens")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--busy", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if reason := unavailable_reason():
        raise SystemExit(f"this benchmark needs the C++ kernels, but {reason}")
    if options.busy:
        print(json.dumps({name: busy_threads(run) for name, run in kernels(options.busy).items()}))
        return
    for batch in options.batches:
        busy = in_another_process(batch)
        for name, run in kernels(batch).items():
            sides = {count: on_threads(count, run) for count in (1, 2)}
            seconds = in_turns({str(count): side for count, side in sides.items()}, options.repeats, visit=3)
            ratios = [one / two for one, two in zip(seconds["1"], seconds["2"], strict=True)]
            row = {"kernel": name, "samples": batch}
            row |= {f"ms_{count}": f"{statistics.median(times) * 1e3:.3g}" for count, times in seconds.items()}
            row |= {"times": f"{statistics.median(ratios):.2f}", "busy_of_16": busy[name]}
            print(" ".join(f"{value!s:>14}" for value in row.values()), flush=True)
            torch.set_num_threads(2)
            update("threads", [row | about()], ("kernel", "samples"))


def on_threads(count: int, run: Callable[[], object]) -> Callable[[], None]:
    """A run on so many threads."""

    def side() -> None:
        torch.set_num_threads(count)
        run()

    return side


def in_another_process(batch: int) -> dict[str, int]:
    """Busy threads of each kernel, where threads that have nothing to do sleep instead of spinning."""
    command = [sys.executable, __file__, "--busy", str(batch)]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, int] = json.loads(child.stdout.splitlines()[-1])
    return found


def busy_threads(run: Callable[[], object], calls: int = 40) -> int:
    """How many of 16 threads compute for their part of the time of a kernel."""
    torch.set_num_threads(MANY)
    run()
    before = computed()
    for _ in range(calls):
        run()
    spent = [ns - before.get(thread, 0) for thread, ns in computed().items()]
    return sum(ns >= SHARE * sum(spent) / MANY for ns in spent)


def computed() -> dict[str, int]:
    """Nanoseconds that each thread of this process has been running. The calling one, which also prepares the calls,
    counts like the others."""
    assert threading.active_count() == 1
    tasks = Path("/proc/self/task").iterdir()
    return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks}


def kernels(batch: int) -> dict[str, Callable[[], object]]:
    """Forward and backward of each kernel for a batch of samples."""
    torch.manual_seed(0)
    rows, heads = batch * TOKENS, WIDE // HEADS
    x, z, hidden = torch.randn(rows, WIDE), torch.randn(rows, WIDE), torch.randn(rows, HIDDEN)
    q, k, v = (torch.randn(batch, TOKENS, HEADS, heads).transpose(1, 2) for _ in range(3))
    seed, weight, bias = torch.tensor(3), torch.ones(WIDE), torch.zeros(WIDE)
    three = [torch.randn(RANK, WIDE) for _ in range(3)], [torch.randn(1 + RANK, WIDE) for _ in range(3)]
    up_down = [torch.randn(RANK, WIDE), torch.randn(RANK, HIDDEN)], [torch.randn(31, HIDDEN), torch.randn(31, WIDE)]
    angles = torch.randn(1, TOKENS, heads)
    logits, labels = torch.randn(rows, CLASSES), torch.randint(CLASSES, (rows,))
    head_p, head_b = torch.randn(rows, RANK), torch.randn(1 + RANK, CLASSES)

    def low_rank_products() -> object:
        p, *_ = low_rank.low_rank(x, *three)
        return low_rank.low_rank_backward(x, p, [z, z, z], *three, True, True, True)

    def mlp_products() -> object:
        p, found, _ = mlp.mlp(x, *up_down, "gelu")
        return mlp.mlp_backward(x, p, found, z, *up_down, "gelu", True)

    def attending() -> object:
        settings = None, seed, 0.1, heads**-0.5, False
        o, norms = attention.attention(q, k, v, *settings)
        return attention.attention_backward(o, o, norms, q, k, v, *settings)

    def norms() -> object:
        _, s, mean, rstd = residual_norm.residual_norm(z, x, weight, bias, seed, 0.1, 1e-5)
        return residual_norm.residual_norm_backward(z, s, mean, rstd, weight, seed, 0.1)

    def gating() -> object:
        gated.gated(hidden, hidden, "silu")
        return gated.gated_backward(hidden, hidden, hidden, "silu")

    blocks = btt_spec(WIDE, WIDE, rank=1)
    count = blocks.ranks[1]
    of_blocks = torch.ones(WIDE // blocks.sizes[0], WIDE // blocks.sizes[1], dtype=torch.int64)
    btt = [torch.randn(blocks.sizes[0], count)], [torch.randn(count, blocks.sizes[1])], [bias], [None], [of_blocks]

    def block_products() -> object:
        block_product.block_product(x, *btt, [WIDE])
        return block_product.block_product_backward(x, [z], *btt, True, True, True)

    trains = [tt_spec(WIDE, out, order=6, rank=RANK) for out in [WIDE] * 24 + [HIDDEN] * 6]
    shapes = [(*spec.core_shapes, *((rank,) for rank in spec.inner_ranks)) for spec in trains]
    params = [torch.randn(shape) for each in shapes for shape in each]
    biases = [torch.randn(spec.out_features) for spec in trains]
    layouts = [size for t in trains for size in (t.order, t.split, WIDE, t.out_features, *t.sizes, *t.ranks)]
    factors = merge.merge(params, biases, layouts, 0.0)
    came = [torch.randn_like(each) for each in params]
    states = [each for p in params for each in (torch.zeros_like(p), torch.zeros_like(p), torch.tensor(1.0))]
    held = adamw.Held(params, states)

    def merging() -> object:
        merge.merge(params, biases, layouts, 0.0)
        return merge.merge_backward(factors, params, biases, layouts, 0.0)

    def optimizing() -> object:
        gradients.clip_(came, 1.0)
        group = held.group(came, [1e-6] * len(came), [0.0] * len(came))
        assert group is not None
        adamw.step([group], betas=(0.9, 0.99), eps=1e-8)
        return came

    operands = [torch.randint(176**2, (rows,))], [torch.randn(176, 24, RANK)], [torch.randn(176, 32, RANK)]
    numbers = [None], [176**2], [-1], [0.0]

    def looking_up() -> object:
        found = lookup.pair_rows(*operands, *numbers)
        return lookup.pair_rows_backward(found, *operands, [None], *numbers, [True, True, False])

    return {
        "low_rank": low_rank_products,
        "mlp": mlp_products,
        "attention": attending,
        "residual_norm": norms,
        "gated": gating,
        "rotary": lambda: rotary.rotary(q, k, angles, angles, False),
        "cross_entropy": lambda: cross_entropy.cross_entropy(logits, labels, -1),
        "low_rank_cross_entropy": lambda: low_rank_cross_entropy.low_rank_cross_entropy(
            head_p, head_b, labels, -1, True
        ),
        "block_product": block_products,
        "merge": merging,
        "lookup": looking_up,
        "clip, adamw": optimizing,
    }


if __name__ == "__main__":
    main()
