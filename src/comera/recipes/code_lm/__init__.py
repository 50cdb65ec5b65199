"""Pre-training on source code."""
