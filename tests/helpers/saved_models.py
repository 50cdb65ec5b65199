"""A small model with a table tied to its head, to be saved and loaded, and what loading leaves of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comera.convert import BTT, TT, TTM, TensorizeConfig, tensorize_
from comera.errors import CheckpointError
from comera.pretrained import load_pretrained

SMALL = TensorizeConfig(linear=TT(order=4, rank=4), embedding=TTM(order=2, rank=4))
BLOCKS = TensorizeConfig(linear=BTT(rank=2), embedding=TTM(order=2, rank=4))


class Net(nn.Module):
    def __init__(self, tied: bool = True, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 32, padding_idx=0)
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 60)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.down(self.up(self.embed(ids)).relu())
        return self.head(self.norm(x.view(-1, 32)))


def net(config: TensorizeConfig | None = SMALL, seed: int = 1, **options: Any) -> Net:
    torch.manual_seed(seed)
    model = Net(**options)
    if config is not None:
        tensorize_(model, config)
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(model: nn.Module, want: dict[str, Tensor]) -> None:
    """To the bit."""
    got = model.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())


def assert_refused(model: nn.Module, folder: Path, message: str, *, strict: bool = True) -> None:
    """Loading raises, and changes nothing."""
    modules, before = list(model.modules()), state(model)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(model, folder, strict=strict)
    assert list(model.modules()) == modules
    assert_same_state(model, before)
