"""Layers to round to a budget, and optimizers that have to follow."""

from typing import Any

import torch
from torch import nn

from comera.nn.linear import TTLinear
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.tt.decompose import tt_svd
from comera.tt.format import spec_size
from comera.tt.spec import TTSpec

SPEC = TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1))
MATRIX = TTSpec(8, 8, (8,), (8,), (1, 8, 1))


def stored(model: nn.Module) -> int:
    return sum(spec_size(train.spec) for _, train in named_trains(model))


def with_singular_values(values: list[float], seed: int) -> TTLinear:
    """An 8 × 8 layer with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    found = tt_svd(left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right, MATRIX)
    return TTLinear(TensorTrain.from_tensors(found.spec, found.cores, init_std=1.0))


def layers(count: int = 3) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(TTLinear(SPEC, dtype=torch.float64) for _ in range(count))


OPTIMIZERS: dict[str, Any] = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.5),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.5),
    # state that does not begin at zero, and state of other shapes than the parameters'
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
