"""Exports trained models: compressed weights, dense weights, or a program that needs torch alone."""

from comera.export.layers import serving_copy
from comera.export.write import Exported, export_compressed, export_dense, export_program

__all__ = ["Exported", "export_compressed", "export_dense", "export_program", "serving_copy"]
