"""Causal language models: `recipe` trains, `data` prepares the tokens, `generate` writes text."""

from comera.extras import require

_PACKAGES = ("accelerate", "datasets", "rich", "tokenizers", "transformers", "yaml")
require("comera.recipes.lm", "comera[train]", *_PACKAGES)

__all__ = ["data", "generate", "recipe"]
