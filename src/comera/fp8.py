"""fp8_: which layers of a model compute in FP8, switched in place, and why the others do not."""

from dataclasses import dataclass
from typing import Any, get_args

from torch import nn

from comera.errors import ConversionError
from comera.kernels.scaled_mm import MULTIPLE, unavailable_reason
from comera.nn.conv import TTConv
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.ngram import NGramTable
from comera.nn.packed import CompressedParameter
from comera.nn.tensor_train import CompressedLayer
from comera.ops.fp8 import Recipe
from comera.tables import Report, Table

__all__ = ["FP8Report", "FP8Row", "fp8_"]


@dataclass(frozen=True)
class FP8Row:
    """One linear or compressed layer: its name and type, and why it does not compute in FP8 ("": it does).

    in_features, out_features, rank: of a `TTLinear`; None for other layers. note: what
    its rank is padded to.

    See `fp8_`.
    """

    name: str
    kind: str
    reason: str = ""
    note: str = ""
    in_features: int | None = None
    out_features: int | None = None
    rank: int | None = None


@dataclass(frozen=True, repr=False)
class FP8Report(Report):
    """What `fp8_` switched and what it left alone.

    rows: every linear or compressed layer, in order. recipe: None where FP8 was taken back. emulated: why the device of
    the layers emulates FP8; None where it has scaled products.

    See `fp8_`.
    """

    rows: tuple[FP8Row, ...]
    recipe: Recipe | None
    emulated: str | None

    @property
    def left_alone(self) -> tuple[FP8Row, ...]:
        """The layers that do not compute in FP8."""
        return tuple(row for row in self.rows if row.reason)

    @property
    def headline(self) -> str:
        if self.recipe is None:
            return "FP8 taken back"
        count = len(self.rows) - len(self.left_alone)
        text = f"{count} of {len(self.rows)} layers compute in FP8 ({self.recipe})"
        if self.emulated:
            text += f", emulated on this device: slower, for checking quality only ({self.emulated})"
        return text

    def records(self) -> list[dict[str, Any]]:
        return [
            {
                "layer": row.name,
                "type": row.kind,
                "in": row.in_features,
                "out": row.out_features,
                "rank": row.rank,
                "products": self._products(row),
                "note": row.reason or row.note,
            }
            for row in self.rows
        ]

    def table(self) -> Table:
        records = self.records()
        cells = [tuple("" if value is None else str(value) for value in each.values()) for each in records]
        return Table(("layer", "type", "in", "out", "rank", "products", "note"), "llrrrll", tuple(cells))

    def _products(self, row: FP8Row) -> str:
        return "as before" if row.reason or self.recipe is None else "FP8"


def fp8_(model: nn.Module, recipe: Recipe | None = "tensorwise") -> FP8Report:
    """Let the tensor train linear layers of a model compute in FP8, in place.

    Their products with the batch, forward and backward, take float8 operands: inputs, factors and gradients in e4m3,
    each scaled by a power of two to its range; they are accumulated in float32. So they keep a byte per element of
    their input for the backward. Everything else stays: parameters, merges of cores, biases, other layers.
    On a CUDA device of capability 8.9 or later torch's scaled products run; elsewhere they are emulated, with the same
    rounding of the operands, which is slower and for checking quality only.

    A layer whose features are no multiples of 16 is left alone, and so is every other type of layer, block tensor
    trains among them. Ranks may have any size, also while they adapt: a device pads them to multiples of 16.

    FP8 is no state: a checkpoint or saved model does not hold it, so call `fp8_` again after loading. Exported models
    compute in the precision of their weights. `fuse_` leaves blocks with FP8 layers to these layers, in whichever order
    the two are called. A second call replaces the first.

    Args:
        model: a model with tensor train layers, on any device.
        recipe: "tensorwise": one scale for each operand. "rowwise": one for each row (and column of the weight), so
            tokens with large elements do not cost others their precision. "hybrid": as "tensorwise", with gradients in
            e5m2, which the paper has; it learns less (docs/log.md). None takes FP8 back.

    Returns:
        A table with every linear or compressed layer, and for those left alone the reason.

    Raises:
        ConversionError: for an unknown recipe, or if no layer can compute in FP8; the model is unchanged.

    Example:
        >>> import torch, comera
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 40))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=16)))
        >>> report = comera.fp8_(model, "rowwise")
        >>> [(row.name, row.reason) for row in report.left_alone]
        [('2', 'out_features 40 is no multiple of 16 (nearest: 48)')]
        >>> model(torch.randn(5, 64)).sum().backward()  # the loop stays as it was

    Source: docs/method.md §4.
    """
    if recipe is not None and recipe not in get_args(Recipe):
        raise ConversionError(f"expected a recipe out of {', '.join(get_args(Recipe))} or None, got {recipe!r}")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, CompressedLayer | nn.Linear)}
    rows = tuple(_row(name, layer) for name, layer in layers.items())
    converted = [layer for layer, row in zip(layers.values(), rows, strict=True) if not row.reason]
    if recipe is not None and not converted:
        reasons = dict.fromkeys(f"{row.name or 'the model'} ({row.kind}): {row.reason}" for row in rows)
        found = "; ".join(list(reasons)[:3]) or "no linear layer"
        raise ConversionError(
            f"expected a tensor train linear layer with features in multiples of {MULTIPLE}, got a "
            f"{type(model).__name__} without one ({found}): compress it first, with tensorize_ and the format TT"
        )
    for layer in layers.values():
        if isinstance(layer, TTLinear):
            layer.fp8 = recipe if layer in converted else None
    devices = {layer.tt.cores[0].device: None for layer in converted if isinstance(layer, TTLinear)}
    emulated = next(filter(None, map(unavailable_reason, devices)), None) if recipe else None
    return FP8Report(rows, recipe, emulated)


def _row(name: str, layer: nn.Module) -> FP8Row:
    kind = type(layer).__name__
    if not isinstance(layer, TTLinear):
        return FP8Row(name, kind, _other(layer))
    spec = layer.spec
    if spec.activation:
        return FP8Row(name, kind, f"{spec.activation} between its factors has no FP8 product")
    rank, sizes = spec.ranks[spec.split], {"in_features": spec.in_features, "out_features": spec.out_features}
    wrong = [
        f"{what} {size} is no multiple of {MULTIPLE} (nearest: {_nearest(size)})"
        for what, size in sizes.items()
        if size % MULTIPLE
    ]
    padded = f"a device pads rank {rank} to {rank + -rank % MULTIPLE}" if rank % MULTIPLE and not wrong else ""
    return FP8Row(name, kind, ", ".join(wrong), padded, rank=rank, **sizes)


def _other(layer: nn.Module) -> str:
    if isinstance(layer, BTTLinear):
        return "block tensor trains have no FP8 product, tensor trains have"
    if isinstance(layer, TTConv):
        return "convolutions have no FP8 product"
    if isinstance(layer, CompressedParameter):
        return "the module that reads it multiplies by it itself"
    if isinstance(layer, NGramTable):
        return "n-gram tables have no FP8 product"
    if isinstance(layer, CompressedLayer):
        return "TT-matrices have no FP8 product"
    return "dense layers stay as they are"


def _nearest(size: int) -> int:
    """The multiple that is nearest, the larger of two, and never 0."""
    return max(MULTIPLE, (size + MULTIPLE // 2) // MULTIPLE * MULTIPLE)
