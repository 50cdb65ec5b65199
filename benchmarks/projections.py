"""Projected gradients: what the state takes, what is learned, and the longest step, beside GaLore and AdamW.

A dense language model on plain bytes (4 blocks, 4 × 256 tokens a step), or one of causal convolutions in the place of
blocks (`--model conv`; GaLore has no rule for these). The weights of its layers are projected to a quarter of their
shorter side, by GaLore and by ours alike: at ranks that adapt, at the full ranks as matrices (`full`) or by all modes,
and with the embedding and the head (`all`). Cosine schedule, the same rates for each; held-out loss in nats per byte.
`kb`: of the optimizer's state at the end; `largest_kb`: its peak, since ranks adapt.

    python benchmarks/projections.py losses [--model conv] [--cases adamw galore ...] [--steps 300] [--rates 2e-3 4e-3]
    python benchmarks/projections.py times  [--hidden 256]            on a quiet machine: steps of the optimizer alone
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from common import about, update
from short_runs import BETAS, BLOCK, ROWS, VOCABULARY, held_out, standard_library, train
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.baselines import GaLore
from comera.contrib import AdaRankGrad, TensorGaLore
from comera.optim import AdamW, param_groups
from comera.recipes.lm.data import LMData, LMDataConfig
from comera.recipes.lm.model import ModelConfig
from comera.recipes.lm.recipe import LMConfig, build_model, token_losses
from comera.trainer.config import TrainConfig


def _galore(model: nn.Module, lr: float) -> Optimizer:
    """At the package's factor 0.25, ten times the rate for projected weights, as its authors have it."""
    applied = GaLore().apply_(model, skip=["lm_head"])
    assert applied.optimizer is not None
    return applied.optimizer(TrainConfig(steps=1, lr=lr, core_lr=10 * lr, betas=BETAS))


def _layers(model: nn.Module, lr: float) -> Iterator[dict[str, Any]]:
    """Groups in which only what GaLore projects, the weights of linear layers but the head, is worth projecting."""
    apart = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}  # type: ignore[operator]
    for group in param_groups(model, lr=lr):
        for name, chosen in (("dense", False), ("tables", True)):
            members = [p for p in group["params"] if (p in apart) == chosen]
            if members:
                yield {**group, "params": members, "name": name if group["name"] == "dense" else group["name"]}


CASES: dict[str, Callable[[nn.Module, float], Optimizer]] = {
    "adamw": lambda model, lr: AdamW(param_groups(model, lr=lr), betas=BETAS, fused=True),
    "galore": _galore,
    "adarankgrad": lambda model, lr: AdaRankGrad(_layers(model, lr), betas=BETAS),
    "full": lambda model, lr: AdaRankGrad(_layers(model, lr), energy=1.0, betas=BETAS),
    "adarankgrad-all": lambda model, lr: AdaRankGrad(param_groups(model, lr=lr), betas=BETAS),
    "tensor_galore": lambda model, lr: TensorGaLore(_layers(model, lr), betas=BETAS),
    "tensor_galore-all": lambda model, lr: TensorGaLore(param_groups(model, lr=lr), betas=BETAS),
    "tensor_galore-both": lambda model, lr: TensorGaLore(_layers(model, lr), two_sided=True, rank=0.5, betas=BETAS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["losses", "times"])
    parser.add_argument("--model", choices=["llama", "conv"], default="llama")
    parser.add_argument("--cases", nargs="+", choices=list(CASES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rates", nargs="+", type=float, default=[2e-3, 4e-3, 8e-3])
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    options.cases = options.cases or [name for name in CASES if options.model == "llama" or name != "galore"]
    rows = losses(options) if options.part == "losses" else times(options)
    for row in rows:
        print(" ".join(f"{value!s:>12}" for value in row.values()), flush=True)
        if options.part == "losses":
            update("projections", [row | about()], ("model", "case", "hidden", "steps", "lr", "seed"))
        else:
            update("projections_steps", [row | about()], ("model", "case", "hidden", "threads"))


def losses(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    data = standard_library()
    for seed in range(options.seeds):
        for name in options.cases:
            for lr in options.rates:
                row = {"model": options.model, "case": name, "hidden": options.hidden, "steps": options.steps}
                model = _model(options.model, options.hidden, seed)
                yield {**row, "lr": f"{lr:g}", "seed": seed, **learned(model, name, options.steps, lr, seed, data)}


def learned(model: nn.Module, name: str, steps: int, lr: float, seed: int, data: LMData) -> dict[str, object]:
    """Train one case; its held-out loss and the bytes of its state."""
    optimizer = CASES[name](model, lr)
    sizes: list[int] = []
    train(model, optimizer, data, steps, seed, after_step=lambda: sizes.append(_state_bytes(optimizer)))
    ranks = list(_ranks(optimizer))
    return {
        "nats_per_byte": f"{held_out(model, data):.4f}",
        "kb": f"{sizes[-1] / 1e3:.4g}",
        "largest_kb": f"{max(sizes) / 1e3:.4g}",
        "mean_rank": f"{statistics.fmean(ranks):.3g}" if ranks else "",
    }


def times(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Steps of the optimizer alone, on gradients of a model's first steps; the first, which makes the state, apart.

    As many steps as three periods of 200, so that every parameter has had its turn.
    """
    data = standard_library()
    for name in options.cases:
        model = _model(options.model, options.hidden, 0)
        gradients = [_gradients(model, data, step) for step in range(4)]
        optimizer = CASES[name](model, 1e-4)
        seconds = []
        for step in range(600):
            for p, grad in zip(model.parameters(), gradients[step % len(gradients)], strict=True):
                p.grad = grad
            started = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - started)
        median, late = statistics.median(seconds[1:]), sorted(seconds[1:])
        shown = {"median": median, "first": seconds[0], "p99": late[int(0.99 * len(late))], "longest": late[-1]}
        row = {"model": options.model, "case": name, "hidden": options.hidden}
        row |= {f"{key}_ms": f"{second * 1e3:.3g}" for key, second in shown.items()}
        yield {**row, "longest_over_median": f"{late[-1] / median:.3g}"}


def _gradients(model: nn.Module, data: LMData, step: int) -> list[Tensor]:
    loss = token_losses(model, data.train_batch(step, ROWS, 0)).mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


class ConvModel(nn.Module):
    """Causal convolutions of five tokens with residuals, in the interface of a language model."""

    def __init__(self, hidden: int, layers: int = 8) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, hidden), nn.Linear(hidden, VOCABULARY, bias=False)
        self.norms = nn.ModuleList([nn.LayerNorm(hidden) for _ in range(layers + 1)])
        self.layers = nn.ModuleList([nn.Conv1d(hidden, hidden, 5) for _ in range(layers)])

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        x_BTH = self.embedding(input_ids)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            before_BHT = F.pad(norm(x_BTH).mT, (4, 0))
            x_BTH = x_BTH + F.gelu(layer(before_BHT)).mT
        return SimpleNamespace(logits=self.head(self.norms[-1](x_BTH)))


def _model(kind: str, hidden: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "conv":
        return ConvModel(hidden)
    sizes = ModelConfig(hidden=hidden, layers=4, heads=max(1, hidden // 64), tie=False)
    data = LMDataConfig(vocab_size=VOCABULARY, block_size=BLOCK)
    model, _ = build_model(LMConfig(method="dense", data=data, model=sizes), VOCABULARY)
    return model


def _tensors(optimizer: Optimizer) -> Iterable[Tensor]:
    return (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))


def _state_bytes(optimizer: Optimizer) -> int:
    return sum(value.nbytes for value in _tensors(optimizer))


def _ranks(optimizer: Optimizer) -> Iterator[int]:
    for state in optimizer.state.values():
        yield from (value.shape[1] for key, value in state.items() if key.startswith("basis_"))
        if "basis" in state:  # GaLore's: (r, n) or (m, r)
            yield min(state["basis"].shape)


if __name__ == "__main__":
    main()
