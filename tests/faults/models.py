"""A fused model, its training step, and its true outputs, for campaigns in which only the fault is of interest."""

import copy

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

import comera
from comera.fusion import fuse_

IDS = torch.arange(80).view(4, 20) % 50


def bert() -> nn.Module:
    """Small, compressed and fused, without dropout."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=50, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    model = BertForMaskedLM(config)
    comera.tensorize_(model, comera.TensorizeConfig(linear=comera.TT(order=4, rank=6), embedding=None))
    fuse_(model)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(comera.param_groups(model, lr=1e-2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """One training step; its loss."""
    optimizer.zero_grad()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    return [float(step(model, optimizer)) for _ in range(steps)]


def twin(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer in the same state, made anew, so that no other state can be theirs."""
    other = bert()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    theirs = optimizer_of(other)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other, theirs
