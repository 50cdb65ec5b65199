"""Layers around a table that is a tensor-train matrix: its rows, their sums over bags, the output head tied to it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from comera.errors import SpecError
from comera.nn.inputs import of_another_kind, one_call
from comera.nn.tensor_train import CompressedLayer, TensorTrain
from comera.ops.lookup import LookupTable, ttm_bag, ttm_lookup
from comera.ops.projection import ttm_linear
from comera.tt.dense import zero_row
from comera.tt.spec import TTMSpec


class _TTMLayer(CompressedLayer):
    """A layer around a tensor-train matrix of shape (num_embeddings, embedding_dim).

    tt: the tensor train, or a TTMSpec from which one is made with unit std, as `nn.Embedding` and `nn.EmbeddingBag`
    have. padding_idx: the row that is exactly zero and gets no gradient, unless `tt.padding_row`; a negative one counts
    from the end.
    Raises SpecError for a tensor train of another format or a padding_idx outside the table.
    """

    def __init__(
        self,
        tt: TensorTrain | TTMSpec,
        padding_idx: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(tt, TTMSpec):
            tt = TensorTrain(tt, init_std=1.0, dtype=dtype, device=device)
        if not isinstance(tt, TensorTrain) or not isinstance(tt.spec, TTMSpec):
            kind = type(self).__name__
            raise SpecError(f"{kind} needs a TTMSpec or a TensorTrain with one, got {getattr(tt, 'spec', tt)}")
        rows = tt.spec.num_embeddings
        if padding_idx is not None and not -rows <= padding_idx < rows:
            raise SpecError(f"padding_idx must be an id of the table's {rows} rows, got {padding_idx}")
        self.tt = tt
        self.padding_idx = padding_idx % rows if padding_idx is not None else None

    @property
    def spec(self) -> TTMSpec:
        """Modes and ranks of the table."""
        assert isinstance(self.tt.spec, TTMSpec)
        return self.tt.spec

    @property
    def zero_row(self) -> int | None:
        """The row of padding, if it is exactly zero."""
        return None if self.tt.padding_row else self.padding_idx

    @property
    def _dense_shape(self) -> tuple[int, int]:
        return self.spec.shape

    def _dense(self, tensors: Sequence[Tensor]) -> Tensor:
        table_VD = self.tt.dense(tensors).contiguous()
        return table_VD if self.zero_row is None else zero_row(table_VD, self.zero_row)

    def _padding_repr(self) -> str:
        return f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""


class TTMTable(_TTMLayer):
    """A layer that looks up rows by their ids."""

    @classmethod
    @abstractmethod
    def like(cls, dense: Any, tt: TensorTrain) -> TTMTable:
        """The layer around `tt` with the settings of the dense one that it replaces."""

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.spec.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Columns of the table."""
        return self.spec.embedding_dim

    def lookup_table(self, name: str) -> LookupTable:
        """The table as `ttm_lookups` takes it. name: how an error calls it."""
        cores, gates = self.tt.tensors
        return LookupTable(self.spec, cores, gates, self.zero_row, self.tt.threshold, name)

    def scaled(self, rows: Tensor) -> Tensor:
        """The layer's output, for rows of its tensor train."""
        return rows

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}{self._padding_repr()}"


class TTMEmbedding(TTMTable):
    """Drop-in for `nn.Embedding`: rows of a tensor-train matrix.

    embed_scale: what some models multiply the rows by; a tensor of one element is rounded to the dtype of rows first.
    Input: integer ids of any shape -> (..., embedding_dim). An id outside the table is an IdError.

    Example:
        >>> import torch
        >>> from comera.nn import TTMEmbedding
        >>> from comera.tt import ttm_spec
        >>> table = TTMEmbedding(ttm_spec(30522, 768, order=3, rank=30), padding_idx=0)
        >>> table(torch.tensor([[101, 2054], [0, 102]])).shape
        torch.Size([2, 2, 768])
        >>> f"{sum(p.numel() for p in table.parameters()):,} of {30522 * 768:,} parameters"
        '228,180 of 23,440,896 parameters'
    """

    dense_type: type[nn.Module] = nn.Embedding
    embed_scale: float | Tensor = 1.0

    @classmethod
    def like(cls, dense: Any, tt: TensorTrain) -> TTMEmbedding:
        return cls(tt, dense.padding_idx)

    def forward(self, input: Tensor) -> Tensor:
        if (output := of_another_kind(self, input)) is not None:
            return output  # type: ignore[no-any-return]
        cores, gates = list(self.tt.cores), self.tt.gates()
        return self.scaled(ttm_lookup(input, self.spec, cores, gates=gates, padding_idx=self.zero_row))

    def scaled(self, rows: Tensor) -> Tensor:
        scale = self.embed_scale
        if isinstance(scale, Tensor):
            return rows * scale.to(rows.dtype)
        return rows if scale == 1.0 else rows * scale

    def extra_repr(self) -> str:
        scale = float(self.embed_scale)
        return super().extra_repr() + (f", embed_scale={scale:g}" if scale != 1.0 else "")


class TTMEmbeddingBag(TTMTable):
    """Drop-in for `nn.EmbeddingBag`: sums or means over bags of rows of a tensor-train matrix.

    mode: "sum" or "mean"; another one is a ValueError. padding_idx: ids that count in no bag. include_last_offset:
    whether the offsets end with the number of ids.
    Input as that of `nn.EmbeddingBag`: ids (bags, ids in a bag), or ids (all ids,) with offsets (bags,); for sums also
    per_sample_weights of the ids' shape -> (bags, embedding_dim), zeros for an empty bag. An id outside the table is an
    IdError, offsets or weights that do not fit the ids are a DataError.

    Example:
        >>> import torch
        >>> from comera.nn import TTMEmbeddingBag
        >>> from comera.tt import ttm_spec
        >>> table = TTMEmbeddingBag(ttm_spec(100_000, 64, order=3, rank=16), mode="mean")
        >>> ids, offsets = torch.tensor([4, 99_999, 7, 7, 1]), torch.tensor([0, 2])  # bags of two and of three ids
        >>> table(ids, offsets).shape
        torch.Size([2, 64])
    """

    dense_type: type[nn.Module] = nn.EmbeddingBag
    sparse = False  # of the dense bag that it replaces, which it becomes again

    @classmethod
    def like(cls, dense: Any, tt: TensorTrain) -> TTMEmbeddingBag:
        bag = cls(tt, dense.mode, dense.padding_idx, dense.include_last_offset)
        bag.sparse = dense.sparse
        return bag

    def __init__(
        self,
        tt: TensorTrain | TTMSpec,
        mode: Literal["sum", "mean"] = "sum",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tt, padding_idx, dtype=dtype, device=device)
        if mode not in ("sum", "mean"):
            raise ValueError(f"expected mode 'sum' or 'mean', got {mode!r}: a maximum needs the dense rows")
        self.mode: Literal["sum", "mean"] = mode
        self.include_last_offset = include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if isinstance(input, Proxy):
            return one_call(self, input, offsets, per_sample_weights)  # type: ignore[no-any-return]
        last = self.include_last_offset
        if input.layout is torch.jagged and offsets is None:  # each of its rows is a bag
            bags: Any = input.contiguous()
            input, offsets, last = bags.values(), bags.offsets(), True
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.values()
        return ttm_bag(
            input,
            offsets,
            self.spec,
            list(self.tt.cores),
            mode=self.mode,
            gates=self.tt.gates(),
            per_sample_weights=per_sample_weights,
            padding_idx=self.padding_idx,
            include_last_offset=last,
        )

    def extra_repr(self) -> str:
        last = ", include_last_offset=True" if self.include_last_offset else ""
        return f"{super().extra_repr()}, mode={self.mode!r}{last}"


class TTMProjection(_TTMLayer):
    """Output head over a tensor-train matrix: logits = x Eᵀ + bias, usually sharing E with a TTMEmbedding.

    Input (..., embedding_dim) -> logits (..., num_embeddings). bias: True (zeros), False, or a Parameter of shape
    (num_embeddings,) to keep; another shape is a SpecError. padding_idx: the zero row of the TTMEmbedding that shares
    the table: its logit is the bias alone.

    Example:
        >>> import torch
        >>> from comera.nn import TTMEmbedding, TTMProjection
        >>> from comera.tt import ttm_spec
        >>> embed = TTMEmbedding(ttm_spec(5000, 128, order=3, rank=16))
        >>> head = TTMProjection(embed.tt, bias=False)  # tied: both have one tensor train
        >>> head(embed(torch.tensor([[1, 2, 3]]))).shape
        torch.Size([1, 3, 5000])
    """

    dense_type: type[nn.Module] = nn.Linear
    bias: nn.Parameter | None

    def __init__(
        self,
        tt: TensorTrain | TTMSpec,
        bias: bool | nn.Parameter = True,
        padding_idx: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tt, padding_idx, dtype=dtype, device=device)
        self._add_bias(bias, self.spec.num_embeddings)

    @property
    def in_features(self) -> int:
        """Size of the input's last axis."""
        return self.spec.embedding_dim

    @property
    def out_features(self) -> int:
        """Size of the output's last axis."""
        return self.spec.num_embeddings

    def forward(self, input: Tensor) -> Tensor:
        if (output := of_another_kind(self, input)) is not None:
            return output  # type: ignore[no-any-return]
        (cores, _), gates = self.tt.tensors, self.tt.gates()
        return ttm_linear(input, self.spec, cores, self.bias, gates=gates, padding_idx=self.zero_row)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}{self._padding_repr()}"
