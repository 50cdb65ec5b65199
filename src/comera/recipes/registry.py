"""The one list of recipes.

A new recipe needs a line here and a folder whose module satisfies `comera.recipes.trained.Recipe`. This file imports
nothing, so that a mistyped command line does not wait for torch."""

from __future__ import annotations

from typing import NamedTuple


class RecipeEntry(NamedTuple):
    """Where a recipe lives, and what it does, in a few words. help: the file beside it with its short help. renamed:
    options, and values of the option preset, by the names that they had before."""

    module: str
    summary: str
    help: str = "help.txt"
    renamed: dict[str, str] = {}  # noqa: RUF012  # nobody changes it


RECIPES = {
    "lm": RecipeEntry("comera.recipes.lm.recipe", "pre-train a causal language model on text or code"),
    "code-lm": RecipeEntry("comera.recipes.code_lm.recipe", "pre-train a BERT-style transformer on source code"),
    "classify": RecipeEntry("comera.recipes.classify.recipe", "train an encoder to classify texts or pairs of texts"),
    "mnli": RecipeEntry(
        "comera.recipes.classify.mnli",
        "the presets of classify for language inference",
        "mnli.txt",
        {
            "data.premise_field": "data.text",
            "data.hypothesis_field": "data.pair",
            "data.label_field": "data.label",
            "data.held_out_path": "data.valid",
            "data.vocab": "data.tokenizer",
            "small": "mnli-small",
            "short": "mnli-short",
            "tuned": "mnli",
            "published": "mnli-published",
        },
    ),
    "dlrm": RecipeEntry("comera.recipes.dlrm.recipe", "train DLRM to predict clicks on ads"),
    "pinn": RecipeEntry("comera.recipes.pinn.recipe", "train a network to solve a partial differential equation"),
}
"""The recipes of `comera train` by name."""
