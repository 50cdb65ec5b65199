"""Activations between the two factors of a weight (CoLA, Liu et al. 2025, arXiv:2502.10940): their names, and how much
of a signal passes. `ops/activations.py` computes them."""

# E[act(z)²] for a standard normal z, by which an initialization keeps the size of outputs
SECOND_MOMENTS = {"gelu": 0.42522, "gelu_tanh": 0.42519, "relu": 0.5, "silu": 0.35578}
