"""Residual sums that wait for their norm, so that both are one operation (ops/residual_norm.py).

A pattern runs a block's own code on a stand-in for the block (registry.py), with two kinds of attributes replaced. A
`Part`, such as attention, returns a term, which waits for its dropout and for what it is added to, and becomes a `Sum`.
A `Norm` computes that together with itself. A sum that the code uses otherwise is computed at that moment.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Signature, ismethod, signature
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from comera.fusion.dropout import Dropout
from comera.fusion.norm import add_and_rms_norm
from comera.fusion.registry import Fused, StandIn, is_hooked, is_replaced, own_type, passed_on, submodule
from comera.fusion.residual import add_and_layer_norm

NO_DROPOUT = nn.Dropout(0.0).eval()


def run_with_sums(
    module: nn.Module,
    method: str,
    parts: Sequence[str],
    norms: Sequence[str],
    given: Mapping[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What a method of a module's class returns, with its residual sums left to its norms.

    parts: names of what is added up there: modules, or methods, of whose results the first counts; or a dropout, which
        with a dotted name ends the forward of the module, or the method, before the dot. norms: names of norms that may
        follow.
    given: other stand-ins, by name; a part may be among them.
    """
    replaced = dict(given)
    for path in parts:
        name, _, dropout = path.partition(".")
        known = not is_replaced(module, name)  # a method of somebody else may end otherwise
        replaced[name] = Part(given[name] if name in given else getattr(module, name), dropout if known else "")
    for name in norms:
        replaced[name] = Norm(submodule(module, name))
    results = getattr(own_type(module), method)(StandIn(module, replaced), *args, **kwargs)
    return tuple(map(_value, results)) if type(results) is tuple else _value(results)


def is_dropout(part: Any) -> bool:
    """Whether a part is a dropout."""
    return type(part) in (nn.Dropout, Dropout)


def dropout_of(module: nn.Module, path: str) -> nn.Module:
    """The dropout that is this part of a module, or ends it; one that does nothing where there is none."""
    name, _, dropout = path.partition(".")
    part = getattr(module, name)
    if dropout:  # of a method: one of the module itself
        part = submodule(part if isinstance(part, nn.Module) else module, dropout)
    return part if is_dropout(part) else NO_DROPOUT


class Part:
    """A part whose result waits for its dropout and for what it is added to.

    dropout: name of the dropout that ends it: a module's forward, or a method of the module that has this dropout.
    """

    def __init__(self, part: Any, dropout: str = "") -> None:
        self._part, self._dropout = part, dropout

    @property
    def __signature__(self) -> Signature:  # callers look at it
        return signature(self._part)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dropout(self._part):
            (z,) = args
            return Sum(z, dropout=self._part)
        run, dropout = self._without_dropout() or (self._part, NO_DROPOUT)
        results = run(*args, **kwargs)
        if isinstance(results, tuple):
            return (Sum(results[0], dropout=dropout), *results[1:])
        return Sum(results, dropout=dropout)

    def _without_dropout(self) -> tuple[Any, nn.Module] | None:
        """The part but for its dropout, and that; None where the part had better be called."""
        part = self._part
        if not self._dropout or (isinstance(part, nn.Module) and (is_hooked(part) or "forward" in vars(part))):
            return None
        owner: Any = part.module if isinstance(part, Fused) else part.__self__ if ismethod(part) else part
        dropout = submodule(owner, self._dropout)
        if not is_dropout(dropout) or not (dropout.training and dropout.p) or is_hooked(dropout):
            return None
        without = StandIn(owner, {self._dropout: passed_on})
        if isinstance(part, Fused):
            return partial(part.pattern.run, without, part.cache), dropout  # type: ignore[arg-type]
        return partial(part.__func__ if ismethod(part) else type(part).forward, without), dropout


class Norm(StandIn):
    """A norm that computes the sum before it, too. Callers may look at its weight and its eps."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(norm, {})

    def __call__(self, input: Any) -> Any:
        return input.normed(self._module) if isinstance(input, Sum) else self._module(input)


class Sum:
    """x + dropout(z), computed by the norm that it is given to, or by the first who needs its value.

    z None: x alone. x None: dropout(z) alone, a term, which waits for what it is added to.
    """

    def __init__(self, z: Tensor | None, x: Tensor | None = None, dropout: nn.Module = NO_DROPOUT) -> None:
        self._z, self._x, self._dropout = z, x, dropout
        self._value: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The sum as a tensor."""
        if self._value is not None:
            return self._value
        if self._z is None:
            assert self._x is not None
            return self._x
        term: Tensor = self._dropout(self._z)
        self._value = term if self._x is None else term + self._x
        return self._value

    def normed(self, norm: nn.Module) -> Tensor:
        """The norm of the sum, whose value is known from then on."""
        z, x = self._z, self._x
        if self._value is not None or x is None:
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
        other = _value(other)
        if self._is_term and isinstance(other, Tensor) and other.shape == self.shape:
            return Sum(self._z, other, self._dropout)
        return self.value + other

    __radd__ = __add__

    @property
    def _is_term(self) -> bool:
        return self._x is None and self._value is None

    @property
    def shape(self) -> Any:
        """That of the value."""
        return next(t for t in (self._z, self._x) if t is not None).shape

    def size(self, *dimension: int) -> Any:
        """That of the value."""
        return self.shape[dimension[0]] if dimension else self.shape

    def reshape(self, *shape: Any) -> Any:
        """The sum in another shape."""
        if self._value is not None:
            return self._value.reshape(*shape)
        z, x = (None if t is None else t.reshape(*shape) for t in (self._z, self._x))
        return Sum(z, x, self._dropout)

    view = reshape

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.add and len(args) == 2 and not kwargs:  # tensor + sum
            return args[1] + args[0]
        if function is F.dropout and isinstance(args[0], Sum) and args[0]._is_term:
            return args[0]._dropped(*args[1:], **kwargs)
        args, kwargs = tree_map_only(Sum, _value, (args, kwargs))
        return function(*args, **kwargs)

    def _dropped(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> "Sum":
        """The term after one more dropout, of which no module knows."""
        if not (p and training):
            return self
        z = self._z if self._dropout is NO_DROPOUT else self.value
        return Sum(z, dropout=Dropout(p, inplace))


def _by_value(name: str) -> Callable[..., Any]:
    return lambda total, *others: getattr(total.value, name)(*map(_value, others))


for _name in ("sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "pow", "neg", "getitem", "len"):
    setattr(Sum, f"__{_name}__", _by_value(f"__{_name}__"))  # Python looks for operators at the class alone


def _value(result: Any) -> Any:
    return result.value if isinstance(result, Sum) else result
