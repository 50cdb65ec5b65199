"""What a recipe's module offers to the command line, to export and to reports."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor, nn

from comera.baselines import Method
from comera.memory.estimate import MemoryEstimate
from comera.recipes.registry import RECIPES
from comera.trainer.metrics import Summary


@dataclass(frozen=True)
class Architecture:
    """How to rebuild a recipe's model. build: makes the method's model. dense: makes the original, dense model, as
    described by the config.json of a folder if there is one. inputs: an example batch by argument of forward. dynamic:
    its dynamic shapes, for torch.export. about: sizes of the model, JSON-ready. files: further files of an exported
    folder, text by name."""

    build: Callable[[], nn.Module]
    dense: Callable[[Path], nn.Module]
    inputs: dict[str, Tensor]
    dynamic: dict[str, dict[int, Any]]
    about: dict[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)


class Recipe(Protocol):
    """The functions of a recipe's module. config: a frozen dataclass whose fields are the command-line options, and the
    text under each field its help. It has the fields `method` and `out` and the property `folder`, where the runs
    go."""

    def preset(self, method: Method = "comera") -> Any:
        """The default configuration for a method. Further parameters are fields that choose among presets."""

    def run(self, config: Any, *, resume: bool = False) -> Summary:
        """Prepare the data and train; returns the summary of the last run."""

    def runs(self, config: Any) -> dict[str, Path]:
        """The folders that `run` fills, by name, in order."""

    def estimate(self, config: Any) -> Mapping[str, MemoryEstimate]:
        """Memory and FLOPs of a training step by method, without training; "dense" among them."""

    def architecture(self, config: Any, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
        """How to rebuild the model of a run, whose identity and checkpoint are given, without its data."""


def load_recipe(name: str) -> Recipe:
    """Import a recipe's module by its name in RECIPES."""
    return cast(Recipe, import_module(RECIPES[name].module))
