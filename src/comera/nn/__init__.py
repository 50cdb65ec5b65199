"""Compressed layers: drop-ins for `torch.nn.Linear` and `torch.nn.Embedding`; what surrounds them, made as cheap."""

from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.feed_forward import FeedForward, register_feed_forward
from comera.nn.fuse import fuse_
from comera.nn.linear import TTLinear

__all__ = ["FeedForward", "TTLinear", "TTMEmbedding", "TTMProjection", "fuse_", "register_feed_forward"]
