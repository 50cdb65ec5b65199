"""`comera train mnli`, the name of this recipe's presets for MNLI when they were a recipe of their own."""

from comera.baselines import Method
from comera.recipes.classify import recipe
from comera.recipes.classify.recipe import ClassifyConfig, Preset, architecture, estimate, run, runs

__all__ = ["architecture", "estimate", "preset", "run", "runs"]


def preset(method: Method = "comera", preset: Preset = "mnli-small") -> ClassifyConfig:
    """The defaults for a method, of a preset for MNLI."""
    return recipe.preset(method, preset)
