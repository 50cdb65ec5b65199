"""Each recipe in the list is a module with all that the command line, export and reports ask of it."""

import inspect
from pathlib import Path

import pytest

from comera.baselines import METHODS
from comera.recipes import RECIPES
from comera.recipes.trained import Recipe, load_recipe

FUNCTIONS = [name for name, value in vars(Recipe).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_all_functions(name: str) -> None:
    assert FUNCTIONS == ["preset", "run", "runs", "estimate", "architecture"]
    recipe = load_recipe(name)
    for function in FUNCTIONS:
        expected = list(inspect.signature(getattr(Recipe, function)).parameters)[1:]
        assert list(inspect.signature(getattr(recipe, function)).parameters)[: len(expected)] == expected
    config = recipe.preset()
    assert config.method in METHODS
    assert config.folder == Path(f"runs/{name}-comera")
    for choice in inspect.signature(recipe.preset).parameters:
        assert hasattr(config, choice)
    for method in ("comera", "dense"):
        config = recipe.preset(method=method)
        assert all(config.folder in (folder, *folder.parents) for folder in recipe.runs(config).values())


def test_the_list_imports_nothing_heavy() -> None:
    source = Path(inspect.getfile(RECIPES["mnli"].__class__)).read_text("utf-8")
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert imports == ["from __future__ import annotations", "from typing import NamedTuple"]
