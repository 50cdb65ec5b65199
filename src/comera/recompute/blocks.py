"""Low-rank recomputation: wide activations between compressed layers are rebuilt in the backward from narrow ones.

A compressed layer's two products with the batch, P = A xᵀ and y = Pᵀ B, cost the same, but P is r wide and y as wide as
the layer. So of a transformer block only these are kept for the backward:

    its input            the one wide tensor
    narrow products      P of every compressed layer, r numbers a token
    what was drawn       dropout masks, as booleans
    fused attention      its output and log-sum-exp, where one kernel computes it

and everything else (y, GELU, layer norms, q, k, v, ...) is computed again when the backward comes to the block, with
the kept tensors put in place of the operations that made them (replay.py). Half of the products are spared that way,
nothing is drawn twice, and the numbers are those without recomputation, to the bit.

It does not matter who wrote the block or how its layers compute: what is kept is decided per operation, below autograd,
and the replay is PyTorch's non-reentrant checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from comera.errors import ConversionError
from comera.nn.linear import TTLinear
from comera.nn.tensor_train import CompressedLayer
from comera.recompute.replay import contexts, policy

_LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class RecomputeReport:
    """Which blocks recompute, by name, and the number of compressed layers in them.

    wide: numbers a token that their linear layers put out, which are no longer kept (what lies between them comes on
    top: activations, norms, attention); narrow: what these layers keep instead.
    """

    blocks: tuple[str, ...]
    layers: int
    wide: int
    narrow: int
    enabled: bool = True

    def __str__(self) -> str:
        names = ", ".join(self.blocks if len(self.blocks) <= 3 else (self.blocks[0], "...", self.blocks[-1]))
        what = f"{len(self.blocks)} blocks ({names})" if self.blocks else "no block"
        if not self.enabled:
            return f"recomputation taken off {what}"
        return (
            f"recomputation in {what}: their {self.layers} compressed layers keep {self.narrow:,} numbers a token "
            f"instead of {self.wide:,}"
        )


def recompute_(model: nn.Module, *, enabled: bool = True, blocks: str | Sequence[str] | None = None) -> RecomputeReport:
    """Let the repeated blocks of a compressed model rebuild their wide activations in the backward; in place.

    enabled: False takes recomputation off the whole model.
    blocks: patterns of module names ("encoder.layer.*"), the outermost matches count; left out, `find_blocks` chooses.
    A second call replaces the first. Names of parameters, the state_dict, copies and pickles stay what they were.
    Blocks recompute in training mode under gradients, else they run as before. A cache of keys and values is not
    filled while they do; one that holds some already keeps the block from it. Gradients are those without
    recomputation, to the bit wherever the operations repeat to the bit; not for gradients of gradients.
    Raises ConversionError when there is no block; the model is left as it was.
    """
    modules = dict(model.named_modules())
    dressed = {name: module for name, module in modules.items() if _is_dressed(module)}
    found = {} if not enabled else find_blocks(model) if blocks is None else _matching(modules, blocks)
    if enabled and not found:
        what = "has none" if blocks is None else f"has no module with compressed layers that matches {blocks!r}"
        raise ConversionError(
            "expected blocks, elements of an nn.ModuleList or nn.Sequential with two compressed layers or more, but "
            f"{type(model).__name__} {what}: compress it first (tensorize_), or name its blocks (blocks=)"
        )
    for module in dressed.values():
        _undress(module)
    for module in found.values():
        module.forward = _Recompute(module)
    return _report(found if enabled else dressed, enabled)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name, in its order.

    A block is an element of an nn.ModuleList or nn.Sequential with two compressed layers or more, unless there are
    blocks inside of it that between them hold all of these: a whole trunk is none, nor is each of a block's experts.
    """
    lists = [module for module in model.modules() if isinstance(module, _LISTS)]
    return _blocks(model, "", {element for elements in lists for element in elements})


def _blocks(module: nn.Module, name: str, elements: set[nn.Module]) -> dict[str, nn.Module]:
    inner: dict[str, nn.Module] = {}
    for child_name, child in module.named_children():
        inner |= _blocks(child, f"{name}.{child_name}".lstrip("."), elements)
    layers = _layers([module])
    whole = module in elements and len(layers) >= 2 and _layers(inner.values()) != layers
    return {name: module} if whole else inner


def _matching(modules: dict[str, nn.Module], blocks: str | Sequence[str]) -> dict[str, nn.Module]:
    """The outermost modules with compressed layers whose name matches a pattern."""
    patterns = [blocks] if isinstance(blocks, str) else blocks
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, module in modules.items():  # parents come before their children
        if module not in inside and any(fnmatchcase(name, pattern) for pattern in patterns) and _layers([module]):
            found[name] = module
            inside.update(module.modules())
    return found


def _layers(modules: Iterable[nn.Module]) -> set[CompressedLayer]:
    return {layer for module in modules for layer in module.modules() if isinstance(layer, CompressedLayer)}


def _report(blocks: dict[str, nn.Module], enabled: bool) -> RecomputeReport:
    layers = _layers(blocks.values())
    specs = [layer.spec for layer in layers if isinstance(layer, TTLinear)]
    wide, narrow = sum(spec.out_features for spec in specs), sum(spec.ranks[spec.split] for spec in specs)
    return RecomputeReport(tuple(blocks), len(layers), wide, narrow, enabled)


class _Recompute:
    """The forward of a block that recomputes; an attribute of the instance, so its class stays what it was.

    own: a forward that the instance had already (of another library), or None for that of its class. It refers to the
    block and to no bound method, so that in a copy or a pickle of the block it refers to that one.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.own = vars(block).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        forward = self.own or partial(type(block).forward, block)
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            keep = partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=keep, **kwargs)
        if any(_is_cache(value) and value.get_seq_length() for value in (*args, *kwargs.values())):
            return forward(*args, **kwargs)
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        # What was drawn is kept, so there is no random state to restore (which a CUDA graph would not let us).
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)


def _is_dressed(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), _Recompute)


def _undress(module: nn.Module) -> None:
    own = vars(module).pop("forward").own
    if own is not None:
        module.forward = own


def _is_cache(value: object) -> bool:
    """Whether it is a cache of keys and values of `transformers`, which the replay would fill once more."""
    library = sys.modules.get("transformers.cache_utils")  # never imported from here
    return library is not None and isinstance(value, library.Cache)
