"""Sizes of the transformers that the recipes train."""
