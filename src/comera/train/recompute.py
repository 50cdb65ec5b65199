"""Low-rank recomputation: wide activations between compressed layers are rebuilt in the backward from narrow ones.

A compressed layer's products with the batch, P = A xᵀ and y = Pᵀ B, cost the same, but P is r wide and y has the
layer's full width. So of a transformer block only these are kept for the backward:

    its input                the one wide tensor
    narrow products          P of every compressed layer: r numbers a token
    what was drawn           dropout masks, as booleans
    fused attention          its output and log-sum-exp, where one kernel computes it

and everything else (y, GELU, layer norms, q, k, v, ...) is computed again when the backward comes to the block, with
the kept tensors put in place of the operations that made them. Nothing is drawn twice, half of the products are not
repeated, and the numbers are those of the run without recomputation, to the bit.

The replay is PyTorch's non-reentrant checkpoint; what is kept is decided per operation, below autograd, so it does not
matter who wrote the block or how its layers compute.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from comera.errors import ConversionError, TrainingError
from comera.nn.bonds import CompressedLayer
from comera.nn.linear import TTLinear

# A product is narrow when it has at most this part of the numbers of the operand that it came from.
_NARROW = 4
_LISTS = (nn.ModuleList, nn.Sequential)
_aten = torch.ops.aten
# Products, with the place of their two factors among the arguments.
_PRODUCTS = {_aten.mm.default: 0, _aten.bmm.default: 0, _aten.addmm.default: 1, _aten.baddbmm.default: 1}


@dataclass(frozen=True)
class RecomputeReport:
    """Which blocks recompute, by name, and how many compressed layers they hold.

    narrow: numbers a token that their linear layers keep in place of their outputs, `wide` (as far as layers share
    outputs with nothing: what lies between them, GELU, norms, attention, comes on top).
    """

    blocks: tuple[str, ...]
    layers: int
    narrow: int
    wide: int
    enabled: bool = True

    def __str__(self) -> str:
        if not self.enabled:
            return f"recompute: taken off {len(self.blocks)} blocks"
        names = ", ".join(self.blocks if len(self.blocks) < 4 else (self.blocks[0], "...", self.blocks[-1]))
        return (
            f"recompute: {len(self.blocks)} blocks ({names}) with {self.layers} compressed layers, whose linear ones "
            f"keep {self.narrow:,} numbers a token instead of {self.wide:,}"
        )


def recompute_(
    model: nn.Module, *, enabled: bool = True, blocks: str | Sequence[str] | None = None
) -> RecomputeReport:
    """Let the repeated blocks of a compressed model rebuild their wide activations in the backward; in place.

    enabled: False takes recomputation off again, everywhere.
    blocks: patterns of qualified names ("encoder.layer.*"); left out, `find_blocks` chooses.
    Only forwards in training mode with gradients recompute; others run as they were. Names of parameters, state_dict,
    copies and pickles do not change. Calling again replaces what an earlier call chose. Keys and values of a cache are
    not written while a block recomputes; a cache that already holds some lets the block run as it was.
    Gradients are those without recomputation, to the bit where the block's operations repeat to the bit. For
    gradients of gradients, take it off. Raises ConversionError when no block is found; nothing is changed then.
    """
    modules = dict(model.named_modules())
    worn = {name: module for name, module in modules.items() if isinstance(vars(module).get("forward"), _Recompute)}
    if not enabled:
        for module in worn.values():
            _take_off(module)
        return _report(worn, enabled=False)
    found = find_blocks(model) if blocks is None else _matching(modules, blocks)
    if not found:
        what = "none found" if blocks is None else f"no module with a compressed layer matches {blocks!r}"
        raise ConversionError(
            f"expected blocks to recompute: elements of an nn.ModuleList or nn.Sequential with two compressed layers "
            f"or more; {what} in {type(model).__name__}: compress it first (tensorize_), or name its blocks"
        )
    for module in worn.values():
        _take_off(module)
    for module in found.values():
        module.forward = _Recompute(module)
    return _report(found)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's blocks by name: the smallest parts that repeat and between them hold the compressed layers.

    A block is an element of an nn.ModuleList or nn.Sequential with two compressed layers or more, unless blocks inside
    of it hold all of these (so neither a whole trunk nor a list of experts is one).
    """
    lists = [module for module in model.modules() if isinstance(module, _LISTS)]
    elements = {element for elements in lists for element in elements}
    return dict(_blocks(model, "", elements))


def _blocks(module: nn.Module, name: str, elements: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    inner: dict[nn.Module, str] = {}
    for child_name, child in module.named_children():
        for block_name, block in _blocks(child, f"{name}.{child_name}".lstrip("."), elements):
            inner.setdefault(block, block_name)
    layers = _layers([module])
    if module in elements and len(layers) >= 2 and _layers(inner) != layers:
        yield name, module
    else:
        yield from ((block_name, block) for block, block_name in inner.items())


def _layers(modules: Iterator[nn.Module] | Sequence[nn.Module] | dict[nn.Module, str]) -> set[CompressedLayer]:
    return {layer for module in modules for layer in module.modules() if isinstance(layer, CompressedLayer)}
