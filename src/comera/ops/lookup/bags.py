"""Bags of ids as `nn.EmbeddingBag` takes them.

Shapes: N ids, B bags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from comera.errors import DataError
from comera.kernels.tracing import jit_traced, unrecorded_by_jit
from comera.ops.lookup.plan import are_read


class Bags(NamedTuple):
    """Which ids are in a bag together. starts: where each bag begins among the ids (B,), int64. ids: their number.
    shape: of ids (B, W), each row of which is a bag. of_one: whether each bag is known to have one id."""

    starts: Tensor
    ids: int
    shape: Sequence[int] | None = None
    of_one: bool = False

    @classmethod
    def of(cls, ids: Tensor, offsets: Tensor | None, mode: str, weights: Tensor | None, last: bool) -> Bags:
        """The bags that begin at the offsets, or with each row of ids (B, W). last: the offsets end with the number of
        ids. Raises ValueError, TypeError or DataError unless shapes, dtypes, offsets and the mode describe bags."""
        unrecorded_by_jit(_check, ids, offsets, mode, weights, last)
        if offsets is None:
            bags, width = ids.shape
            starts_B = torch.arange(bags, device=ids.device) * width
            return cls(starts_B, ids.numel(), ids.shape, not jit_traced() and width == 1)
        return cls((offsets[:-1] if last else offsets).long(), ids.numel())

    def of_each(self) -> Tensor:
        """The bag (N,) of each id."""
        places_B = torch.arange(self.starts.numel(), device=self.starts.device)
        return places_B.repeat_interleave(self._sizes(), output_size=None if jit_traced() else self.ids)

    def counts(self, ids_N: Tensor, padding: int | None) -> Tensor:
        """The number of ids (B,) in each bag that are not `padding`; 1 for a bag without any, whose mean is zero."""
        if padding is None:
            return self._sizes().clamp(min=1)
        kept_N = (ids_N != padding).long()
        if jit_traced() and self.shape is not None:
            return kept_N.view(self.shape).sum(1).clamp(min=1)
        return torch.zeros_like(self.starts).index_add(0, self.of_each(), kept_N).clamp(min=1)

    def _sizes(self) -> Tensor:
        ends = torch.cat([self.starts, self.starts.new_full((1,), self.ids)])
        return ends[1:] - ends[:-1]


def _check(ids: Tensor, offsets: Tensor | None, mode: str, weights: Tensor | None, last: bool) -> None:
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
    count, tail = ids.numel(), offsets[-1:]
    good = torch.cat([offsets[:1] == 0, tail == count if last else tail <= count, offsets[1:] >= offsets[:-1]]).all()
    ending = "end with" if last else "reach at most"
    expected = f"expected offsets that begin with 0, never decrease and {ending} {count}, the number of ids"
    if not are_read(offsets.device):
        torch._assert_async(good, expected)
    elif not good:
        shown = offsets.tolist() if offsets.numel() <= 8 else f"{offsets[:6].tolist()} ... {offsets[-2:].tolist()}"
        raise DataError(f"{expected}; got {shown}: each offset is where a bag begins among the ids")
