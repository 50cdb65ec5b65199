"""What a model with adapters remembers of itself, to be what it was when they go.

It is an attribute of the module that `adapt_` was given, so copies and pickles have it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from comera.adapters.config import TTAdapter
from comera.errors import ConversionError
from comera.nn.adapted import Adapted, adapted_layers

_ATTRIBUTE = "_comera_adapters"


@dataclass(frozen=True)
class Record:
    """flags: `requires_grad` of every parameter before, by name. heads: the state of each module of `also_train` before
    it was trained, by name. buffers: those that a state dict has, such as running statistics, as they were before."""

    adapter: TTAdapter
    flags: Mapping[str, bool]
    heads: Mapping[str, Mapping[str, Tensor]]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


def write(model: nn.Module, record: Record) -> None:
    """Keep the record of a model."""
    setattr(model, _ATTRIBUTE, record)


def take(model: nn.Module) -> None:
    """Drop the record of a model."""
    delattr(model, _ATTRIBUTE)


def read(model: nn.Module, call: str) -> tuple[nn.Module, Record, dict[str, Adapted]]:
    """The module in a model (or in a wrapper of it) that was given to `adapt_`, its record, and its adapted layers.

    Raises ConversionError for a model without adapters, of which this is a part, or with parts that have their own.
    """
    kind, adapted = type(model).__name__, adapted_layers(model)
    known = [(name, module, vars(module).get(_ATTRIBUTE)) for name, module in model.named_modules()]
    found = [(name, module, record) for name, module, record in known if isinstance(record, Record)]
    if found:
        inside = {layer for _, module, _ in found for layer in adapted_layers(module).values()}
        parts = [name for name, *_ in found] + [name for name, layer in adapted.items() if layer not in inside]
        if len(parts) > 1:
            raise ConversionError(
                f"{call}: expected one model that adapt_ or load_adapters_ was given, got a {kind} with {len(parts)} "
                f"parts that have adapters of their own, {', '.join(name or 'the model itself' for name in parts)}: "
                "give each part by itself, inner ones first"
            )
        _, root, record = found[0]
        return root, record, adapted_layers(root)
    if adapted:
        raise ConversionError(
            f"{call}: expected the model that adapt_ or load_adapters_ was given, got a part of it, a {kind}: give the "
            "whole model"
        )
    raise ConversionError(
        f"{call}: expected a model with adapters, got a {kind} without any: adapt_ or load_adapters_ gives it some"
    )


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a model that its state dict has, by name."""
    state = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in state and not buffer.is_meta}


def moved_buffers(model: nn.Module, record: Record) -> dict[str, Tensor]:
    """Those that are not what they were before there were adapters; without those of `also_train`."""
    return {
        name: buffer
        for name, buffer in stored_buffers(model).items()
        if name in record.buffers
        and not any(not head or name.startswith(f"{head}.") for head in record.heads)
        and not torch.equal(buffer, record.buffers[name].to(buffer.device))
    }


def restore_flags_(model: nn.Module, record: Record) -> None:
    """Give every parameter the `requires_grad` of before; one that the model did not have then keeps its own."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(record.flags.get(name, parameter.requires_grad))
