"""The formats, tensor trains and tensor-train matrices, as pure functions on tensors."""

from comera.tt.decompose import Decomposition, round_cores, singular_values, tt_svd
from comera.tt.dense import absorb, fold, frobenius_norm, materialize, merge
from comera.tt.init import init_cores
from comera.tt.shapes import balanced_modes, tt_spec, ttm_spec
from comera.tt.spec import Spec, TTMSpec, TTSpec, check_cores, clip_ranks, rank_limits, spec_from_dict

__all__ = [
    "Decomposition",
    "Spec",
    "TTMSpec",
    "TTSpec",
    "absorb",
    "balanced_modes",
    "check_cores",
    "clip_ranks",
    "fold",
    "frobenius_norm",
    "init_cores",
    "materialize",
    "merge",
    "rank_limits",
    "round_cores",
    "singular_values",
    "spec_from_dict",
    "tt_spec",
    "tt_svd",
    "ttm_spec",
]
