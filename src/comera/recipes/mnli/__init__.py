"""Natural-language inference: `recipe` trains, `files` reads the pairs, `data` tokenizes and `pairs` batches them."""

from comera.extras import require

require("comera.recipes.mnli", "comera[train]", "accelerate", "rich", "tokenizers", "transformers", "yaml")

__all__ = ["data", "files", "pairs", "recipe"]
