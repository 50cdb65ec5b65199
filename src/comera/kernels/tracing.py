"""Questions about transforms that see every operation: torch.compile, torch.func and torch.jit.trace.

None of them sees into a C++ or Triton kernel. torch.compile knows custom autograd functions; the other two do not.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")


def constant_when_traced(function: F) -> F:
    """Mark a function of Python values so that torch.compile calls it while tracing and keeps its result.

    The mark of `torch.compiler.assume_constant_result`, which would import torch._dynamo (over a second) with comera.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def traced() -> bool:
    """Whether an operation must consist of torch's own operations: under torch.compile, or `transformed`."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._is_tracing()


def transformed() -> bool:
    """Whether custom autograd functions are out as well: in a transform of torch.func (grad, vmap, jvp ...) or under
    torch.jit.trace, outside of torch.compile."""
    return not torch.compiler.is_compiling() and traced()


def jit_traced() -> bool:
    """Whether torch.jit.trace, or the ONNX exporter that uses it, records: sizes of tensors are tensors then."""
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


def unrecorded_by_jit(function: Callable[..., T], *args: object) -> T:
    """function(*args), with numbers for sizes: torch.jit.trace does not record it. For checks and choices."""
    if not jit_traced():
        return function(*args)
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return function(*args)
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def untransformed(tensor: Tensor) -> Tensor:
    """The tensor inside of the wrappers of torch.func, whose values can be read; with all samples of a vmap."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
