"""Differentiable operations on tensors, one a file, each with its formula on top. Import the files themselves."""

__all__: list[str] = []
