"""Natural-language inference: `recipe` trains, `files` says where the pairs are and `data` how they become tokens;
what it shares with other classifiers is in `comera.recipes.classify`."""

from comera.extras import require

require("comera.recipes.mnli", "comera[train]", "accelerate", "rich", "tokenizers", "transformers", "yaml")

__all__ = ["data", "files", "recipe"]
