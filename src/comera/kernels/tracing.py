"""Who takes operations apart, torch.compile or torch.func, and marks for the former, set without importing it."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., object])


def constant_when_traced(function: F) -> F:
    """Mark a function of Python values so that torch.compile calls it while tracing and keeps its result.

    The mark of `torch.compiler.assume_constant_result`, which would import torch._dynamo (over a second) with comera.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def traced() -> bool:
    """Whether only torch's own operations will do: torch.compile traces them, or they are `transformed`."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp ...) takes operations apart outside of torch.compile: a kernel
    or a custom autograd function would stop it."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def untransformed(tensor: Tensor) -> Tensor:
    """The tensor inside of the wrappers of torch.func, whose values can be read; with all samples of a vmap."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
