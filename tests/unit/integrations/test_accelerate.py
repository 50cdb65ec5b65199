"""Accelerate needs no module of ours: `load_state` takes the ranks that were cut, the controller is a custom object."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload
from torch import nn

from comera.convert import TT, TTM, TensorizeConfig, tensorize_
from comera.errors import WeightError
from comera.fusion import fuse_
from comera.nn.size import model_size
from comera.optim.param_groups import param_groups
from comera.rank import LateStage, RankController

from ...helpers.processes import in_processes

LATE = LateStage(target_size=0.5, start_step=4, steps=2)


def start(*, fused: bool = False, seed: int = 0) -> tuple[Accelerator, nn.Module, Any, RankController]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(60, 32), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 60))
    tensorize_(model, TensorizeConfig(TT(order=4, rank=6), TTM(order=2, rank=6)))
    if fused:
        fuse_(model)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2, weight_decay=0.01))
    model, optimizer = accelerator.prepare(model, optimizer)
    ranks = RankController(model, late=LATE).attach(optimizer)
    accelerator.register_for_checkpointing(ranks)
    return accelerator, model, optimizer, ranks


def train(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, ranks: RankController, steps: range
) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step * accelerator.num_processes + accelerator.process_index)
        pairs = torch.randint(60, (16, 2), generator=generator)
        loss = nn.functional.cross_entropy(model(pairs), pairs.amax(1))
        accelerator.backward(loss)
        ranks.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 7:
            ranks.meet_target_()
        losses.append(loss.item())
    return losses


def resume(folder: Path, *, fused: bool, safe: bool) -> None:
    accelerator, model, optimizer, ranks = start(fused=fused)
    full = model_size(model).tensorized
    train(accelerator, model, optimizer, ranks, range(9))
    accelerator.save_state(folder, safe_serialization=safe)
    expected = train(accelerator, model, optimizer, ranks, range(9, 16))

    accelerator, model, optimizer, ranks = start(fused=fused, seed=3)
    accelerator.load_state(folder)
    assert model_size(model).tensorized < full
    assert ranks.stage == "late"
    assert train(accelerator, model, optimizer, ranks, range(9, 16)) == expected


@pytest.mark.parametrize(("fused", "safe"), [(False, True), (True, False)])
def test_load_state_after_a_cut_goes_on_to_the_bit(tmp_path: Path, fused: bool, safe: bool) -> None:
    resume(tmp_path, fused=fused, safe=safe)


def resume_in_two(rank: int, folder: str) -> int:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "localhost"}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_PORT": "0"}
    resume(Path(folder), fused=False, safe=True)
    return int(Accelerator(cpu=True).num_processes)


def test_two_processes_resume_after_a_cut(tmp_path: Path) -> None:
    assert in_processes(resume_in_two, str(tmp_path)) == [2, 2]


def test_offloaded_layers_compute_or_say_what_they_need() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(2, 64)
    tensorize_(model, TensorizeConfig(TT(order=4, rank=6)))
    expected = model(x)
    offloaded = cpu_offload(copy.deepcopy(model), execution_device="cpu", preload_module_classes=["TTLinear"])
    torch.testing.assert_close(offloaded(x), expected)
    with pytest.raises(WeightError, match=r"offloaded by accelerate.*preload_module_classes"):
        cpu_offload(model, execution_device="cpu")(x)
