"""Each recipe in the list is a module with all that the command line, export and reports ask of it."""

import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from comera.baselines import METHODS
from comera.errors import ConfigError
from comera.recipes import RECIPES
from comera.recipes.classify.data import MNLI, ClassifyDataConfig
from comera.recipes.code_lm.data import CodeDataConfig
from comera.recipes.lm.data import LMDataConfig
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


TEXT: dict[str, tuple[Any, ...]] = {
    "held_out": (0.0, 1.0),
    "max_bytes": (0,),
    "tokenizer_bytes": (0,),
    "suffixes": ((),),
}
ROWS: dict[str, tuple[Any, ...]] = {"max_length": (4,), "max_examples": (0,)}
OUT_OF_RANGE: list[tuple[Any, dict[str, tuple[Any, ...]]]] = [
    (CodeDataConfig, TEXT | {"vocab_size": (200,), "block_size": (2,), "mask_share": (0.5,)}),
    (LMDataConfig, TEXT | {"vocab_size": (255,), "block_size": (1,)}),
    (ClassifyDataConfig, ROWS | {"vocab_size": (200,), "held_out": (0.0, 1.0), "buckets": (0,)}),
    (partial(replace, MNLI), ROWS | {"path": ("",), "buckets": (0, -1)}),
]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [(kind, field, each) for kind, fields in OUT_OF_RANGE for field, values in fields.items() for each in values],
)
def test_a_setting_of_data_out_of_range_is_a_config_error(kind: Any, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{field} must be .*, got"):
        kind(**{field: value})
