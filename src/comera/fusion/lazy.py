"""Tensors that are computed only when their values are used.

A fused block runs its own code on a stand-in (registry.py) whose layers return such tensors: a residual sum, which its
norm computes together with itself; a hidden activation, which the last layer of an MLP computes with all layers before.
Any other use computes the values on the spot, so the code may do anything, but change in place what such a tensor has
yet to read: that is an error where torch counts writes, which it does not in inference mode.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from comera.errors import ConversionError
from comera.kernels.tracing import traced


class Lazy:
    """A tensor that is computed when its values are used for the first time."""

    def __init__(self) -> None:
        self._value: Tensor | None = None

    def compute(self) -> Tensor:
        """The values."""
        raise NotImplementedError

    @property
    def value(self) -> Tensor:
        """The tensor."""
        if self._value is None:
            self._value = self.compute()
        return self._value

    def dropped(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """The tensor after `F.dropout`."""
        return F.dropout(self.value, p, training, inplace) if p and training else self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.add and len(args) == 2 and not kwargs:  # tensor + lazy
            return args[1] + args[0]
        if function is F.dropout and isinstance(args[0], Lazy):
            return args[0].dropped(*args[1:], **kwargs)
        args, kwargs = tree_map_only(Lazy, value_of, (args, kwargs))
        return function(*args, **kwargs)


class Inputs:
    """What a lazy tensor has yet to read, as it is now."""

    def __init__(self, *tensors: Any) -> None:
        self._tensors, self._versions = tensors, list(map(_version, tensors))

    @property
    def unchanged(self) -> bool:
        """Whether nothing was written to them since, as far as torch counts it."""
        return list(map(_version, self._tensors)) == self._versions

    def check(self) -> None:
        """Raise ConversionError if they were written to."""
        if not self.unchanged:
            raise ConversionError(
                "expected a fused block to leave what its layers were given as it is until they have read it, got "
                "another value written in place, of which the layers would have made another result: write "
                "`x = x * 0.5` instead of `x.mul_(0.5)`, or do not register the block"
            )


def _version(tensor: Any) -> int | None:
    if not isinstance(tensor, Tensor) or traced() or tensor.is_inference():
        return None
    return tensor._version


def value_of(result: Any) -> Any:
    """The tensor of a lazy result; anything else unchanged."""
    return result.value if isinstance(result, Lazy) else result


def values_of(results: Any) -> Any:
    """The results of a method, with all lazy ones computed."""
    return tuple(map(value_of, results)) if type(results) is tuple else value_of(results)


def _by_value(name: str) -> Callable[..., Any]:
    return lambda lazy, *others: getattr(lazy.value, name)(*map(value_of, others))


for _name in "add sub mul truediv radd rsub rmul rtruediv matmul pow neg getitem len".split():  # noqa: SIM905
    setattr(Lazy, f"__{_name}__", _by_value(f"__{_name}__"))  # Python looks operators up on the class only
