"""Compressed layers: drop-ins for `nn.Linear`, `nn.Embedding` and `nn.EmbeddingBag`; and what surrounds them."""

from comera.fusion.fuse import fuse_
from comera.fusion.mlp import FeedForward, register_feed_forward
from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMProjection
from comera.nn.linear import TTLinear

__all__ = [
    "FeedForward",
    "TTLinear",
    "TTMEmbedding",
    "TTMEmbeddingBag",
    "TTMProjection",
    "fuse_",
    "register_feed_forward",
]
