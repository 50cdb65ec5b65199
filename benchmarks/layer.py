"""One encoder layer, dense and compressed: forward and backward, and a training step with fused AdamW.

A layer of transformers' BERT with heads of 64, a feed-forward block of four times its width, no dropout, on N x 128
tokens; compressed at rank width/16, at most 64, with `fuse_`. Dense attention is torch's SDPA. The sides alternate in
one process; ratios are those of the medians. Processors without bf16 arithmetic are so slow in bf16 that few shapes
are measured there, the slowest with a single dense step; `ratio_to_fp32` compares such a row with dense in float32.

    python benchmarks/layer.py [--width 512 ...] [--precision fp32 bf16] [--seconds 8]      4 minutes
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import about, update
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertLayer

import comera
from comera.convert import TT, TensorizeConfig
from comera.fusion import fuse_
from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups
from comera.recipes.bert import ModelConfig
from comera.trainer.step import autocast

LENGTH = 128
# width: samples per batch, as many as fit into the time
BATCHES: dict[str, dict[int, tuple[int, ...]]] = {
    "fp32": {512: (1, 8, 32), 1024: (1, 8, 32), 2048: (1, 8), 4096: (1, 8)},
    "bf16": {512: (1,), 1024: (1,), 2048: (1,), 4096: (1,)},
}
LARGE = (2048, 4096)  # widths whose dense step takes minutes in emulated bf16: only on request
SLOW = 4.0  # seconds; of steps slower than this the first one counts too
FLOOR, WIDEST = 1.0, 8.0  # goals for the ratio: at every width, and at width 4096 in float32


class Side:
    """A layer with its optimizer; products: seconds of forward and backward, steps: with the optimizer."""

    def __init__(self, width: int, compressed: bool) -> None:
        torch.manual_seed(0)
        sizes = ModelConfig(hidden=width, layers=1, heads=width // 64, ffn=4 * width)
        config = sizes.bert(100)
        config._attn_implementation = "sdpa"
        self.model = nn.ModuleList([BertLayer(config)]).train()
        if compressed:
            rank = min(width // 16, 64)
            comera.tensorize_(self.model, TensorizeConfig(linear=TT(order=6, rank=rank)))
            fuse_(self.model)
        self.optimizer = AdamW(param_groups(self.model, lr=1e-4), fused=True)
        self.products: list[float] = []
        self.steps: list[float] = []

    def take(self, x: Tensor, dy: Tensor, precision: str) -> None:
        """One training step."""
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        x = x.detach().requires_grad_()
        with autocast(x.device, precision):
            y = self.model[0](x)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(dy.to(y.dtype))
        self.products.append(time.perf_counter() - started)
        self.optimizer.step()
        self.steps.append(time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    widths = sorted({width for batches in BATCHES.values() for width in batches})
    parser.add_argument("--width", type=int, nargs="+", choices=widths)
    parser.add_argument("--precision", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--samples", type=int, nargs="+", help="samples per batch (default: BATCHES in the script)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of timed steps per shape, at least two steps")
    options = parser.parse_args()
    for precision in options.precision:
        for width in options.width or [w for w in widths if precision == "fp32" or not (w in LARGE and emulated())]:
            sides = {name: Side(width, name == "comera") for name in ("dense", "comera")}
            for samples in options.samples or BATCHES[precision][width]:
                row = {**measure(sides, width, samples, precision, options.seconds), **about()}
                print(" ".join(f"{value!s:>9}" for value in list(row.values())[:13]), flush=True)
                update("layer", [row], key=("width", "tokens", "precision"))


def emulated() -> bool:
    """Whether this processor has no bf16 arithmetic."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def measure(sides: dict[str, Side], width: int, samples: int, precision: str, seconds: float) -> dict[str, object]:
    """Time both sides in turns on the same batch."""
    x = torch.randn(samples, LENGTH, width, generator=torch.Generator().manual_seed(1))
    dy = torch.randn_like(x)
    dense, ours = sides["dense"], sides["comera"]
    for side in sides.values():
        side.products.clear()
        side.steps.clear()
        side.take(x[:, :8], dy[:, :8], precision)  # makes state
    ours.take(x, dy, precision)  # makes plans
    dense.take(x, dy, precision)
    for side in sides.values():
        first = 1 if side is dense and side.steps[-1] > SLOW else len(side.steps)
        del side.products[:first], side.steps[:first]
    started = time.perf_counter()
    while len(ours.steps) < 2 or (time.perf_counter() - started < seconds and len(ours.steps) < 40):
        ours.take(x, dy, precision)
        if dense.steps and dense.steps[0] > 2 * seconds:
            continue
        dense.take(x, dy, precision)
    repeats = len(dense.steps)
    products = {name: statistics.median(side.products) * 1e3 for name, side in sides.items()}
    steps = {name: statistics.median(side.steps) * 1e3 for name, side in sides.items()}
    single = products["dense"]
    if precision != "fp32":
        del dense.products[:]
        for _ in range(3):
            dense.take(x, dy, "fp32")
        single = statistics.median(dense.products) * 1e3
    goal = WIDEST if width == 4096 and precision == "fp32" else FLOOR
    ratio = products["dense"] / products["comera"]
    return {
        "width": width,
        "tokens": f"{samples} x {LENGTH}",
        "precision": precision,
        "dense_ms": f"{products['dense']:.1f}",
        "comera_ms": f"{products['comera']:.1f}",
        "ratio": f"{ratio:.2f}",
        "goal": f"{goal:g}",
        "reached": "yes" if ratio >= goal else "no",
        "ratio_to_fp32": f"{single / products['comera']:.2f}",
        "dense_step_ms": f"{steps['dense']:.1f}",
        "comera_step_ms": f"{steps['comera']:.1f}",
        "step_ratio": f"{steps['dense'] / steps['comera']:.2f}",
        "repeats": repeats,
    }


if __name__ == "__main__":
    main()
