"""Parameter groups and optimizers for compressed models."""

from comera.optim.adamw import AdamW
from comera.optim.muon import Muon
from comera.optim.param_groups import param_groups
from comera.optim.smmf import SMMF

__all__ = ["SMMF", "AdamW", "Muon", "param_groups"]
