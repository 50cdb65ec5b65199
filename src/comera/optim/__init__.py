"""Parameter groups and an AdamW for compressed models."""

from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups

__all__ = ["AdamW", "param_groups"]
