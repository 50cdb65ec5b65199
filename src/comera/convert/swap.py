"""Swapping dense layers for compressed ones and back, with everything that a layer carries besides its weight."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from comera.convert.declared import guard_resizing_, read_ties, rewrite_ties
from comera.convert.packed import packed_leaves
from comera.convert.registry import converters
from comera.errors import ConversionError
from comera.nn.changes import notify_conversion
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.ngram import NGramEmbedding, attach_ngrams_, plain_type
from comera.nn.packed import CompressedParameter, Holder, give_back_, hold_
from comera.nn.tensor_train import CompressedLayer, TensorTrain
from comera.nn.weight import marks_of
from comera.tt.spec import BTTSpec, TTMSpec

# Hooks see calls, not parameters, so they move along. The dictionaries themselves move, so that handles keep working.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
_STRUCTURE = frozenset(vars(nn.Module()))


@contextmanager
def _or_unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the model if anything is raised inside, also by the callbacks of `when_converted`."""
    held: list[Any] = [*model.modules(), *(vars(module).get("config") for module in model.modules())]
    before = [(one, type(one), dict(vars(one))) for one in held if hasattr(one, "__dict__")]
    registered = [(part, dict(part)) for _, _, own in before for part in own.values() if isinstance(part, dict)]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for part, entries in registered:  # modules, parameters, buffers: the same dictionaries, as others may hold them
            part.clear()
            part.update(entries)
        for one, kind, own in before:
            one.__class__ = kind
            vars(one).clear()
            vars(one).update(own)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
        raise


def held_besides(named: Iterable[tuple[str, nn.Module]]) -> dict[nn.Module, str]:
    """Modules that plain attributes of the modules of a model hold, too, with the first such attribute.

    It may hold one itself, in a list, tuple, set or dict, or by a bound method: `self.order = [self.a, self.b]`. A swap
    replaces what is registered, and would leave the model calling the old layer. One that a module holds of itself goes
    with it.
    """
    found: dict[nn.Module, str] = {}
    for path, module in named:
        for name, value in vars(module).items():
            for each in _members(value) if name not in _STRUCTURE else ():
                owner: Any = each.__self__ if type(each) is MethodType else each
                # by its own type: isinstance takes a weak proxy for what it stands for
                if issubclass(type(owner), nn.Module) and owner is not module:
                    found.setdefault(owner, f"{path or type(module).__name__}.{name}")
    return found


def _members(value: Any) -> Iterable[Any]:
    """What a container holds, of a dict its values; anything else by itself."""
    kind = type(value)
    if issubclass(kind, dict):
        return dict.values(value)  # not a subclass's own, which may make its values only then
    return value if issubclass(kind, list | tuple | set | frozenset) else (value,)


def check_reached(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Raise ConversionError for a layer that a swap would not replace everywhere: see `held_besides`."""
    held = held_besides(model.named_modules())
    for layer in layers:
        if layer in held:
            raise ConversionError(
                f"expected layers that a swap can replace, got a {type(layer).__name__}: {beside(held[layer])}"
            )


def beside(place: str) -> str:
    """Why a layer that this attribute holds, too, is not replaced."""
    hint = "use nn.ModuleList or nn.ModuleDict, or call it by its name"
    return f"{place} holds it, too, which a swap would not reach: {hint}"


def move_hooks_(old: nn.Module, new: nn.Module) -> None:
    """Give a module that takes the place of another one its hooks."""
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(old, hooks))


def compress_layers_(model: nn.Module, trains: Mapping[tuple[nn.Module, str], TensorTrain]) -> None:
    """Replace dense layers of registered types by compressed ones around these tensor trains; several may share one.

    A tensor train takes over the `requires_grad` of its layers' weight, and the marks that programs have put on it for
    their optimizers (`weight._no_weight_decay = True`). Biases stay the same objects; hooks and train
    mode move along. An error, as for a layer that a plain attribute holds, too, leaves the model as it was. trains:
    (layer, "weight") -> tensor train, and (module, name of a parameter) of one that the module reads itself, which
    stays the same object.
    """
    check_reached(model, (layer for layer, _ in trains if plain_type(layer) in converters()))
    padding: dict[TensorTrain, int | None] = {}
    layers: dict[nn.Module, TensorTrain] = {}
    held: list[tuple[nn.Module, str, TensorTrain]] = []
    for (layer, leaf), tt in trains.items():
        weight = layer.get_parameter(leaf)
        tt.requires_grad_(weight.requires_grad)
        for parameter in tt.parameters():
            vars(parameter).update(marks_of(weight))
        if plain_type(layer) not in converters():
            held.append((layer, leaf, tt))
            continue
        layers[layer] = tt
        if converters()[plain_type(layer)].table:
            padding[tt] = layer.padding_idx  # type: ignore[assignment]

    swaps: dict[nn.Module, CompressedLayer] = {}
    for layer, tt in layers.items():
        converter, bias = converters()[plain_type(layer)], layer._parameters.get("bias")
        if converter.table is not None:
            table = converter.table.like(layer, tt)
            if isinstance(table, TTMEmbedding):
                table.embed_scale = converter.embed_scale(layer)
            swaps[layer] = table
        elif converter.convolution is not None:
            swaps[layer] = converter.convolution.like(layer, tt)
        elif isinstance(tt.spec, TTMSpec):
            swaps[layer] = TTMProjection(tt, False if bias is None else bias, padding.get(tt))
        else:
            kind = BTTLinear if isinstance(tt.spec, BTTSpec) else TTLinear
            swaps[layer] = kind(tt, False if bias is None else bias)
        swaps[layer].dense_type = plain_type(layer)
    with _or_unchanged(model):
        for module, leaf, tt in held:
            layout = packed_leaves(module)[leaf].layout
            assert layout is not None
            hold_(module, leaf, tt, layout)
        _swap_(model, swaps)


def materialize_layers_(model: nn.Module, values: Mapping[CompressedLayer, Tensor] | None = None) -> int:
    """Replace every compressed layer by a dense one of its original type, and compressed parameters by dense ones;
    returns how many there were.

    Layers that share a tensor train share one weight again, unless one type stores it transposed. Raises
    ConversionError for a layer that a plain attribute holds, too. values: only these layers, with dense weights of
    these values.
    """
    weights: dict[tuple[TensorTrain, bool], nn.Parameter] = {}
    swaps: dict[nn.Module, nn.Module] = {}
    holders = [module for module in model.modules() if isinstance(module, Holder)] if values is None else []
    for layer in model.modules():
        if isinstance(layer, CompressedParameter):
            continue  # its holder gives it back
        if isinstance(layer, CompressedLayer) and (values is None or layer in values):
            converter = converters()[layer.dense_type]
            key = layer.tt, converter.in_first
            if key not in weights:
                weight = layer.weight if values is None else values[layer]
                weight = weight.t() if converter.in_first else weight
                value = weight.detach().clone(memory_format=torch.contiguous_format)
                trainable = any(p.requires_grad for p in layer.tt.parameters())
                weights[key] = nn.Parameter(value, requires_grad=trainable)
                vars(weights[key]).update(marks_of(layer.tt.cores[0]))
            with torch.device("meta"):
                dense = converter.build(layer)
            dense.register_parameter("weight", weights[key])
            if converter.table is None:
                dense.register_parameter("bias", layer._parameters["bias"])
            swaps[layer] = dense
    check_reached(model, swaps)
    with _or_unchanged(model):
        count = sum(map(give_back_, holders))
        if swaps or holders:
            _swap_(model, swaps)
    return len(swaps) + count


def _swap_(model: nn.Module, swaps: Mapping[nn.Module, nn.Module]) -> None:
    """Put the new modules wherever the old ones are registered."""
    ties = read_ties(model, swaps)
    for old, new in swaps.items():
        if isinstance(old, NGramEmbedding):
            attach_ngrams_(new, old.ngrams)
        new.train(old.training)
        move_hooks_(old, new)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in swaps:
                setattr(parent, name, swaps[child])
    rewrite_ties(model, ties)
    guard_resizing_(model)
    notify_conversion(model)
