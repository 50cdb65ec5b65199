"""Whether a transform that records or rewrites operations is active: torch.compile, torch.func or torch.jit.trace.

None of them can see inside a C++ or Triton kernel. torch.compile supports custom autograd functions; the other two do
not.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")


def constant_when_traced(function: F) -> F:
    """Mark a function of plain Python values: torch.compile calls it at trace time and treats the result as constant.

    This sets the flag of `torch.compiler.assume_constant_result`, which would import torch._dynamo (over a second).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def traced() -> bool:
    """Whether only torch's own operations may be used: under torch.compile, or `transformed`."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._is_tracing()


def transformed() -> bool:
    """Whether custom autograd functions must not be used either: in a transform of torch.func (grad, vmap, jvp ...) or
    under torch.jit.trace, outside of torch.compile."""
    return not torch.compiler.is_compiling() and traced()


def jit_traced() -> bool:
    """Whether torch.jit.trace, or the ONNX exporter built on it, is recording: sizes of tensors are then tensors."""
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


def unrecorded_by_jit(function: Callable[..., T], *args: object) -> T:
    """Call function(*args) unseen by torch.jit.trace, so that sizes are integers. For checks and choices."""
    if not jit_traced():
        return function(*args)
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return function(*args)
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def untransformed(tensor: Tensor) -> Tensor:
    """The tensor inside torch.func's wrappers, whose values can be read; under vmap it holds all samples."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
