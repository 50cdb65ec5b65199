"""In-place conversion of any model: dense layers become compressed ones, and back."""

from comera.convert.config import BTT, TT, TTM, TensorizeConfig
from comera.convert.converter import CONVOLUTION, EMBEDDING, EMBEDDING_BAG, LINEAR, Converter
from comera.convert.registry import register_converter
from comera.convert.report import LayerRow, TensorizeReport
from comera.convert.tensorize import materialize_, tensorize_

__all__ = [
    "BTT",
    "CONVOLUTION",
    "EMBEDDING",
    "EMBEDDING_BAG",
    "LINEAR",
    "TT",
    "TTM",
    "Converter",
    "LayerRow",
    "TensorizeConfig",
    "TensorizeReport",
    "materialize_",
    "register_converter",
    "tensorize_",
]
