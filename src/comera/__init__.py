"""CoMERA for PyTorch: rank-adaptive tensor-compressed training."""

__version__ = "0.1.0"
