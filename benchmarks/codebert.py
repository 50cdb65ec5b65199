"""CodeBERT at its full size: a training step's time and memory, dense and in both phases of the compressed job.

The model of `comera train code-lm --preset codebert`: 12 encoders of width 768, 50,265 tokens, length 512. All sides
have fused kernels, the same optimizer and the same masked batch; phase 2 is phase 1 rounded to half of its compressed
layers. Steps of the sides alternate in one process, and ratios are those of the medians. Memory is what a model, its
gradients, the optimizer and three steps add to a fresh process with its libraries, at the peak.

    python benchmarks/codebert.py [--rows 4] [--repeats 5]                    10 minutes, on a quiet machine
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
import torch._dynamo  # optimizers import it at first use: counted as part of the libraries
from common import about, in_turns, update

import comera
from comera.baselines import Method
from comera.memory.estimate import MemoryMeter, reset_peak
from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups
from comera.recipes.code_lm.data import Batch
from comera.recipes.code_lm.recipe import build_model, masked_loss, preset
from comera.trainer.step import TrainStep

# side: method, part of the compressed layers' size, goal for the dense step's time over its own
SIDES: dict[str, tuple[Method, float, float | None]] = {
    "dense": ("dense", 1.0, None),
    "phase 1": ("comera", 1.0, 2.5),
    "phase 2": ("comera", 0.5, 2.5),
}
STEPS = 3  # that memory is measured over


def make_step(side: str, rows: int) -> tuple[Callable[[], object], int]:
    """A step of one side on its own model, and the model's parameters."""
    method, part, _ = SIDES[side]
    config = preset(method, "codebert")
    vocab, length = config.data.vocab_size, config.data.block_size
    model, _ = build_model(config, vocab)
    if part < 1:
        comera.round_(model, part)
    comera.fuse_(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocab, (rows, length), generator=generator)
    masked = round(config.data.mask_share * ids.numel())
    positions = torch.randperm(ids.numel(), generator=generator)[:masked].sort().values
    batch = Batch(ids, positions, torch.randint(5, vocab, (masked,), generator=generator))
    optimizer = AdamW(param_groups(model, lr=1e-4), fused=True)
    step = TrainStep(model.train(), masked_loss, optimizer, max_grad_norm=1.0)
    return lambda: step([batch]), sum(p.numel() for p in model.parameters())


def added(side: str, rows: int) -> int:
    """Bytes that a side adds to a process of its own."""
    command = [sys.executable, __file__, "--added", side, "--rows", str(rows)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(json.loads(child.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4, help="sequences of 512 tokens in a step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--added", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.added:
        meter = MemoryMeter.start()
        step, _ = make_step(options.added, options.rows)
        reset_peak()  # of the rounding, which a run does once
        for _ in range(STEPS):
            step()
        print(json.dumps(meter.added))
        return
    memory = {side: added(side, options.rows) for side in SIDES}
    made = {side: make_step(side, options.rows) for side in SIDES}
    seconds = in_turns({side: step for side, (step, _) in made.items()}, options.repeats)
    median = {side: statistics.median(times) for side, times in seconds.items()}
    rows = []
    for side, (_, parameters) in made.items():
        p20, _, _, p80 = statistics.quantiles(seconds[side], n=5)
        row = {
            "side": side,
            "rows": options.rows,
            "parameters": parameters,
            "times_smaller": f"{made['dense'][1] / parameters:.2f}",
            "p20_ms": f"{p20 * 1e3:.0f}",
            "p50_ms": f"{median[side] * 1e3:.0f}",
            "p80_ms": f"{p80 * 1e3:.0f}",
            "times_faster": f"{median['dense'] / median[side]:.2f}",
            "goal": SIDES[side][2] or "",
            "added_mb": f"{memory[side] / 1e6:.0f}",
            "times_less_memory": f"{memory['dense'] / memory[side]:.2f}",
        }
        rows.append({**row, **about()})
        print(" ".join(f"{value!s:>12}" for value in row.values()), flush=True)
    update("codebert", rows, key=("side", "rows"))


if __name__ == "__main__":
    main()
