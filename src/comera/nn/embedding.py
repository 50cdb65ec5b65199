"""TTMEmbedding: an embedding whose table is a tensor-train matrix; TTMProjection: the output head tied to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comera.contract.linear import ttm_linear
from comera.contract.lookup import ttm_lookup
from comera.nn.bonds import TensorTrain
from comera.tt.spec import TTMSpec


class _TTMLayer(nn.Module):
    """A layer around a tensor-train matrix of shape (num_embeddings, embedding_dim)."""

    tt: TensorTrain

    def _adopt(
        self, tt: TensorTrain | TTMSpec, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        if isinstance(tt, TTMSpec):  # nn.Embedding draws N(0, 1)
            tt = TensorTrain(tt, init_std=1.0, dtype=dtype, device=device)
        if not isinstance(tt.spec, TTMSpec):
            raise TypeError(f"{type(self).__name__} needs a TensorTrain with a TTMSpec, got {tt.spec}")
        self.tt = tt

    @property
    def spec(self) -> TTMSpec:
        """Modes and ranks of the table."""
        assert isinstance(self.tt.spec, TTMSpec)
        return self.tt.spec

    @property
    def weight(self) -> Tensor:
        """The materialised table (num_embeddings, embedding_dim), made anew at each access: for inspection only."""
        return self.tt.dense()


class TTMEmbedding(_TTMLayer):
    """Drop-in for `nn.Embedding`: rows of a tensor-train matrix.

    tt: the chain, or a TTMSpec from which one is made with unit std, as `nn.Embedding` has.
    padding_idx: its row is exactly zero and gets no gradient.
    Input: integer ids of any shape -> (..., embedding_dim). An id outside the table is an IdError.
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
        self._adopt(tt, dtype, device)
        self.padding_idx = padding_idx

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
    bias: True, False, or a Parameter of shape (num_embeddings,) to keep.
    """

    def __init__(
        self,
        tt: TensorTrain | TTMSpec,
        bias: bool | nn.Parameter = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._adopt(tt, dtype, device)
        if bias is True:
            first = self.tt.cores[0]
            bias = nn.Parameter(torch.zeros(self.spec.num_embeddings, dtype=first.dtype, device=first.device))
        self.bias = bias if isinstance(bias, nn.Parameter) else None

    @property
    def in_features(self) -> int:
        """Size of the input's last axis."""
        return self.spec.embedding_dim

    @property
    def out_features(self) -> int:
        """Size of the output's last axis."""
        return self.spec.num_embeddings

    def forward(self, x: Tensor) -> Tensor:
        return ttm_linear(x, self.spec, self.tt.effective_cores(), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
