"""`merge_adapters_`: W + s Δ in the place of W."""

import torch
from torch import Tensor, nn

from comera.adapters.attach import check_whole
from comera.adapters.record import read, restore_flags_, take
from comera.convert.declared import guard_resizing_
from comera.convert.swap import check_reached, materialize_layers_
from comera.errors import ConversionError
from comera.nn.adapted import Adapted, AdaptedDense, detach_
from comera.nn.tensor_train import CompressedLayer
from comera.ops.dtypes import merge_dtype
from comera.tt import dense


@torch.no_grad()
def merge_adapters_(model: nn.Module, *, materialize: bool = False) -> nn.Module:
    """Add the adapters of a model to its weights, in place: W + s Δ takes the place of W, and the adapters are gone.

    The model computes the same, up to rounding, with the layers that it had before `adapt_`. What `also_train` has
    trained stays, and parameters get back the `requires_grad` of before.

    A compressed layer has no dense weight to add to, and a sum of tensor trains is a tensor train of both ranks
    together, which costs as much as the two apart. So such adapters are not merged: leave them beside their
    layers, or let these become dense.

    Args:
        model: the model that was given to `adapt_`, or a wrapper of it.
        materialize: let compressed layers with an adapter become dense layers of their original type.

    Returns:
        The model.

    Raises:
        ConversionError: a model without adapters or that is sharded; an adapter beside a compressed layer, without
            `materialize`, beside a weight that other layers share, which would change with it, or that is not finite.
            The model is unchanged.

    Example:
        >>> import torch, comera
        >>> from comera.adapters import TTAdapter, adapt_, merge_adapters_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> _ = adapt_(model, TTAdapter(), targets="0")
        >>> _ = model[0].adapter.tt.cores[-1].data.normal_()  # as training does it
        >>> x = torch.randn(3, 64)
        >>> adapted = model(x)
        >>> merge_adapters_(model)
        Sequential(
          (0): Linear(in_features=64, out_features=64, bias=True)
        )
        >>> torch.allclose(model(x), adapted, atol=1e-5)
        True

    Source: docs/method.md §1.
    """
    root, record, layers = read(model, "merge_adapters_")
    check_whole("merge_adapters_", root)
    for name, layer in layers.items():
        reason = _obstacle(root, layer, materialize)
        if reason:
            raise ConversionError(f"merge_adapters_: {name or 'the model itself'} {reason}. Nothing was merged")
    check_reached(root, (layer for layer in layers.values() if isinstance(layer, CompressedLayer)))
    sums = {layer: _sum(layer) for layer in layers.values()}
    for layer in layers.values():
        detach_(layer)
    restore_flags_(root, record)
    take(root)
    for layer, value in sums.items():
        if not isinstance(layer, CompressedLayer):
            layer.get_parameter("weight").copy_(value)
    compressed: dict[CompressedLayer, Tensor] = {
        layer: value for layer, value in sums.items() if isinstance(layer, CompressedLayer)
    }
    if compressed:
        materialize_layers_(root, compressed)
    guard_resizing_(root)
    return model


def _sum(layer: Adapted) -> Tensor:
    """W + s Δ as the layer stores its weight; added in float32 where that is in half precision."""
    if not isinstance(layer, AdaptedDense):
        return layer.weight.detach().clone()
    tt, weight = layer.adapter.tt, layer._parameters["weight"]
    assert weight is not None
    wide = merge_dtype(weight.dtype)
    delta_IO = dense.materialize(tt.spec, [core.to(wide) for core in tt.effective_cores()])
    return torch.add(weight.to(wide), delta_IO if layer.in_first else delta_IO.t(), alpha=layer.adapter_scale)


def _obstacle(model: nn.Module, layer: Adapted, materialized: bool) -> str | None:
    """Why an adapter cannot be merged, or None."""
    if not all(p.isfinite().all() for p in layer.adapter.parameters()):
        return "has an adapter with NaN or infinite values: go back to the last good one (remove_adapters_)"
    train = layer.tt if isinstance(layer, CompressedLayer) else None
    if train is not None and not materialized:
        return (
            f"is a compressed layer ({layer.plain_type.__name__}), whose sum with the adapter is no cheaper than both "
            "apart: keep the adapter beside it (save_adapters), or give materialize=True for a dense layer"
        )
    if train is not None and train.spec.activation:
        return f"has an activation between the factors of its layer ({train.spec}), so it has no dense weight"
    own = layer._parameters["weight"] if train is None else train
    held = [module for module in model.modules() if id(own) in _held(module)]
    if len(held) > 1:
        return (
            "shares its weight with another layer, which would change too: keep the adapter beside it (save_adapters), "
            "or untie the layers before adapt_"
        )
    return None


def _held(module: nn.Module) -> list[int]:
    """Parameters and modules that a module holds itself, by identity."""
    return [*map(id, module._parameters.values()), *map(id, module._modules.values())]
