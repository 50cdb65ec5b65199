"""A small network that learns which number follows, for tests of optimizers."""

import torch
from torch import nn

import comera


def network(form: comera.BTT | comera.TT | None) -> nn.Sequential:
    """An embedding, two linear layers and a norm, seeded; `form`: of the compressed layers, None for dense ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 60), nn.Linear(60, 90), nn.LayerNorm(90), nn.Linear(90, 40))
    if form is not None:
        comera.tensorize_(model, comera.TensorizeConfig(form, embedding=comera.TTM(order=2, rank=8)))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    """The losses of steps on batches that their numbers determine."""
    losses = []
    for step in range(first, first + steps):
        ids = torch.randint(40, (64,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(ids), (ids + 1) % 40)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
