"""The formats: tensor trains and tensor-train matrices as pure functions on tensors."""
