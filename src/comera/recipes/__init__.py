"""Full training jobs on real data; `comera.recipes.registry` lists them."""

from comera.recipes.registry import RECIPES

__all__ = ["RECIPES"]
