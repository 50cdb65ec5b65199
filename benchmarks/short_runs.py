"""A short training run of a language model on plain bytes, and its held-out loss, for benchmarks that compare many."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import torch
from torch import nn
from torch.optim import Optimizer

from comera.recipes.lm.data import LMData, LMDataConfig, prepare
from comera.recipes.lm.recipe import token_losses
from comera.trainer.optimizer import lr_multiplier

VOCABULARY, BLOCK, ROWS, HELD_OUT = 256, 256, 4, 32  # HELD_OUT batches of ROWS x BLOCK bytes
BETAS = (0.9, 0.95)
CLIP = 1.0


def standard_library() -> LMData:
    """Its sources, as bytes."""
    return prepare(LMDataConfig(vocab_size=VOCABULARY, block_size=BLOCK), quiet=True)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    data: LMData,
    steps: int,
    seed: int,
    after_step: Callable[[], object] = lambda: None,
) -> None:
    """Steps at the optimizer's rates, warmed up over a twentieth and falling along a cosine."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        factor = lr_multiplier((step + 1) / steps, warmup=0.05, schedule="cosine", final=0.0)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        optimizer.zero_grad()
        token_losses(model, data.train_batch(step, ROWS, seed)).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        after_step()


@torch.no_grad()
def held_out(model: nn.Module, data: LMData) -> float:
    """Nats per byte."""
    batches = list(islice(data.held_out_batches(ROWS), HELD_OUT))
    nats = sum(float(token_losses(model, batch).sum()) for batch in batches)
    return nats / sum(int(batch.sizes.sum()) for batch in batches)
