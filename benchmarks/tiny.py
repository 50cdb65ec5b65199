"""Training within the memory of a small chip: the two-encoder transformer of arXiv:2501.06663 in 28.5 MB of tensors.

Two encoders, 768 wide, 12 heads, feed-forward layers as wide, 1,000 words, texts of 32 tokens, 26 intents, dropout 0.1,
float32; linear layers as tensor trains of six cores and rank 12, the token table as a TT-matrix of rank 30. The paper
trains it on an FPGA with 6 MB of BRAM and 22.5 MB of URAM, one text at a time, by SGD. Texts here are random, so that a
loss only says that steps are taken.

`comera.memory.plan_memory` makes the plan; four steps follow it. Measured are all tensors that are alive at once
("live", counted as the plan counts them, from the first step on), and what torch's allocator gives out ("allocated", as
torch's profiler sees it, with the scratch memory of torch's own operations). The process itself is in neither. Where
the budget is too small, the smallest is planned, and steps follow that.

    python benchmarks/tiny.py [--budget 28.5MB] [--cases "dense, batch 1, adamw" ...]      1 minute
"""

from __future__ import annotations

import argparse
import os
from operator import itemgetter

from comera.kernels.select import CPP

# Large tensors of our kernels from torch's allocator, too, where the profiler sees them.
os.environ["COMERA_KERNELS"] = ",".join(name for name in CPP if name != "memory")

import torch
from common import about, update
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import BertForSequenceClassification

from comera import TT, TTM, TensorizeConfig, fuse_, model_size, tensorize_
from comera.errors import ConfigError
from comera.memory.budget import parse_bytes
from comera.memory.live import LiveMemory
from comera.memory.plan import MemoryPlan, plan_memory
from comera.optim.names import OPTIMIZERS, Rates
from comera.recipes.bert import ModelConfig

WORDS, LENGTH, INTENTS, STEPS = 1000, 32, 26, 4
DENSE = ("bert.embeddings.position_embeddings", "bert.embeddings.token_type_embeddings", "classifier")
# name: compressed, texts, optimizer
CASES = {
    f"{side}, batch {texts}, {optimizer}": (side == "compressed", texts, optimizer)
    for side, texts, optimizer in [
        ("dense", 1, "adamw"),
        ("dense", 1, "sgd"),
        ("compressed", 1, "adamw"),
        ("compressed", 1, "smmf"),
        ("compressed", 1, "sgd"),
        ("compressed", 8, "adamw"),
        ("compressed", 32, "adamw"),
        ("compressed", 128, "adamw"),
        ("compressed", 128, "smmf"),
    ]
}


def build(compressed: bool) -> BertForSequenceClassification:
    """The model, fused on both sides."""
    torch.manual_seed(0)
    sizes = ModelConfig(hidden=768, layers=2, heads=12, ffn=768, dropout=0.1, max_positions=LENGTH)
    model = BertForSequenceClassification(sizes.bert(WORDS, num_labels=INTENTS))
    if compressed:
        tensorize_(model, TensorizeConfig(TT(order=6, rank=12), TTM(order=3, rank=30), overrides=dict.fromkeys(DENSE)))
    fuse_(model)
    return model


def draw(texts: int) -> dict[str, Tensor]:
    """Random texts and intents."""
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (texts, LENGTH), generator=drawn)
    return {"input_ids": ids, "labels": torch.randint(INTENTS, (texts,), generator=drawn)}


def train(
    model: BertForSequenceClassification, batch: dict[str, Tensor], plan: MemoryPlan, optimizer: str
) -> list[float]:
    """Steps as planned; the loss of each."""
    moving, losses = OPTIMIZERS[optimizer].make(model.train(), Rates()), []
    for _ in range(STEPS):
        total = 0.0
        for part, share in plan.micro_batches(batch):
            loss = share * model(**part).loss
            loss.backward()
            total += loss.item()
            del loss
        moving.step()
        moving.zero_grad()
        losses.append(total)
    return losses


def allocated(events: list[tuple[int, int]]) -> int:
    """The most bytes given out at once. events: time and bytes, given out or taken back."""
    now = most = 0
    for _, nbytes in sorted(events, key=itemgetter(0)):  # of one moment, in their order
        now += nbytes
        most = max(most, now)
    return most


def smallest(error: ConfigError) -> int:
    """The budget that the message says will do."""
    return int(str(error).split("at least ")[1].split(" bytes")[0].replace(",", ""))


def measure(name: str, budget: int) -> dict[str, object]:
    """The row of a case."""
    compressed, texts, optimizer = CASES[name]
    batch, model = draw(texts), build(compressed)
    try:
        plan, fits = plan_memory(model, batch, budget, optimizer=optimizer), True
    except ConfigError as error:
        print(error)
        plan, fits = plan_memory(model, batch, smallest(error), optimizer=optimizer), False
    print(plan)
    plan.apply_(model)
    stored = [*model.parameters(), *model.buffers(), *batch.values()]
    there = sum(tensor.nbytes for tensor in stored)
    with LiveMemory(stored) as live:
        losses = train(model, batch, plan, optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        train(model, batch, plan, optimizer)
    found = profiled.profiler.kineto_results.events()
    given_out = allocated([(event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]"])
    return {
        "case": name,
        "budget_mb": f"{budget / 1e6:.2f}",
        "fits": "yes" if fits else "no",
        **{f"{part}_mb": f"{nbytes / 1e6:.2f}" for part, nbytes in plan.parts.items()},
        "plan_mb": f"{plan.peak / 1e6:.2f}",
        "live_mb": f"{(there + live.peak) / 1e6:.2f}",
        "allocated_mb": f"{(there + given_out) / 1e6:.2f}",
        "micro_batch": plan.micro_batch,
        "recompute": "yes" if plan.recompute else "no",
        "contraction": plan.contraction,
        "parameters": model_size(model).total,
        "first_loss": f"{losses[0]:.3f}",
        "last_loss": f"{losses[-1]:.3f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="28.5MB")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    for name in options.cases:
        row = measure(name, parse_bytes(options.budget)) | about()
        print(" ".join(f"{value!s:>10}" for value in row.values()), flush=True)
        update("tiny", [row], key=("case", "budget_mb"))


if __name__ == "__main__":
    main()
