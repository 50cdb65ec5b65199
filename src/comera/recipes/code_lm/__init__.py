"""Pre-training on source code: `recipe` trains, `data` prepares the blocks of tokens."""

from comera.extras import require

require(
    "comera.recipes.code_lm", "comera[train]", "accelerate", "datasets", "rich", "tokenizers", "transformers", "yaml"
)

__all__ = ["data", "recipe"]
