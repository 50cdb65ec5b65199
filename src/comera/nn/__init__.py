"""Compressed layers: drop-ins for `nn.Linear`, convolutions and tables; lookups of many tables; the size of a model."""

from comera.nn.conv import TTConv
from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMProjection
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.ngram import NGramEmbedding, NGramTable
from comera.nn.packed import CompressedParameter
from comera.nn.size import ModelSize, model_size
from comera.nn.tables import lookup_tables
from comera.nn.tensor_train import CompressedLayer, TensorTrain
from comera.ops.ngram import NGramIds

__all__ = [
    "BTTLinear",
    "CompressedLayer",
    "CompressedParameter",
    "ModelSize",
    "NGramEmbedding",
    "NGramIds",
    "NGramTable",
    "TTConv",
    "TTLinear",
    "TTMEmbedding",
    "TTMEmbeddingBag",
    "TTMProjection",
    "TensorTrain",
    "lookup_tables",
    "model_size",
]
