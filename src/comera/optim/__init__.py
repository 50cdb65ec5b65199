"""Parameter groups and optimizers for compressed models."""
