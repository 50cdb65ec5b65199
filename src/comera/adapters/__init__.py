"""Adapters: a small tensor train beside each chosen linear layer is trained, and the model stays as it is."""

from comera.adapters.attach import adapt_, remove_adapters_
from comera.adapters.config import TTAdapter
from comera.adapters.folder import load_adapters_, save_adapters
from comera.adapters.merge import merge_adapters_
from comera.adapters.report import AdapterReport, AdapterRow

__all__ = [
    "AdapterReport",
    "AdapterRow",
    "TTAdapter",
    "adapt_",
    "load_adapters_",
    "merge_adapters_",
    "remove_adapters_",
    "save_adapters",
]
