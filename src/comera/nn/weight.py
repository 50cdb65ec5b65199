"""`layer.weight` of a compressed layer, for code that reads the weight of a dense one: made when its values are used.

    reading      dtype, device, shape, requires_grad ... make nothing; any operation makes the dense weight, once
    gradients    that of the dense weight, however it comes about, goes on to the cores and gates
    hooks        raise: the layer's own forward makes no weight, so no gradient of it would come by
    writing      raises: nothing is stored that could be written to, and a write into a temporary tensor would be lost;
                 but `weight.mul_(2)`, a product with a number, is the same product of one core
    memory       what was made lives as long as something holds the weight; what is made inside `released()`, as a graph
                 holds it for its backward, only until its end, and is made again when it is used
    one of many  where the maker of a stack of matrices has `at`, an index makes that one alone

A wrapper without memory, whose operations are caught below autograd and autocast. So torch's schemas tell what writes
and what is a view, and custom functions of others get their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from comera.errors import WeightError
from comera.ops.dtypes import without_autocast

Make = Callable[[Sequence[Tensor]], Tensor]
"""From cores and gates to the dense weight, contiguous and differentiable."""


_scope = local()  # .made: the sources whose values were made in the innermost `released()` of this thread


@contextmanager
def released() -> Iterator[None]:
    """Give back, at the end, what was made of weights inside."""
    outer, made = getattr(_scope, "made", None), list[_Source]()
    _scope.made = made
    try:
        yield
    finally:
        _scope.made = outer
        for source in made:
            source.made = None


class _Source:
    """The values of a weight, made at the first use and then kept."""

    def __init__(self, make: Make, tensors: Sequence[Tensor], made: Tensor | None = None) -> None:
        self.make, self.tensors, self.made = make, tensors, made

    def values(self) -> Tensor:
        made = self.made  # which another thread may give back meanwhile
        if made is None:
            with torch.no_grad(), without_autocast(self.tensors[0]):
                self.made = made = self.make([tensor.detach() for tensor in self.tensors])
            if getattr(_scope, "made", None) is not None:
                _scope.made.append(self)
        return made

    def view(self, out: Tensor) -> _Source:
        """The source of a view of the values."""
        same = out.dtype == self.tensors[0].dtype  # other types of elements cannot be taken from the weight again
        return _View(self, out) if same else _Source(self.make, self.tensors, out)


class _View(_Source):
    """The values of a view, taken from those of the weight at each use: it keeps none itself."""

    def __init__(self, whole: _Source, out: Tensor) -> None:
        super().__init__(whole.make, whole.tensors)
        self.whole, self.geometry = whole, (out.shape, out.stride(), out.storage_offset())

    def values(self) -> Tensor:
        return self.whole.values().as_strided(*self.geometry)

    def view(self, out: Tensor) -> _Source:
        return self.whole.view(out)


class LazyWeight(Tensor):
    """A dense weight that is made of cores and gates when its values are used, or a view of one; read-only.

    Attributes that others have put on the parameters, such as marks of a library, are found on it, and are set there.
    """

    _source: _Source
    _is_whole: bool
    """Whether it stands for the weight itself: not for a view, nor detached."""

    @staticmethod
    def __new__(cls, source: _Source, shape: Sequence[int], stride: Sequence[int] | None = None) -> LazyWeight:
        like = source.tensors[0] if source.made is None else source.made
        self: LazyWeight = Tensor._make_wrapper_subclass(
            cls, tuple(shape), strides=stride, dtype=like.dtype, device=like.device
        )
        vars(self).update(_source=source, _is_whole=stride is None)
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SETS or (func == _SET_GRAD and args[1] is not None):
            _raise(getattr(func, "__name__", str(func)), args[0])
        if func in _WATCHES and args[0]._is_whole:
            raise WeightError(
                f"{func.__name__}: expected a parameter, got the weight of a compressed layer, which its own forward "
                "does not make, so no gradient would come by: hook its cores (layer.tt.cores), or keep the layer "
                "dense (TensorizeConfig(overrides={name: None}))"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.__getitem__ and args[0]._is_whole and _is_single(args[1]):
                one = args[0]._at(args[1])
                if one is not None:
                    return one
            if func in _FREEZES and args[0]._is_whole:
                for tensor in args[0]._source.tensors:
                    tensor.requires_grad_(*args[1:], **kwargs)
                return args[0]
            if func in _SCALES and args[0]._is_whole and isinstance(args[1], int | float) and not kwargs:
                func(args[0]._source.tensors[0], args[1])  # the weight is linear in each core
                args[0]._source.made = None
                return args[0]
            if func in _READS_MEMORY:
                args = tree_map_only(LazyWeight, LazyWeight._leaf, args)
            out = func(*args, **kwargs)
            if func in _ARRAYS:
                out.flags.writeable = False
            return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the base class has None in its place
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            (weight,) = args
            return LazyWeight(weight._source, weight.shape, weight.stride())
        for weight in _written(func, args, kwargs):
            _raise(str(func), weight)
        weights: list[LazyWeight] = []

        def values(weight: LazyWeight) -> Tensor:
            weights.append(weight)
            return weight._source.values()

        out = func(*tree_map_only(LazyWeight, values, args), **tree_map_only(LazyWeight, values, kwargs))
        if not func.is_view:
            return out
        source = weights[0]._source
        return tree_map_only(Tensor, lambda made: LazyWeight(source.view(made), made.shape, made.stride()), out)

    def _at(self, index: int | Tensor) -> Tensor | None:
        """One of a stack of matrices, which is made alone; None if all are made together."""
        at: Callable[[int | Tensor], Make] | None = getattr(self._source.make, "at", None)
        return None if at is None else lazy_weight(at(index), self.shape[1:], self._source.tensors)

    def _leaf(self) -> Tensor:
        """The values as a tensor of its own, for what reads memory."""
        return self._source.values().detach().requires_grad_(self.requires_grad)

    def __getattr__(self, name: str) -> Any:
        if name in LazyWeight.__annotations__:
            raise AttributeError(name)
        first, *others = (getattr(tensor, name) for tensor in self._source.tensors)
        if any(other is not first for other in others):
            raise AttributeError(f"the parameters of a compressed layer differ in {name!r}: ask them one by one")
        return first

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(Tensor, name):
            super().__setattr__(name, value)
        else:
            for tensor in self._source.tensors:
                setattr(tensor, name, value)


def marks_of(parameter: Tensor) -> dict[str, Any]:
    """What programs have noted on a parameter, such as `_no_weight_decay`; no tensors, which would be of its shape."""
    return {name: value for name, value in vars(parameter).items() if not isinstance(value, Tensor)}


_FREEZES = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_SETS = {Tensor.data.__set__, Tensor.apply_, Tensor.map_, Tensor.map2_}  # type: ignore[attr-defined]
_WATCHES = {Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook}
_SCALES = {Tensor.mul_, Tensor.div_, Tensor.__imul__, Tensor.__itruediv__}
_SET_GRAD = Tensor.grad.__set__  # type: ignore[union-attr]
_ARRAYS: set[Any] = {Tensor.__array__, Tensor.numpy}
_READS_MEMORY: set[Any] = _ARRAYS | {
    Tensor.__deepcopy__,
    Tensor.__dlpack__,
    Tensor.__format__,
    Tensor.__reduce_ex__,
    Tensor.__repr__,
    Tensor.data_ptr,
    Tensor.is_shared,
    Tensor.share_memory_,
    Tensor.storage,
    Tensor.tolist,
    Tensor.untyped_storage,
}


class _Weight(torch.autograd.Function):
    """The wrapper as a differentiable function of cores and gates."""

    @staticmethod
    def forward(ctx: Any, make: Make, shape: Sequence[int], *tensors: Tensor) -> LazyWeight:
        ctx.make = make
        ctx.save_for_backward(*tensors)
        return LazyWeight(_Source(make, tensors), shape)

    @staticmethod
    def backward(ctx: Any, dweight: Tensor) -> tuple[Tensor | None, ...]:
        again, wants = torch.is_grad_enabled(), ctx.needs_input_grad[2:]
        tensors: list[Tensor] = list(ctx.saved_tensors)
        if not again:
            tensors = [t.detach().requires_grad_(want) for t, want in zip(tensors, wants, strict=True)]
        with torch.enable_grad():
            weight = ctx.make(tensors)
        wanted = [tensor for tensor, want in zip(tensors, wants, strict=True) if want]
        grads = iter(torch.autograd.grad(weight, wanted, dweight, create_graph=again))
        return None, None, *(next(grads) if want else None for want in wants)


def lazy_weight(make: Make, shape: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
    """The dense weight of `shape` that `make` makes of cores and gates; where they need gradients it says so, as a
    parameter does, also without gradients."""
    with torch.enable_grad():
        weight: LazyWeight = _Weight.apply(make, shape, *tensors)
    return weight


def _is_single(index: object) -> bool:
    if isinstance(index, Tensor):
        return index.ndim == 0 and index.dtype in (torch.int32, torch.int64)
    return isinstance(index, int) and not isinstance(index, bool)


def is_weight_of(value: object, tensors: Sequence[Tensor]) -> bool:
    """Whether a value is the lazy weight of these cores and gates."""
    return isinstance(value, LazyWeight) and list(map(id, value._source.tensors)) == list(map(id, tensors))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[LazyWeight]:
    """The weights among the arguments of an operation that it writes to."""
    for place, argument in enumerate(func._schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes or func.namespace == "c10d":  # whose schemas do not say what they write
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_leaves(given) if isinstance(each, LazyWeight))


def _raise(what: str, weight: LazyWeight) -> None:
    raise WeightError(
        f"expected the weight {tuple(weight.shape)} of a compressed layer to be read only, got a write by {what}, "
        "which would be lost: the weight is made of the tensor train's cores when it is used. Draw new cores with "
        "layer.reset_parameters(), replace them with layer.tt.set_(), or make the layers dense first with "
        "comera.materialize_(model)"
    )
