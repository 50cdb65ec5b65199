"""Bags of ids as `nn.EmbeddingBag` takes them: validation, and which id belongs to which bag.

Shapes: N ids, B bags.
"""

import torch
from torch import Tensor

from comera.errors import DataError
from comera.ops.lookup_rows import are_read


def bag_of_each(count: int, offsets_B: Tensor) -> Tensor:
    """The bag (count,) of each id, for bags that begin at `offsets_B` (0 first, never decreasing)."""
    size_B = _sizes(count, offsets_B)
    return torch.arange(offsets_B.numel(), device=offsets_B.device).repeat_interleave(size_B, output_size=count)


def _sizes(count: int, offsets_B: Tensor) -> Tensor:
    return torch.cat([offsets_B[1:], offsets_B.new_full((min(1, offsets_B.numel()),), count)]) - offsets_B


def check_bags(ids: Tensor, offsets: Tensor | None, mode: str, weights: Tensor | None, last: bool) -> None:
    """Raise unless shapes, dtypes and mode describe bags; `last`: the offsets end with the number of ids."""
    if mode not in ("sum", "mean"):
        raise ValueError(f"expected mode 'sum' or 'mean', got {mode!r}: a maximum of rows needs the dense table")
    if weights is not None and mode != "sum":
        raise ValueError(f"per_sample_weights are for mode 'sum', got mode {mode!r}")
    if weights is not None and weights.shape != ids.shape:
        raise DataError(f"expected per_sample_weights of the ids' shape {list(ids.shape)}, got {list(weights.shape)}")
    if ids.dim() == 2 and offsets is None:
        return
    if ids.dim() != 1 or offsets is None:
        got = "no offsets" if offsets is None else f"offsets of shape {list(offsets.shape)}"
        raise DataError(
            f"expected ids (bags, ids in a bag) without offsets, or (all ids,) with offsets (bags,); got ids of shape "
            f"{list(ids.shape)} and {got}"
        )
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expected offsets of dtype int32 or int64, got {offsets.dtype}: convert them with .long()")
    if offsets.dim() != 1 or (last and not offsets.numel()):
        least = "(bags + 1,)" if last else "(bags,)"
        raise DataError(f"expected offsets of shape {least}, got {list(offsets.shape)}")


def bag_starts(ids: Tensor, offsets: Tensor | None, last: bool) -> Tensor:
    """Where each bag begins among the flattened ids, int64. Raises DataError for offsets that do not fit the ids."""
    if offsets is None:
        bags, width = ids.shape
        return torch.arange(bags, device=ids.device) * width
    count, tail = ids.numel(), offsets[-1:]
    good = torch.cat([offsets[:1] == 0, tail == count if last else tail <= count, offsets[1:] >= offsets[:-1]]).all()
    ending = "end with" if last else "reach at most"
    expected = f"expected offsets that begin with 0, never decrease and {ending} {count}, the number of ids"
    if not are_read(ids):
        torch._assert_async(good, expected)
    elif not good:
        shown = offsets.tolist() if offsets.numel() <= 8 else f"{offsets[:6].tolist()} ... {offsets[-2:].tolist()}"
        raise DataError(f"{expected}; got {shown}: each offset is where a bag begins among the ids")
    return (offsets[:-1] if last else offsets).long()


def ids_in_each(ids_N: Tensor, offsets_B: Tensor, padding: int | None) -> Tensor:
    """The number of ids (B,) in each bag that are not `padding`; 1 for a bag without any, whose mean is zero."""
    if padding is None:
        size_B = _sizes(ids_N.numel(), offsets_B)
    else:
        bag_N = bag_of_each(ids_N.numel(), offsets_B)
        size_B = torch.zeros_like(offsets_B).index_add(0, bag_N, (ids_N != padding).long())
    return size_B.clamp(min=1)
