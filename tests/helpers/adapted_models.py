"""Models with adapters, and the tolerance of their oracle tests."""

import torch
from torch import Tensor, nn

from comera.convert import BTT, TT, TensorizeConfig, tensorize_
from comera.nn.adapted import Adapted

F64 = torch.float64
FORMATS = {"dense": None, "tt": TT(order=4, rank=3), "btt": BTT(rank=1)}


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def randomize_(model: nn.Module, std: float = 0.3) -> None:
    """Adapters as training leaves them: no core of zeros, gates that are not ones."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Adapted):
                for core in module.adapter.tt.cores:
                    core.normal_(0, std, generator=generator)
                for gates in module.adapter.tt.rank_params:
                    gates.uniform_(0.5, 1.5, generator=generator)


def layer_of(kind: str, features: int, outputs: int, *, bias: bool = True) -> nn.Sequential:
    """One linear layer of a format, in a model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, outputs, bias=bias)).to(F64)
    if FORMATS[kind] is not None:
        tensorize_(model, TensorizeConfig(FORMATS[kind], min_ratio=0))
    return model
