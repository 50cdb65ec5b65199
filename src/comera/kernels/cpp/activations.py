"""The activations of activations.h."""

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")  # in the order of mlp.cpp and gated.cpp
