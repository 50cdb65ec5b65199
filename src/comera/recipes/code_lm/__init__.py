"""Pre-training on source code: `recipe` trains, `data` prepares the blocks of tokens."""

__all__ = ["data", "recipe"]
