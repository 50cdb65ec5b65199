"""The optimizer's part of a training step: AdamW and Muon, on dense and on compressed language models of equal size.

Each pair of models has about as many parameters and FLOPs (the cases of frontier.py, vocabulary 256, 4 × 256 tokens a
step). Forward and backward, a step of AdamW and one of Muon on the same gradients take turns; `part` is the optimizer's
share of the whole step, the median of those within a turn.

    python benchmarks/optimizer.py [--cases dense-128 btt8b4-288 ...] [--repeats 20]      3 minutes
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch
from common import about, in_turns, update
from frontier import BLOCK, ROWS, parse

from comera import fuse_
from comera.optim import AdamW, Muon, param_groups
from comera.recipes.lm.data import LMDataConfig
from comera.recipes.lm.model import CompressConfig, ModelConfig
from comera.recipes.lm.recipe import LMConfig, build_model

CASES = ["dense-128", "btt8b4-288", "dense-192", "btt14b4-384"]
VOCABULARY = 256
GOAL = 0.1  # of the step, for compressed models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--repeats", type=int, default=20, help="turns of each case")
    options = parser.parse_args()
    for name in options.cases:
        rows = [row | about() for row in measure(name, options.repeats)]
        for row in rows:
            print(" ".join(f"{value!s:>12}" for value in row.values()), flush=True)
        update("optimizer", rows, key=("case", "optimizer", "threads"))


def measure(name: str, repeats: int) -> list[dict[str, object]]:
    """A row for each optimizer."""
    case = parse(name)
    sizes = ModelConfig(hidden=case.hidden, layers=case.layers, heads=max(1, case.hidden // 64), tie=False)
    compress = replace(case.compress or CompressConfig(), head="dense", embedding="dense")  # small for bytes
    data = LMDataConfig(vocab_size=VOCABULARY, block_size=BLOCK)
    model, _ = build_model(LMConfig(method=case.method, data=data, model=sizes, compress=compress), VOCABULARY)
    fuse_(model, keep_logits=False)
    ids = torch.randint(VOCABULARY, (ROWS, BLOCK), generator=torch.Generator().manual_seed(0))

    def both_passes() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()

    both_passes()
    optimizers = {"adamw": AdamW(param_groups(model, lr=1e-4), fused=True), "muon": Muon(model, lr=1e-4)}
    seconds = in_turns({"passes": both_passes, **{name: each.step for name, each in optimizers.items()}}, repeats)
    rows: list[dict[str, object]] = []
    for optimizer in optimizers:
        own = seconds[optimizer]
        parts = [mine / (mine + passes) for mine, passes in zip(own, seconds["passes"], strict=True)]
        row = {"case": name, "parameters": sum(p.numel() for p in model.parameters()), "optimizer": optimizer}
        times = {"ms": statistics.median(own), "passes_ms": statistics.median(seconds["passes"])}
        goal = GOAL if case.method == "comera" else ""
        part = f"{statistics.median(parts):.3f}"
        rows.append({**row, **{key: f"{value * 1e3:.3g}" for key, value in times.items()}, "part": part, "goal": goal})
    return rows


if __name__ == "__main__":
    main()
