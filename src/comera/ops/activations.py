"""Activations by name, each with its backward."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_GELU, _GELU_BACKWARD = torch.ops.aten.gelu, torch.ops.aten.gelu_backward

# name -> (h = act(y), dy = act'(y) dh from (dh, y))
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (lambda y: _GELU(y), lambda dh, y: _GELU_BACKWARD(dh, y)),
    "gelu_tanh": (lambda y: _GELU(y, approximate="tanh"), lambda dh, y: _GELU_BACKWARD(dh, y, approximate="tanh")),
    "relu": (torch.relu, lambda dh, y: torch.ops.aten.threshold_backward(dh, y, 0)),
    "silu": (F.silu, lambda dh, y: torch.ops.aten.silu_backward(dh, y)),
}
