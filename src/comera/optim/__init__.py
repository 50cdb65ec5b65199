"""Parameter groups and optimizers for compressed models, and gradients without back-propagation."""

from comera.optim.adamw import AdamW
from comera.optim.muon import Muon
from comera.optim.names import OPTIMIZERS
from comera.optim.param_groups import param_groups
from comera.optim.projected import AdaRankGrad, TensorGaLore
from comera.optim.smmf import SMMF
from comera.optim.zeroth_order import ZerothOrder, adaptive_queries

__all__ = [
    "OPTIMIZERS",
    "SMMF",
    "AdaRankGrad",
    "AdamW",
    "Muon",
    "TensorGaLore",
    "ZerothOrder",
    "adaptive_queries",
    "param_groups",
]
