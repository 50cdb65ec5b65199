"""How ranks should fall: held-out loss at equal final size, for several ways, over several seeds.

A small causal language model on the bytes of Python's standard library trains compressed: an early stage at full
ranks, shared by all ways, then a late stage in which each way brings the compressed layers to 0.2 of their size. The
late stage is long enough for gates to fall by themselves: `own` is the part of the size that a way had reached at 0.8
of it, where one that has not met the target is rounded to it, and `fell` the part of all gates pruned by then.

    sensitivity   the default: canonical form at the switch, then prune what matters least, along a falling budget
    surrogate     the paper's text: Adam on d with the l1 surrogate, by the achievement rule; at two rates of d
    gate_mean     the authors' code: Adam on d with the mean of the unpruned gates, in the late stage; at two rates of d
    proximal      Adam on d with the loss alone, then a decoupled soft threshold with exact zeros
    canonical     a soft threshold on the singular values themselves, in canonical form, every 20 steps
    oneshot       SVD rounding at the switch, then training
    small         ranks of the final size from the first step on
    full          no shrinking at all: what the smaller size costs

    python benchmarks/shrinkage.py [--seeds 3] [--steps 200] [--late 1000]      one thread, about 15 minutes a seed
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import about, write
from torch import Tensor, nn

import comera
from comera.nn.tensor_train import named_trains
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.rank.prune import prune_
from comera.rank.size import SizeTable
from comera.tt.decompose import round_cores

WIDTH, HEADS, LAYERS, LENGTH, BATCH, RANK = 192, 6, 3, 64, 16, 32
TARGET, FORCED = 0.2, 0.8
WAYS: dict[str, dict[str, Any]] = {
    "sensitivity": {"shrink": "sensitivity"},
    "surrogate, rate 5e-3": {"shrink": "surrogate", "rank_lr": 5e-3},
    "surrogate, rate 1e-2": {"shrink": "surrogate", "rank_lr": 1e-2},
    "gate_mean, rate 5e-3": {"shrink": "gate_mean", "rank_lr": 5e-3},
    "gate_mean, rate 1e-2": {"shrink": "gate_mean", "rank_lr": 1e-2},
    "proximal": {"threshold": 4e-3},
    "canonical": {"singular": 2e-3},
    "oneshot": {"oneshot": True},
    "small": {"rank": 11},
    "full": {},
}
EARLY: dict[str, Any] = {}  # the stage that all ways share


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (layer(h).view(batch, length, HEADS, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class ByteLM(nn.Module):
    """Causal language model over bytes; embedding and head stay dense."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        nn.init.normal_(self.bytes.weight, std=0.1)
        nn.init.normal_(self.positions.weight, std=0.1)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.bytes(ids) + self.positions.weight)))
        return logits


class Corpus:
    """Bytes of the standard library: nine tenths to train on, one tenth held out."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [f for pattern in ("*.py", "*/*.py") for f in sorted(root.glob(pattern)) if "test" not in f.parts[-2]]
        files = [f for f in files if "site-packages" not in f.parts][:600]
        data = torch.from_numpy(np.frombuffer(b"".join(f.read_bytes() for f in files), dtype=np.uint8).copy()).long()
        self.train, held = data.split([len(data) * 9 // 10, len(data) - len(data) * 9 // 10])
        fixed = np.random.RandomState(7)
        self.held_out = [self.batch(held, fixed, 64) for _ in range(12)]

    def batch(self, source: Tensor, random: np.random.RandomState, size: int = BATCH) -> tuple[Tensor, Tensor]:
        rows = torch.stack([source[i : i + LENGTH + 1] for i in random.randint(0, len(source) - LENGTH - 1, size)])
        return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class Run:
    """A model in training, with everything that its next step depends on."""

    def __init__(self, corpus: Corpus, seed: int, all_steps: int, late_steps: int, way: dict[str, Any]) -> None:
        torch.manual_seed(seed)
        self.corpus, self.seed, self.all_steps, self.late_steps, self.way = corpus, seed, all_steps, late_steps, way
        self.model = ByteLM()
        config = comera.TensorizeConfig(
            linear=comera.TT(order=4, rank=way.get("rank", RANK)), embedding=None, overrides={"head": None}
        )
        comera.tensorize_(self.model, config)
        groups = comera.param_groups(self.model, lr=1e-3, core_lr=2e-3, rank_lr=1e-3)
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
        self.random = np.random.RandomState(seed)
        self.step = 0
        stage = LateStage(target_size=TARGET, shrink=way.get("shrink", "surrogate"), steps=int(0.4 * late_steps))
        self.controller = RankController(self.model, EarlyStage(size_weight=0.0), stage)
        if "shrink" in way or way is EARLY:
            self.controller.attach(self.optimizer)
        self.own = self.fell = 0.0

    def continued(self, way: dict[str, Any]) -> Run:
        """A run that goes on from here in its own way."""
        other = Run(self.corpus, self.seed, self.all_steps, self.late_steps, way)
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(self.optimizer.state_dict())
        other.controller.load_state_dict(self.controller.state_dict())
        other.random.set_state(self.random.get_state())
        other.step = self.step
        if "shrink" in way:
            other.controller.start_late()
        elif way.get("oneshot"):
            comera.round_(other.model, TARGET, optimizers=[other.optimizer])
        return other

    def train(self, steps: int) -> None:
        """Take steps: rates rise over 80 steps and fall along a cosine over both stages."""
        trains = [train for _, train in named_trains(self.model)]
        first, gates = sum(map(stored, trains)), sum(train.spec.rank_numel for train in trains)
        for passed in range(steps):
            progress = self.step / self.all_steps
            rate = min((self.step + 1) / 80, 1.0) * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)
            for group, peak in zip(self.optimizer.param_groups, (2e-3, 1e-3, 1e-3, 1e-3), strict=True):
                own = self.way.get("rank_lr") if group["name"] == "ranks" else None
                group["lr"] = (own or peak) * rate
            loss = loss_of(self.model, self.corpus.batch(self.corpus.train, self.random))
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.controller.observe(loss)
            self.optimizer.step()
            self.step += 1
            if self.way is EARLY:
                continue
            small = self.controller.size() <= TARGET * first
            if "threshold" in self.way and not small:
                soft_threshold_(trains, self.way["threshold"])
            if "singular" in self.way and not small and passed % 20 == 19:
                soft_threshold_singular_values_(trains, 20 * self.way["singular"], self.optimizer)
            if passed % 20 == 19:
                prune_(self.model, [self.optimizer])
            if passed == int(FORCED * steps):
                self.own = self.controller.size() / first
                self.fell = 1 - sum(train.spec.rank_numel for train in trains) / gates
                if self.own > TARGET and self.way.keys() & {"shrink", "threshold", "singular"}:
                    comera.round_(self.model, int(TARGET * first), optimizers=[self.optimizer])

    @torch.no_grad()
    def held_out(self) -> float:
        return sum(float(loss_of(self.model, batch)) for batch in self.corpus.held_out) / len(self.corpus.held_out)


def stored(train: Any) -> int:
    return int(train.spec.numel + train.spec.rank_numel)


@torch.no_grad()
def soft_threshold_(trains: list[Any], rate: float) -> None:
    """d ← max(d − rate · slope / mean slope, 0), slope = ∂Ŝ/∂d."""
    table = SizeTable(trains)
    slopes = table.surrogate_grads()
    mean = torch.cat(slopes)[torch.cat(slopes) > 0].mean()
    for d, slope in zip(table.rank_params, slopes, strict=True):
        d.sub_(rate * slope / mean).clamp_min_(0)


@torch.no_grad()
def soft_threshold_singular_values_(trains: list[Any], rate: float, optimizer: torch.optim.Optimizer) -> None:
    """σ ← max(σ − rate · slope / mean slope · mean σ, 0) on each inner rank in turn; keeps the norm of the weight."""
    slopes = iter(SizeTable(trains).surrogate_grads())
    means = [float(slope[0]) for slope in SizeTable(trains).surrogate_grads()]
    mean = sum(means) / len(means)
    for train in trains:
        spec, cores = train.spec, train.effective_cores()
        norm = float(round_cores(spec, cores).cores[0].norm()) ** spec.order
        for k in range(1, spec.order):
            slope = float(next(slopes)[0]) / mean
            found = round_cores(spec, cores)
            spec, cores = found.spec, found.cores
            left = cores[0].flatten(0, -2)
            for core in cores[1:k]:
                left = torch.tensordot(left, core, dims=1).flatten(0, -2)
            sigma = left.norm(dim=0)
            sigma = sigma * _right_norms(cores[k:])
            factor = ((sigma - rate * slope * sigma.mean()).clamp_min(0) / sigma.clamp_min(1e-12)).clamp_max(1)
            factor[sigma.argmax()] = factor[sigma.argmax()].clamp_min(1e-3)
            keep = factor > 0
            ranks = list(spec.ranks)
            ranks[k] = int(keep.sum())
            cores[k - 1] = (cores[k - 1] * factor)[..., keep]
            cores[k] = cores[k][keep]
            spec = spec.with_ranks(tuple(ranks))
        found = round_cores(spec, cores)
        scale = (norm / float(found.cores[0].norm()) ** spec.order) ** (1 / spec.order)
        train.set_(found.spec, [core * scale for core in found.cores])
        for parameter in train.parameters():
            optimizer.state.pop(parameter, None)


def _right_norms(cores: list[Tensor]) -> Tensor:
    """Norm of each row of the merged cores on the right."""
    gram = torch.ones(1, 1, dtype=cores[0].dtype)
    for core in reversed(cores):
        gram = torch.einsum("rns,st,qnt->rq", core, gram, core)
    return gram.diagonal().sqrt()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of the early stage")
    parser.add_argument("--late", type=int, default=1000, help="steps of the late stage")
    parser.add_argument("--ways", default=";".join(WAYS), help="ways to run, separated by semicolons")
    options = parser.parse_args()
    ways = {name: WAYS[name] for name in options.ways.split(";")}
    torch.set_num_threads(1)
    corpus, rows = Corpus(), []
    for seed in range(options.seeds):
        early = Run(corpus, seed, options.steps + options.late, options.late, EARLY)
        early.train(options.steps)
        switch = early.held_out()
        full = sum(stored(train) for _, train in named_trains(early.model))
        for name, way in ways.items():
            started = time.perf_counter()
            if "rank" in way:
                run = Run(corpus, seed, options.steps + options.late, options.late, way)
                run.train(options.steps + options.late)
            else:
                run = early.continued(way)
                run.train(options.late)
            trains = [train for _, train in named_trains(run.model)]
            row = {
                "way": name,
                "seed": seed,
                "steps": options.steps,
                "late": options.late,
                "own": f"{run.own:.4f}",
                "fell": f"{run.fell:.3f}",
                "size": sum(map(stored, trains)),
                "part": f"{sum(map(stored, trains)) / full:.4f}",
                "dead": sum(0 in train.spec.inner_ranks for train in trains),
                "switch_loss": f"{switch:.4f}",
                "held_out_loss": f"{run.held_out():.4f}",
                "seconds": f"{time.perf_counter() - started:.0f}",
            }
            rows.append({**row, **about()})
            print(" ".join(f"{value:>10}" for value in row.values()), flush=True)
            write("shrinkage", rows)


if __name__ == "__main__":
    main()
