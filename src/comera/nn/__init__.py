"""Compressed layers: drop-ins for `torch.nn.Linear` and `torch.nn.Embedding`."""

from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import TTLinear

__all__ = ["TTLinear", "TTMEmbedding", "TTMProjection"]
