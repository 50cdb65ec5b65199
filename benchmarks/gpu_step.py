"""One training step of the six-encoder transformer on a GPU: dense and compressed, in every mode of `TrainStep`.

The model of docs/method.md §10 on N x 128 random ids, dropout 0.1, AdamW with fused kernels on both sides; dense
attention is torch's SDPA. Sides: dense; comera, with `fuse_`; "comera, plain" without it; "comera, kernels" with the
Triton kernels. Modes: eager, compile, graph (the whole step as a CUDA graph), "compile, graph" (a graph of a compiled
step).

All sides and modes of a precision and batch alternate in one process; medians. `times_dense` compares with the fastest
mode of dense. Memory: the peak allocated on top of what was there before the model was made, first steps included;
libraries and other sides are not in it. Rows are written as they come, the most important first, until `--seconds` are
over; compilation takes minutes and is skipped in the second half of the time.

    python benchmarks/gpu_step.py [--precision bf16 ...] [--batch 128 ...] [--seconds 200] [--dry]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from common import about, in_turns, update

from comera.fusion import fuse_
from comera.memory.estimate import MemoryMeter
from comera.optim.param_groups import param_groups
from comera.recipes.classify.model import EncoderConfig
from comera.recipes.classify.recipe import preset, untrained
from comera.recipes.classify.task import example_loss
from comera.recipes.data.prepared import ExampleBatch
from comera.trainer.compiled import CompiledLoss
from comera.trainer.step import TrainStep

LENGTH, VOCABULARY = 128, 30_522
TINY = EncoderConfig(hidden=32, layers=2, heads=2, ffn=64, dropout=0.1)
# precision, batch, and the goal for the best mode; the most important first
CASES: tuple[tuple[str, int, float | None], ...] = (
    ("bf16", 128, 2.5),
    ("tf32", 128, 3.0),
    ("bf16", 32, None),
    ("tf32", 32, None),
    ("bf16", 1, None),
    ("tf32", 1, None),
    ("bf16", 8, None),
    ("tf32", 8, None),
    ("fp32", 128, 3.0),
)
PLAIN_MODES = (("dense", "eager"), ("comera", "eager"), ("dense", "graph"), ("comera", "graph"))
OTHER_WAYS = (("comera, plain", "graph"), ("comera, kernels", "graph"))
COMPILED = tuple((side, mode) for mode in ("compile", "compile, graph") for side in ("dense", "comera"))
WARM_UPS = 5  # two visits of a shape, its capture, and replays


class Way:
    """A side in a mode, on its own model. The constructor takes the first steps; memory: peak bytes during them."""

    def __init__(self, side: str, mode: str, precision: str, samples: int, *, dry: bool) -> None:
        device = torch.device("cpu" if dry else "cuda")
        self.kernels = "all" if side == "comera, kernels" else "none"
        self.meter = MemoryMeter.start(device)
        config = preset("dense" if side == "dense" else "comera", "mnli")
        if dry:
            config = replace(config, model=TINY, compress=replace(config.compress, order=4, rank=4, embedding_rank=4))
        words = 100 if dry else VOCABULARY
        with nullcontext() if dry else device:
            model: Any = untrained(config, words)[0]
        if side not in ("dense", "comera, plain"):
            fuse_(model)
        ids = torch.randint(words, (samples, 16 if dry else LENGTH), generator=torch.Generator().manual_seed(0))
        batch = ExampleBatch(ids, torch.zeros_like(ids), torch.ones(ids.shape, dtype=torch.bool), ids[:, 0] % 3)
        self.batch = ExampleBatch(*(tensor.to(device) for tensor in batch))
        self.step = TrainStep(
            model.to(device).train(),
            CompiledLoss(example_loss) if mode == "compile, graph" else example_loss,
            torch.optim.AdamW(param_groups(model, lr=1e-4), fused=True),
            max_grad_norm=1.0,
            precision="bf16" if precision == "bf16" else "fp32",
            mode=cast(Literal["eager", "compile", "graph"], "graph" if mode == "compile, graph" else mode),
        )
        for _ in range(WARM_UPS):
            self.take()
        self.memory = self.meter.added

    def take(self) -> None:
        """One training step."""
        os.environ["COMERA_KERNELS"] = self.kernels
        self.step([self.batch])

    @property
    def ran(self) -> str:
        """The mode in which steps actually run, and why."""
        reason = getattr(self.step.loss, "reason", "")
        return f"{self.step.mode}{f', loss eager ({reason})' if reason else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", choices=("fp32", "tf32", "bf16"), default=["fp32", "tf32", "bf16"])
    parser.add_argument("--batch", type=int, nargs="+", help="default: 1, 8, 32, 128")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU; writes nothing")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, torch sees none: --dry runs a tiny model on the CPU")
    started = time.perf_counter()
    batches = options.batch or {samples for _, samples, _ in CASES}
    wanted = [case for case in CASES if case[0] in options.precision and case[1] in batches]
    for precision, samples, goal in wanted[:2] if options.dry else wanted:
        elapsed = time.perf_counter() - started
        if elapsed > options.seconds:
            print(f"out of time: skipping {precision}, batch {samples} and the rest")
            break
        ways = [*PLAIN_MODES, *OTHER_WAYS]
        if not options.dry and not options.no_compile and elapsed < options.seconds / 2:
            ways += COMPILED
        for row in measure(precision, 2 if options.dry else samples, goal, ways, dry=options.dry):
            print(" ".join(f"{value!s:>10}" for value in row.values()), flush=True)
            if not options.dry:
                update("gpu_step", [row | about()], key=("precision", "batch", "side", "mode"))


def measure(
    precision: str, samples: int, goal: float | None, wanted: list[tuple[str, str]], *, dry: bool
) -> Iterator[dict[str, Any]]:
    """Time all ways in turns; one that fails is reported, and the others go on."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.compiler.reset()  # else the sizes of another batch would compile as dynamic shapes
    if not dry:
        torch.cuda.empty_cache()
    ways: dict[tuple[str, str], Way] = {}
    for side, mode in wanted:
        try:
            ways[side, mode] = Way(side, mode, precision, samples, dry=dry)
        except (RuntimeError, ValueError) as error:  # out of memory, or something unforeseen
            if dry:
                raise
            print(f"{precision}, batch {samples}, {side}, {mode}: {type(error).__name__}: {error}", flush=True)
    runs: dict[str, Callable[[], object]] = {", ".join(key): way.take for key, way in ways.items()}
    wait: Callable[[], object] = int if dry else torch.cuda.synchronize
    seconds = in_turns(runs, 2 if dry else 20, warm_ups=1, wait=wait)
    median = {key: statistics.median(seconds[", ".join(key)]) for key in ways}
    dense, least = (
        min((value for key, value in values.items() if key[0] == "dense"), default=float("nan"))
        for values in (median, {key: float(way.memory) for key, way in ways.items()})
    )
    best = min((value for key, value in median.items() if key[0] != "dense"), default=float("nan"))
    for (side, mode), way in ways.items():
        p20, _, _, p80 = statistics.quantiles(seconds[f"{side}, {mode}"], n=5, method="inclusive")
        value = median[side, mode]
        yield {
            "precision": precision,
            "batch": samples,
            "side": side,
            "mode": mode,
            "ran": way.ran,
            "p20_ms": f"{p20 * 1e3:.3f}",
            "p50_ms": f"{value * 1e3:.3f}",
            "p80_ms": f"{p80 * 1e3:.3f}",
            "times_dense": f"{dense / value:.2f}",
            "goal": goal if goal and value == best else "",
            "memory_mb": f"{way.memory / 2**20:.0f}",
            "memory_of_dense": f"{way.memory / least:.3f}" if least else "",
        }


if __name__ == "__main__":
    main()
