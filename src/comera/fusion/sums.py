"""Residual sums that are deferred to their norm, so that both run as one operation (ops/residual_norm.py).

A block's own code runs on a stand-in (registry.py) whose parts and norms are replaced. A `Part`, such as attention,
returns a term: a `Sum` that lacks its other operand so far, and whose dropout has not been drawn yet. A norm computes
the `Sum` and itself in one operation; any other use computes the `Sum` alone (lazy.py).
"""

from collections.abc import Callable
from functools import partial
from inspect import Signature, ismethod, signature
from typing import Any

import torch
from torch import Tensor, nn

from comera.fusion.dropout import Dropout
from comera.fusion.lazy import Inputs, Lazy, value_of
from comera.fusion.norm import add_and_rms_norm
from comera.fusion.obstacles import call_obstacle, is_hooked, submodule
from comera.fusion.registry import Fused, Instead, StandIn
from comera.fusion.same_code import code_of
from comera.kernels.tracing import traced
from comera.ops.dtypes import autocast_dtype
from comera.ops.residual_norm import residual_layer_norm

NO_DROPOUT = nn.Dropout(0.0).eval()


def add_and_layer_norm(z: Tensor, x: Tensor, dropout: nn.Module, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """s = dropout(z) + x and norm(s): in one operation where nothing stands in its way, else by the modules."""
    if not _fits(z, x, dropout, norm):
        s = dropout(z) + x
        return s, norm(s)
    p = dropout.p if dropout.training else 0.0
    return residual_layer_norm(z, x, norm.weight, norm.bias, norm.eps, p)  # type: ignore[arg-type]


def _fits(z: Tensor, x: Tensor, dropout: Any, norm: Any) -> bool:
    if traced() or layer_norm_obstacle(dropout, norm) or (dropout.training and dropout.p == 1):
        return False
    shapes = z.shape == x.shape and norm.normalized_shape == z.shape[-1:]
    # autocast computes norms of half precision in dtypes of its own
    return shapes and (autocast_dtype(z) is None or torch.promote_types(z.dtype, x.dtype) == torch.float32)


def layer_norm_obstacle(dropout: nn.Module, norm: nn.Module) -> str | None:
    """Why dropout, sum and norm cannot be replaced by one operation; None if they can."""
    if type(norm) is not nn.LayerNorm:
        return f"its norm is a {type(norm).__name__}, not an nn.LayerNorm"
    if not is_dropout(dropout):
        return f"its dropout is a {type(dropout).__name__}, not an nn.Dropout"
    if dropout.inplace:
        return "its dropout works in place"
    reason = call_obstacle(dropout) or call_obstacle(norm)
    return f"its norm or dropout {reason}" if reason else None


def is_dropout(part: Any) -> bool:
    """Whether a part of a block is a dropout."""
    return type(part) in (nn.Dropout, Dropout)


def dropout_of(module: nn.Module, path: str) -> nn.Module:
    """The dropout that `path` names in a module, or that ends the part of that name; `NO_DROPOUT` if there is none."""
    name, _, dropout = path.partition(".")
    part = getattr(module, name)
    if dropout:  # a method uses a dropout of the module itself
        part = submodule(part if isinstance(part, nn.Module) else module, dropout)
    return part if is_dropout(part) else NO_DROPOUT


class Part:
    """Calls a part of a block and returns its result as a term.

    dropout: name of the dropout that ends the part: a submodule of the part or, if the part is a method, of the module
        that has the method.
    """

    def __init__(self, part: Any, dropout: str = "") -> None:
        self._part, self._dropout = part, dropout

    @property
    def __signature__(self) -> Signature:  # callers inspect it
        return signature(self._part)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if is_dropout(self._part):
            (z,) = args
            return Sum(z, dropout=self._part)
        results = self._with_waiting_dropout()(*args, **kwargs)
        return (_term(results[0]), *results[1:]) if isinstance(results, tuple) else _term(results)

    def _with_waiting_dropout(self) -> Callable[..., Any]:
        """The part, with its final dropout deferred to the sum where possible."""
        part = self._part
        if not self._dropout or (isinstance(part, nn.Module) and _must_be_called(part)):
            return part  # type: ignore[no-any-return]
        owner: Any = part.module if isinstance(part, Fused) else part.__self__ if ismethod(part) else part
        dropout = submodule(owner, self._dropout)
        if not is_dropout(dropout) or not (dropout.training and dropout.p) or call_obstacle(dropout):
            return part  # type: ignore[no-any-return]
        waiting = StandIn(owner, {self._dropout: Part(dropout)})
        if isinstance(part, Fused):
            return partial(part.run, waiting)
        return partial(part.__func__ if ismethod(part) else type(part).forward, waiting)


def _must_be_called(part: nn.Module) -> bool:
    """Whether a part must run as it is: it has hooks, or a forward other than that of its class as shipped."""
    own = "forward" in vars(part) or code_of(type(part), "forward", whole=False).changed
    return bool(own) or is_hooked(part)


def _term(result: Any) -> "Sum":
    return result if isinstance(result, Sum) else Sum(value_of(result))


def norm_of_sums(norm: nn.Module) -> Instead:
    """A stand-in for a norm that also computes the sum that it is given."""
    return Instead(norm, lambda input: input.normed(norm) if isinstance(input, Sum) else norm(input))


class Sum(Lazy):
    """x + dropout(z), computed by the norm that receives it, or at any other use.

    Without z it is just x. Without x it is a term, dropout(z), still to be added to something.
    """

    def __init__(self, z: Tensor | None, x: Tensor | None = None, dropout: nn.Module = NO_DROPOUT) -> None:
        super().__init__()
        self._z, self._x, self._dropout = z, x, dropout
        self._inputs = Inputs(*(() if z is None or x is None else (z, x)))  # alone each is the result itself

    def compute(self) -> Tensor:
        self._inputs.check()
        if self._z is None:
            return self._x  # type: ignore[return-value]
        term: Tensor = self._dropout(self._z)
        return term if self._x is None else term + self._x

    def normed(self, norm: nn.Module) -> Tensor:
        """The norm of the sum, whose own value is known afterwards."""
        z, x = self._z, self._x
        if self._value is None:
            self._inputs.check()
        if x is None or (z is not None and self._value is not None):
            y: Tensor = norm(self.value)
        elif type(norm) is not nn.LayerNorm:
            self._value, y = add_and_rms_norm(None if z is None else self._dropout(z), x, norm)
        elif z is not None:
            self._value, y = add_and_layer_norm(z, x, self._dropout, norm)
        else:  # torch's is as fast
            y = norm(x)
        return y

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Sum) and other._is_term and not self._is_term:
            return other + self.value
        other = value_of(other)
        if self._is_term and isinstance(other, Tensor) and other.shape == self.shape:
            self._inputs.check()
            return Sum(self._z, other, self._dropout)
        return self.value + other

    __radd__ = __add__

    @property
    def _is_term(self) -> bool:
        return self._x is None and self._value is None

    @property
    def shape(self) -> Any:
        """The shape of the sum."""
        return next(t for t in (self._z, self._x) if t is not None).shape

    def size(self, *dimension: int) -> Any:
        """The shape of the sum, or its length along one dimension."""
        return self.shape[dimension[0]] if dimension else self.shape

    def reshape(self, *shape: Any) -> Any:
        """The sum in another shape."""
        if self._value is not None:
            return self._value.reshape(*shape)
        self._inputs.check()
        z, x = (None if t is None else t.reshape(*shape) for t in (self._z, self._x))
        return Sum(z, x, self._dropout)

    view = reshape

    def dropped(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not (self._is_term and p and training):
            return super().dropped(p, training, inplace)
        self._inputs.check()
        return Sum(self._z if self._dropout is NO_DROPOUT else self.value, dropout=Dropout(p, inplace))
