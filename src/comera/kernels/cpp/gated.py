"""The operations of gated.cpp: a hidden activation, gated or not, and its gradients."""

from torch import Tensor

from comera.kernels.cpp.library import call, checked, floats, operation
from comera.kernels.cpp.memory import empty

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")  # in the order of mlp.cpp and gated.cpp


@operation()
def gated(g: Tensor, u: Tensor | None, activation: str) -> Tensor:
    """h = act(g) u, or act(g) without u, contiguous. activation: a name in ACTIVATIONS.

    Raises RuntimeError for shapes that differ or are not float32 on the CPU.
    """
    g, u, h = floats("g", g), checked("u", u, *g.shape), empty(*g.shape)
    call("gated", ACTIVATIONS.index(activation), h.numel(), g, u, h)
    return h


@operation()
def gated_backward(dh: Tensor, g: Tensor, u: Tensor | None, activation: str) -> list[Tensor]:
    """dg, and du where there is u. Raises RuntimeError as `gated` does."""
    g, u, dh = floats("g", g), checked("u", u, *g.shape), checked("dh", dh, *g.shape)
    made = [empty(*g.shape) for _ in range(1 if u is None else 2)]
    dg, du = (*made, None)[:2]
    call("gated_backward", ACTIVATIONS.index(activation), g.numel(), dh, g, u, dg, du)
    return made
