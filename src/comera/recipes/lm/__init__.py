"""Causal language models: `recipe` trains, `data` prepares the tokens, `generate` writes text."""

from comera.extras import require

require("comera.recipes.lm", "comera[train]", "accelerate", "rich", "tokenizers", "transformers", "yaml")

__all__ = ["data", "generate", "recipe"]
