"""The formats, tensor trains, tensor-train matrices, block tensor trains and n-gram tables, as pure functions."""

from comera.tt.decompose import round_cores, tt_svd
from comera.tt.dense import materialize
from comera.tt.init import init_cores
from comera.tt.ngram import NGramSpec
from comera.tt.shapes import btt_spec, tt_spec, ttm_spec
from comera.tt.spec import BTTSpec, Spec, TTMSpec, TTSpec

__all__ = [
    "BTTSpec",
    "NGramSpec",
    "Spec",
    "TTMSpec",
    "TTSpec",
    "btt_spec",
    "init_cores",
    "materialize",
    "round_cores",
    "tt_spec",
    "tt_svd",
    "ttm_spec",
]
