"""A small model in training, its checkpoints, and what damages them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comera.errors import CheckpointError
from comera.files import write_sums
from comera.nn.linear import TTLinear
from comera.optim.param_groups import param_groups
from comera.rank.controller import RankController
from comera.trainer.checkpoint import load_checkpoint, save_checkpoint
from comera.trainer.random_state import rng_state
from comera.trainer.trainer_json import Progress
from comera.tt.spec import TTSpec

IDENTITY = {"lr": 1e-3, "betas": [0.9, 0.999]}
State = tuple[nn.Sequential, torch.optim.Optimizer, RankController]
Kind = Callable[..., torch.optim.Optimizer]


def make(seed: int = 0, kind: Kind = torch.optim.AdamW, hidden: int = 12) -> State:
    torch.manual_seed(seed)
    spec = TTSpec(8, hidden, (2, 2, 2), (hidden // 4, 2, 2), (1, 2, 4, 6, 4, 2, 1))
    model = nn.Sequential(TTLinear(spec), nn.BatchNorm1d(hidden), nn.Linear(hidden, 3))
    optimizer = kind(param_groups(model, lr=1e-2, rates="flat"))
    return model, optimizer, RankController(model).attach(optimizer)


def train(state: State, steps: int, seed: int = 7) -> list[float]:
    model, optimizer, controller = state
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8, generator=generator)).square().mean()
        loss.backward()
        controller.observe(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def cut(state: State) -> None:
    """Make some rank parameters inactive and prune, so that shapes differ from those of a fresh model."""
    chain: Any = state[0][0].tt
    with torch.no_grad():
        chain.rank_params[2][[0, 3]] = 0.0
        chain.rank_params[0][1] = 0.0
    assert state[2].prune_().changed


def save(run: Path, state: State, step: int, held_out: float | None = None, **changes: Any) -> Path:
    progress = Progress(step=step, held_out_loss=held_out, held_out_step=-1 if held_out is None else step)
    return save_checkpoint(run, *state, progress, **{"identity": IDENTITY, "rng": [rng_state()], **changes})


def snapshot(state: State) -> list[Tensor]:
    model, optimizer, _ = state
    kept = [optimizer.state[parameter] for parameter in model.parameters()]
    moments = [values[key] for values in kept for key in sorted(values) if isinstance(values[key], Tensor)]
    return [t.clone() for t in [*model.state_dict().values(), *moments, torch.get_rng_state()]]


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def truncate(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])


def edit(folder: Path, **values: Any) -> None:
    path = folder / "trainer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    write_sums(folder)


def assert_refused(run: Path, damage: Callable[[Path], object], message: str) -> None:
    """A checkpoint that is damaged in its folder is an error, and loading it changes nothing."""
    state = make()
    train(state, 1)
    cut(state)
    folder = save(run, state, 1)
    damage(folder)
    resumed = make(seed=1)
    train(resumed, 1)
    before = snapshot(resumed)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder, *resumed, identity=IDENTITY)
    assert_equal(snapshot(resumed), before)
