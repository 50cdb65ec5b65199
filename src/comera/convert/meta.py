"""A model that was made on the meta device gets memory and values, but for the weights that will be compressed.

The model's own code draws what stays dense, and shows how a compressed weight would have been drawn: it runs once on
tensors of the right shapes that hold a sample of their elements. So a weight too large to exist has a standard
deviation, scaled residual layers and all, and what no code draws is named before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from comera.errors import ConversionError

_SAMPLE = 1 << 16  # elements, of which a standard deviation is known to 0.3 %


class Drawn:
    """How a model's own code would draw its parameters: it has done so, on samples of them.

    missing: names of the parameters and buffers that it does not draw.
    """

    def __init__(self, model: nn.Module) -> None:
        places = [*_on_meta(model)]
        cells = [_Cell(torch.zeros(min(tensor.numel(), _SAMPLE), dtype=tensor.dtype)) for *_, tensor in places]
        for (tensors, name, tensor), cell in zip(places, cells, strict=True):
            tensors[name] = _Sampled(tensor.shape, cell)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                draw_(model)
        finally:
            for tensors, name, tensor in places:
                tensors[name] = tensor
        # A tied one has the values of its first place that is drawn: ties are made after drawing.
        self._drawn: dict[int, _Cell] = {}
        self._places: dict[int, tuple[int, str]] = {}
        for (tensors, name, tensor), cell in zip(places, cells, strict=True):
            if (cell.written or not tensor.numel()) and id(tensor) not in self._drawn:
                self._drawn[id(tensor)], self._places[id(tensor)] = cell, (id(tensors), name)
        named = [*model.named_parameters(), *model.named_buffers()]
        self.missing = [n for n, t in named if t.is_meta and id(t) not in self._drawn]

    def draws(self, tensors: dict[str, Any], name: str, tensor: Tensor) -> bool:
        """Whether a tensor has its values from this place of its."""
        return self._places[id(tensor)] == (id(tensors), name)

    def std(self, parameter: Tensor) -> float | None:
        """Standard deviation of its elements; None where it is 0, which random cores cannot have.

        Raises ConversionError for what is not drawn element by element.
        """
        std = float(self._drawn[id(parameter)].sample.float().std(correction=0))
        if not std < float("inf"):
            raise ConversionError(
                f"expected weights that are drawn element by element, got one {tuple(parameter.shape)} that is not: "
                "give the standard deviation, TensorizeConfig(init_std=...), or make the model on a device instead"
            )
        return std or None


@dataclass
class _Cell:
    """A sample of a tensor's elements (S,). written: whether code has written to it. whole: and to all of it."""

    sample: Tensor
    written: bool = False
    whole: bool = False


class _Sampled(Tensor):
    """A tensor of some shape, of which a sample of the elements is there: operations on each element apply to these.

    part: whether it is a view of a part. What is written to parts alone is taken for what the whole holds; what is
    written to one after the whole, as to a row of padding, is not.
    """

    cell: _Cell
    part: bool
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: Sequence[int], cell: _Cell, *, part: bool = False) -> _Sampled:
        made: _Sampled = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=cell.sample.dtype, device=cell.sample.device
        )
        made.cell, made.part = cell, part
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the samples."""
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], cls) else None
        if target is not None and func._schema.is_mutable:
            return _write(func, target, args[1:], kwargs)
        shapes = func(*tree_map_only(Tensor, _shape_of, args), **tree_map_only(Tensor, _shape_of, kwargs))
        alias = func._schema.returns[0].alias_info if func._schema.returns else None
        if target is not None and alias is not None:
            return tree_map(lambda t: cls(t.shape, target.cell, part=target.part or t.numel() < target.numel()), shapes)
        size = next(each.cell.sample.numel() for each in (*args, *kwargs.values()) if isinstance(each, cls))

        def shaped(made: Any, like: Any) -> Any:
            if not isinstance(made, Tensor) or (made.dim() == 0 and like.dim() == 0):
                return made  # such as whether any element is so
            if made.shape == (min(like.numel(), _SAMPLE),):
                return cls(like.shape, _Cell(made))
            return made.view(like.shape)  # all of it: what does not go by elements, at its full size

        try:
            made = func(*_samples(args, size), **_samples(kwargs, size))
        except RuntimeError:  # not by elements: whatever it would be, the sample is of no number
            return tree_map(_unknown, shapes)
        return tree_map(shaped, made, shapes)


def _unknown(like: Tensor) -> _Sampled:
    return _Sampled(like.shape, _Cell(torch.full((min(like.numel(), _SAMPLE),), nan, dtype=like.dtype)))


def _write(func: Any, target: _Sampled, args: Any, kwargs: Any) -> _Sampled:
    cell = target.cell
    if not target.part or not cell.whole:
        size = cell.sample.numel()
        func(cell.sample, *_samples(args, size), **_samples(kwargs, size))
    cell.written, cell.whole = True, cell.whole or not target.part
    return target


def _samples(values: Any, size: int) -> Any:
    """The same arguments with a sample of each tensor, of `size` elements unless it is a scalar."""

    def sample(value: Tensor) -> Tensor:
        if isinstance(value, _Sampled):
            return value.cell.sample
        flat = value.detach().flatten()
        return flat if flat.numel() in (1, size) else flat[torch.linspace(0, flat.numel() - 1, size).long()]

    return tree_map_only(Tensor, sample, values)


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def draw_(module: nn.Module) -> None:
    """Draw all parameters and buffers of a dense module by its own code, children first, as it does when it is made."""
    with _drawn_anew(module):
        _draw_(module)


def _draw_(module: nn.Module) -> None:
    initialize = getattr(module, "initialize_weights", None)  # a model of transformers, its submodels included
    if callable(initialize) and hasattr(module, "_init_weights"):
        initialize()
        return
    for child in module.children():
        _draw_(child)
    for name in ("reset_parameters", "_reset_parameters"):  # torch's attention and its Transformer have the second
        if callable(reset := getattr(module, name, None)):
            with torch.no_grad():
                reset()
            return


@contextmanager
def _drawn_anew(model: nn.Module) -> Iterator[None]:
    """Inside, transformers takes no module and no parameter for drawn already, and its notes of it end here."""

    def forget() -> None:
        for each in (*model.modules(), *model.parameters(), *model.buffers()):
            vars(each).pop("_is_hf_initialized", None)

    forget()
    try:
        yield
    finally:
        forget()


def draw_on_(model: nn.Module, device: torch.device, drawn: Drawn, but: Sequence[Tensor]) -> None:
    """Give memory on a device, and values, to parameters and buffers on the meta device, but for some; ties are kept.

    Raises ConversionError for what was not drawn.
    """
    made: dict[int, Tensor] = {id(each): each for each in but}
    places = _on_meta(model)
    for tensors, name, old in places:
        if id(old) in made or not drawn.draws(tensors, name, old):
            continue
        new = torch.empty_like(old, device=device)
        if new.is_floating_point():
            new.fill_(nan)  # so that what is not drawn is seen
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
            vars(new).update(vars(old))
        tensors[name] = made[id(old)] = new
    draw_(model)
    for tensors, name, old in places:
        tensors[name] = made[id(old)]
    named = [*model.named_parameters(), *model.named_buffers()]
    if missing := [n for n, t in named if not t.is_meta and t.is_floating_point() and bool(t.isnan().any())]:
        raise undrawn(missing)


def undrawn(names: Sequence[str]) -> ConversionError:
    """The error for parameters and buffers that no code of the model draws."""
    more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    return ConversionError(
        "expected a model whose own code draws its parameters and buffers, but nothing draws "
        f"{', '.join(names[:3])}{more}: give the module that holds them a reset_parameters(), or make the model on a "
        "device instead of on meta"
    )


def _on_meta(model: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Every place of a parameter or buffer on the meta device: where it is registered, its name there, and it."""
    return [
        (tensors, name, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_meta
    ]
