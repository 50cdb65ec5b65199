"""Low-rank recomputation: hidden activations between compressed layers are rebuilt in the backward from low-rank ones.

A compressed layer's two products with the batch, P = A xᵀ and y = Pᵀ B, cost the same, but P has r elements per token,
while y has as many as the layer has outputs. So for the backward, a transformer block keeps only its input, the one
hidden tensor, and what replay.py lists: P of every compressed layer, dropout masks, results of fused attention.
Everything else (y, GELU, layer norms, q, k, v, ...) is computed again when the backward reaches the block, with the
kept tensors in place of the operations that made them. This saves half of the products, draws nothing twice, and gives
the values without recomputation, to the bit.

It works for any block and any layers in it: what is kept is decided per operation, below autograd, and the replay is
PyTorch's non-reentrant checkpoint.
"""

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from comera.errors import ConversionError
from comera.kernels.tracing import transformed
from comera.memory.replay import SMALLER, BlockState, Kept, contexts, marked, only_marked, policy, settings
from comera.nn.adapted import Adapted
from comera.nn.conv import TTConv
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.tensor_train import CompressedLayer

_LISTS = (nn.ModuleList, nn.Sequential)
_Call = tuple[tuple[object, ...], ...]
"""What decides how a block computes: settings of its modules, and of what it is given."""
_MOST_CALLS = 64  # that a block remembers


class Elements(NamedTuple):
    """Elements per token (or output position) of a block's compressed layers.

    hidden: their outputs, which a block that recomputes no longer keeps (nor what lies between them: activations,
    norms, attention). low_rank: what these layers keep for the replay.
    """

    hidden: int = 0
    low_rank: int = 0


@dataclass(frozen=True)
class RecomputeReport:
    """Which blocks recompute, by name, and the number of compressed layers in them.

    hidden, low_rank: the `Elements` of these blocks. declined: those of blocks that would keep as much as they save, or
    more, and so run as before.

    See `recompute_`.
    """

    blocks: tuple[str, ...]
    layers: int
    hidden: int
    low_rank: int
    enabled: bool = True
    declined: Mapping[str, Elements] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.enabled:
            return f"recomputation removed from {_named(self.blocks)}"
        kept = f"their {self.layers} compressed layers keep {self.low_rank:,} elements per token instead of "
        lines = [f"recomputation in {_named(self.blocks)}" + (f": {kept}{self.hidden:,}" if self.blocks else "")]
        if self.declined:
            hidden, low_rank = (sum(each) for each in zip(*self.declined.values(), strict=True))
            lines.append(
                f"declined in {_named(tuple(self.declined))}: their compressed layers would keep {low_rank:,} elements "
                f"per token instead of {hidden:,}; lower ranks would save some"
            )
        return "\n".join(lines)


def _named(blocks: tuple[str, ...]) -> str:
    names = ", ".join(blocks if len(blocks) <= 3 else (blocks[0], "...", blocks[-1]))
    return f"{len(blocks)} block{'s' if len(blocks) > 1 else ''} ({names})" if blocks else "no block"


def recompute_(model: nn.Module, *, enabled: bool = True, blocks: str | Sequence[str] | None = None) -> RecomputeReport:
    """Rebuild the hidden activations of a compressed model's blocks in the backward instead of keeping them; in place.

    Blocks recompute in training mode with gradients enabled and run as before otherwise. Gradients are those without
    recomputation, to the bit wherever the operations repeat to the bit. Gradients of gradients are not supported. A
    key-value cache is not filled by a block that recomputes, and a block that gets a filled one does not recompute.
    What a block writes besides (running statistics, counters, recurrent states) is written once: `memory/replay.py`.
    Parameter names, the state_dict, copies and pickles stay as they are. A second call replaces the first.

    A block whose layers would keep no fewer elements than it saves is left as it is, with a warning.

    Args:
        model: a module with compressed layers.
        enabled: False removes recomputation from the whole model.
        blocks: patterns of module names ("encoder.layer.*"), of whose matches the outermost recompute. Default:
            `find_blocks`.

    Returns:
        Which blocks recompute, what they keep, and which ones were declined.

    Raises:
        ConversionError: there is no block; the model is unchanged.

    Example:
        >>> import torch, comera
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> model = torch.nn.Sequential(block(), block())
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=8)))
        >>> print(comera.recompute_(model))
        recomputation in 2 blocks (0, 1): their 4 compressed layers keep 32 elements per token instead of 640
        >>> model(torch.randn(5, 64)).sum().backward()  # the loop stays as it was

    Source: docs/method.md §8.
    """
    modules = dict(model.named_modules())
    recomputing = {
        name: module for name, module in modules.items() if isinstance(vars(module).get("forward"), _Recompute)
    }
    found = {} if not enabled else find_blocks(model) if blocks is None else _matching(modules, blocks)
    if enabled and not found:
        what = "has none" if blocks is None else f"has no module with compressed layers that matches {blocks!r}"
        raise ConversionError(
            "expected blocks, elements of an nn.ModuleList or nn.Sequential with two compressed layers or more, but "
            f"{type(model).__name__} {what}: compress it first (tensorize_), or name its blocks (blocks=)"
        )
    for module in recomputing.values():
        if (own := vars(module).pop("forward").own) is not None:
            module.forward = own
    counts = {name: elements([module]) for name, module in found.items()}
    declined = {name: count for name, count in counts.items() if not saves(count)}
    for name in found.keys() - declined.keys():
        found[name].forward = _Recompute(found[name])
    changed = {name: module for name, module in found.items() if name not in declined} if enabled else recomputing
    layers, count = _layers(changed.values()), elements(changed.values())
    report = RecomputeReport(tuple(changed), len(layers), *count, enabled, declined)
    if declined:
        warnings.warn(str(report), stacklevel=2)
    return report


def saves(count: Elements) -> bool:
    """Whether to recompute keeps less than it saves."""
    return count.low_rank < count.hidden


def elements(blocks: Iterable[nn.Module]) -> Elements:
    """What the compressed layers in these blocks have for a token."""
    layers = _layers(blocks)
    hidden = sum(layer.spec.out_features for layer in layers if isinstance(layer, TTLinear | BTTLinear | TTConv))
    return Elements(hidden, sum(map(_kept, layers)))


def _kept(layer: CompressedLayer) -> int:
    """Elements per token that a layer keeps: P, unless that is made again because it is not small (replay.py)."""
    if isinstance(layer, TTLinear):
        return layer.spec.ranks[layer.spec.split]
    if isinstance(layer, TTConv):
        made = layer.groups * layer.spec.ranks[layer.spec.split]
        return made if SMALLER * made <= layer.in_channels else 0
    if isinstance(layer, BTTLinear):
        made = layer.spec.ranks[1]
        return made if SMALLER * made <= layer.in_features else 0
    return 0


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name, in its order.

    A block is an element of an nn.ModuleList or nn.Sequential with at least two compressed layers, unless blocks inside
    it hold all of them. So neither a whole trunk nor a single expert of a block is one.

    Example:
        >>> import comera
        >>> from comera.memory import find_blocks
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=4), None))
        >>> list(find_blocks(model))
        ['encoder.layer.0', 'encoder.layer.1']
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
    """The outermost modules with compressed layers whose names match a pattern."""
    patterns = [blocks] if isinstance(blocks, str) else blocks
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, module in modules.items():  # parents come before their children
        if module not in inside and any(fnmatchcase(name, pattern) for pattern in patterns) and _layers([module]):
            found[name] = module
            inside.update(module.modules())
    return found


def _layers(modules: Iterable[nn.Module]) -> set[CompressedLayer]:
    """The compressed layers in these modules. Adapters are none: beside a dense layer they save it no product."""
    found = {layer for module in modules for layer in module.modules()}
    beside = {layer.adapter for layer in found if isinstance(layer, Adapted)}
    return {layer for layer in found if isinstance(layer, CompressedLayer)} - beside


class _Recompute:
    """The forward of a block that recomputes. It is an attribute of the instance, so the class stays as it is.

    own: a forward that the instance had before (from another library), or None for that of its class. `block` is the
    module and not a bound method, so a copy or pickle of the block refers to its own block.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.own = vars(block).get("forward")
        self.marked: dict[_Call, bool] = {}  # whether the code marks all that is kept, and the block writes nothing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        forward = self.own or partial(type(block).forward, block)
        if not (block.training and torch.is_grad_enabled()) or transformed():  # which allow no checkpoints
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            keep = partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=keep, **kwargs)
        if any(_is_cache(value) and value.get_seq_length() for value in (*args, *kwargs.values())):
            return forward(*args, **kwargs)
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        # Random draws are kept, or follow from states that `marked` restores: torch's own way to restore them would not
        # do in a CUDA graph.
        run = partial(checkpoint, forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        state = BlockState(block, args)
        call = state.settings, settings(args), settings(kwargs.values()), tuple(kwargs)
        if self.marked.get(call):
            return run(context_fn=partial(marked, state))
        kept: list[Kept] = []
        out = run(context_fn=partial(contexts, state, kept))
        if len(self.marked) >= _MOST_CALLS:
            self.marked.clear()
        on_cpu = all(p.device.type == "cpu" for p in block.parameters())
        self.marked[call] = on_cpu and only_marked(kept) and not state.wrote
        return out


def _is_cache(value: object) -> bool:
    """Whether it is a key-value cache of `transformers`, which the replay would fill a second time."""
    library = sys.modules.get("transformers.cache_utils")  # not imported here: it is heavy and optional
    return library is not None and isinstance(value, library.Cache)
