"""Does `estimate` say how much memory a training step takes? Peak resident memory of steps in a process of their own.

    python benchmarks/estimate.py [--cases "code-lm dense" "lm fused"]

Measured is the growth of the resident memory from before the model is built to the peak of three steps on random ids;
a step of a tiny model has loaded libraries and kernels before.
"""

import argparse
import ctypes
import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from common import about, update
from torch import Tensor, nn

from comera.memory.estimate import MemoryMeter, current_memory
from comera.recipes.code_lm import recipe as code_lm
from comera.recipes.code_lm.data import Batch as CodeBatch
from comera.recipes.lm import recipe as lm
from comera.recipes.lm.data import Batch as LMBatch
from comera.trainer.optimizer import named_optimizer
from comera.trainer.state import adapt_
from comera.trainer.step import TrainStep

RECIPES: dict[str, Any] = {"code-lm": code_lm, "lm": lm}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "fused": ("comera", {}),
    "unfused": ("comera", {"fuse": False}),
    "recomputed": ("comera", {"recompute": True}),
}
LARGE = ("llama-1b", "llama-7b")  # presets of lm, as they are
CASES = [f"{recipe} {way}" for recipe, way in product(RECIPES, WAYS)] + [f"lm {preset}" for preset in LARGE]
BATCH, STEPS = 8, 3
MB = 2**20


def config_of(case: str) -> Any:
    """The recipe's configuration for a case."""
    recipe, way = case.split()
    if way in LARGE:
        return lm.preset("comera", way)  # type: ignore[arg-type]
    method, options = WAYS[way]
    config = RECIPES[recipe].preset(method, "base")
    return replace(config, train=replace(config.train, batch_size=BATCH, **options))


def batch_of(recipe: str, config: Any, vocabulary: int) -> tuple[Callable[[nn.Module, Any], Tensor], Any]:
    """The recipe's loss, and random ids as a batch."""
    rows, width = config.train.batch_size, config.data.block_size

    def ids(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape)

    if recipe == "lm":
        return lm.next_token_loss, LMBatch(ids(vocabulary, rows, width), ids(vocabulary, rows, width), ids(9, rows))
    masked = round(config.data.mask_share * rows * width)
    batch = CodeBatch(ids(vocabulary, rows, width), ids(rows * width, masked), ids(vocabulary, masked))
    return code_lm.masked_loss, batch


def peak(recipe: str, config: Any) -> int:
    """Bytes at the peak of some steps above those before the model was built."""
    baseline = current_memory()
    vocabulary = vocabulary_of(recipe, config)
    model, _ = RECIPES[recipe].build_model(config, vocabulary)
    adapt_(model.train(), config.train, keep_logits=recipe != "lm")
    loss, batch = batch_of(recipe, config, vocabulary)
    optimizer = named_optimizer(model, config.train)
    step = TrainStep(model, loss, optimizer, max_grad_norm=config.train.max_grad_norm)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    meter = MemoryMeter.start()
    for _ in range(STEPS):
        step([batch])
    return meter.peak - baseline


def vocabulary_of(recipe: str, config: Any) -> int:
    """Tokens of the vocabulary."""
    return int(config.data.expected_vocabulary() if recipe == "lm" else config.data.vocab_size)


def measure(case: str) -> int:
    """Peak bytes of a case, in this process."""
    recipe, config = case.split()[0], config_of(case)
    like = config if case.split()[1] in WAYS else config_of("lm recomputed")
    tiny = replace(like.model, hidden=64, layers=1, heads=2)
    peak(recipe, replace(like, model=tiny, train=replace(like.train, batch_size=2)))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return peak(recipe, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(measure(asked.child))
        return
    rows = []
    for case in asked.cases:
        config = config_of(case)
        estimated = RECIPES[case.split()[0]].estimate(config)[config.method].total
        shown = subprocess.run([sys.executable, __file__, "--child", case], capture_output=True, text=True, check=True)
        measured = int(shown.stdout.split()[-1])
        sizes = {"estimated": f"{estimated / MB:.0f}", "measured": f"{measured / MB:.0f}"}
        rows.append({"case": case, **sizes, "ratio": f"{estimated / measured:.2f}", "unit": "MB", **about()})
        print(*list(rows[-1].values())[:4], flush=True)
    update("estimate", rows, ["case"])


if __name__ == "__main__":
    main()
