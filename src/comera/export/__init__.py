"""Exports trained models: compressed or dense weights, a program that needs torch alone, or ONNX."""

from comera.export.folder import Exported
from comera.export.layers import serving_copy
from comera.export.program import export_onnx, export_program
from comera.export.write import export_compressed, export_dense

__all__ = ["Exported", "export_compressed", "export_dense", "export_onnx", "export_program", "serving_copy"]
