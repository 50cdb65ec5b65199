"""TTMEmbedding: an embedding whose table is a tensor-train matrix; TTMProjection: the output head tied to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comera.contract.linear import ttm_linear
from comera.contract.lookup import ttm_lookup
from comera.errors import SpecError
from comera.nn.bonds import CompressedLayer, TensorTrain
from comera.tt.spec import TTMSpec


class _TTMLayer(CompressedLayer):
    """A layer around a tensor-train matrix of shape (num_embeddings, embedding_dim).

    tt: the chain, or a TTMSpec from which one is made with unit std, as `nn.Embedding` has.
    padding_idx: the row of the table that is exactly zero and gets no gradient; negative ones count from the end.
    """

    def __init__(
        self,
        tt: TensorTrain | TTMSpec,
        padding_idx: int | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
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
    def weight(self) -> Tensor:
        """The materialised table (num_embeddings, embedding_dim), made anew at each access: for inspection only."""
        table_VD = self.tt.dense()
        if self.padding_idx is None:
            return table_VD
        return table_VD.index_fill(0, torch.tensor([self.padding_idx], device=table_VD.device), 0)


class TTMEmbedding(_TTMLayer):
    """Drop-in for `nn.Embedding`: rows of a tensor-train matrix.

    tt: the chain, or a TTMSpec from which one is made with unit std, as `nn.Embedding` has.
    padding_idx: its row is exactly zero and gets no gradient.
    Input: integer ids of any shape -> (..., embedding_dim). An id outside the table is an IdError.
    Raises SpecError for a chain of another format or a padding_idx outside the table.
    """

    dense_type: type[nn.Module] = nn.Embedding

    def __init__(
        self,
        tt: TensorTrain | TTMSpec,
        padding_idx: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tt, padding_idx, dtype, device)

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.spec.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Columns of the table."""
        return self.spec.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        return ttm_lookup(ids, self.spec, self.tt.effective_cores(), padding_idx=self.padding_idx)

    def extra_repr(self) -> str:
        pad = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{pad}"


class TTMProjection(_TTMLayer):
    """Output head over a tensor-train matrix: logits = x Eᵀ + bias, usually sharing E with a TTMEmbedding.

    Input (..., embedding_dim) -> logits (..., num_embeddings).
    bias: True (zeros), False, or a Parameter of shape (num_embeddings,) to keep.
    padding_idx: the zero row of the TTMEmbedding that shares the table: its logit is the bias alone.
    Raises SpecError for a chain of another format, a bias of another shape or a padding_idx outside the table.
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
        super().__init__(tt, padding_idx, dtype, device)
        self._add_bias(bias, self.spec.num_embeddings)

    @property
    def in_features(self) -> int:
        """Size of the input's last axis."""
        return self.spec.embedding_dim

    @property
    def out_features(self) -> int:
        """Size of the output's last axis."""
        return self.spec.num_embeddings

    def forward(self, x: Tensor) -> Tensor:
        logits = ttm_linear(x, self.spec, self.tt.effective_cores(), self.bias)
        if self.padding_idx is not None:  # one column written in place: the logits are the widest tensor of a model
            logits[..., self.padding_idx] = self.bias[self.padding_idx] if self.bias is not None else 0.0
        return logits

    def extra_repr(self) -> str:
        pad = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}{pad}"
