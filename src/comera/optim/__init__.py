"""Parameter groups and optimizers for compressed models, and gradients without back-propagation."""

from importlib import import_module

from comera.optim.adamw import AdamW
from comera.optim.muon import Muon
from comera.optim.param_groups import param_groups
from comera.optim.smmf import SMMF
from comera.optim.zeroth_order import ZerothOrder, adaptive_queries

__all__ = ["SMMF", "AdamW", "Muon", "ZerothOrder", "adaptive_queries", "param_groups"]

_MOVED = ("AdaRankGrad", "TensorGaLore")  # to comera.contrib


def __getattr__(name: str) -> object:
    if name in _MOVED:
        return getattr(import_module("comera.contrib"), name)
    raise AttributeError(f"module 'comera.optim' has no attribute {name!r}")
