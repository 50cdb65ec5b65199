"""Compressed layers: drop-ins for `nn.Linear`, `nn.Embedding` and `nn.EmbeddingBag`."""

from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMProjection
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.tensor_train import CompressedLayer, TensorTrain

__all__ = [
    "BTTLinear",
    "CompressedLayer",
    "TTLinear",
    "TTMEmbedding",
    "TTMEmbeddingBag",
    "TTMProjection",
    "TensorTrain",
]
