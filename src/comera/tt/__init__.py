"""The formats, tensor trains and tensor-train matrices, as pure functions on tensors."""

from comera.tt.decompose import round_cores, tt_svd
from comera.tt.dense import materialize
from comera.tt.init import init_cores
from comera.tt.shapes import tt_spec, ttm_spec
from comera.tt.spec import Spec, TTMSpec, TTSpec

__all__ = ["Spec", "TTMSpec", "TTSpec", "init_cores", "materialize", "round_cores", "tt_spec", "tt_svd", "ttm_spec"]
