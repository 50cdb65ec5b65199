"""The one list of recipes.

A new recipe needs a line here and a folder whose module satisfies `comera.recipes.interface.Recipe`. This file imports
nothing, so that a mistyped command line does not wait for torch."""

from __future__ import annotations

from typing import NamedTuple


class RecipeEntry(NamedTuple):
    """Where a recipe lives, and what it does, in a few words."""

    module: str
    summary: str


RECIPES = {
    "lm": RecipeEntry("comera.recipes.lm.recipe", "pre-train a causal language model on text or code"),
    "code-lm": RecipeEntry("comera.recipes.code_lm.recipe", "pre-train a BERT-style transformer on source code"),
    "classify": RecipeEntry("comera.recipes.classify.recipe", "train an encoder to classify texts or pairs of texts"),
    "mnli": RecipeEntry("comera.recipes.mnli.recipe", "train a transformer from scratch for language inference"),
    "dlrm": RecipeEntry("comera.recipes.dlrm.recipe", "train DLRM to predict clicks on ads"),
    "pinn": RecipeEntry("comera.recipes.pinn.recipe", "train a network to solve a partial differential equation"),
}
"""The recipes of `comera train` by name."""
