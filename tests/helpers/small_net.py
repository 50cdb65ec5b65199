"""Small models with an embedding and linear layers, and a conversion."""

import torch
from torch import Tensor, nn

from comera.convert import TT, TTM, TensorizeConfig

SMALL = TensorizeConfig(linear=TT(order=4, rank=4), embedding=TTM(order=2, rank=4))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 32, padding_idx=0)
        self.up = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.blocks = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, 48)])
        self.head = nn.Linear(48, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.up(self.embed(ids)).relu())
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


class TiedNet(nn.Module):
    """A table, two layers, and a head tied to the table."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 32, padding_idx=padding_idx)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 60, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.table(ids)).relu()))


IDS = torch.tensor([[1, 2, 0], [59, 3, 0]])


def kinds(model: nn.Module) -> dict[str, str]:
    return {name: type(m).__name__ for name, m in model.named_modules() if "tt" not in name.split(".")}
