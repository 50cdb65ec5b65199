"""In-place conversion of any model: dense layers become compressed ones, and back."""

from comera.convert.config import BTT, TT, TTM, TensorizeConfig
from comera.convert.converter import CONVOLUTION, EMBEDDING, EMBEDDING_BAG, LINEAR, Converter
from comera.convert.ngrams import NGramReport, NGrams, ngrams_
from comera.convert.packed import EXPERTS, EXPERTS_IN_FIRST, PackedConverter
from comera.convert.registry import register_converter
from comera.convert.report import LayerRow, TensorizeReport
from comera.convert.tensorize import materialize_, tensorize_

__all__ = [
    "BTT",
    "CONVOLUTION",
    "EMBEDDING",
    "EMBEDDING_BAG",
    "EXPERTS",
    "EXPERTS_IN_FIRST",
    "LINEAR",
    "TT",
    "TTM",
    "Converter",
    "LayerRow",
    "NGramReport",
    "NGrams",
    "PackedConverter",
    "TensorizeConfig",
    "TensorizeReport",
    "materialize_",
    "ngrams_",
    "register_converter",
    "tensorize_",
]
