"""Classification of texts and of pairs: `recipe` trains; `rows` reads the rows, `data` makes tokens of them, and `task`
says what is learned; `mnli` is the recipe under the name that its presets for MNLI had."""

from comera.extras import require

_PACKAGES = ("accelerate", "datasets", "rich", "tokenizers", "transformers", "yaml")
require("comera.recipes.classify", "comera[train]", *_PACKAGES)

__all__ = ["data", "mnli", "recipe", "rows", "task"]
