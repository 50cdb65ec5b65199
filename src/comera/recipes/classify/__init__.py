"""Classification of texts and of pairs: `recipe` trains; `files` reads the rows, `prepared` tokenizes them, `task` says
what is learned, for this recipe and for mnli."""

from comera.extras import require

require("comera.recipes.classify", "comera[train]", "accelerate", "rich", "tokenizers", "transformers", "yaml")

__all__ = ["data", "files", "prepared", "recipe", "task"]
