"""Causal language models: `recipe` trains, `data` prepares the tokens, `generate` writes text."""

__all__ = ["data", "generate", "recipe"]
