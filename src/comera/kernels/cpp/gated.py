"""The operations of gated.cpp: a hidden activation, gated or not, and its gradients."""

from torch import Tensor

from comera.kernels.cpp.activations import ACTIVATIONS
from comera.kernels.cpp.library import call, checked, floats, operation
from comera.kernels.cpp.memory import empty


@operation()
def gated(g: Tensor, u: Tensor, activation: str) -> Tensor:
    """h = act(g) u, contiguous. activation: a name in ACTIVATIONS.

    Raises RuntimeError for shapes that differ or are not float32 on the CPU.
    """
    g, u, h = floats("g", g), checked("u", u, *g.shape), empty(*g.shape)
    call("gated", ACTIVATIONS.index(activation), h.numel(), g, u, h)
    return h


@operation()
def gated_backward(dh: Tensor, g: Tensor, u: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """dg, du. Raises RuntimeError as `gated` does."""
    g, u, dh = floats("g", g), checked("u", u, *g.shape), checked("dh", dh, *g.shape)
    dg, du = empty(*g.shape), empty(*g.shape)
    call("gated_backward", ACTIVATIONS.index(activation), g.numel(), dh, g, u, dg, du)
    return dg, du


@operation()
def activated(y: Tensor, activation: str) -> Tensor:
    """act(y), contiguous. Raises RuntimeError as `gated` does."""
    y, h = floats("y", y), empty(*y.shape)
    call("gated", ACTIVATIONS.index(activation), h.numel(), y, None, h)
    return h


@operation()
def activated_backward(dh: Tensor, y: Tensor, activation: str) -> Tensor:
    """dy = act'(y) dh. Raises RuntimeError as `gated` does."""
    y, dh, dy = floats("y", y), checked("dh", dh, *y.shape), empty(*y.shape)
    call("gated_backward", ACTIVATIONS.index(activation), y.numel(), dh, y, None, dy, None)
    return dy
