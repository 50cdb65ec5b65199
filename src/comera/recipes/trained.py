"""Rebuilds a trained model from a run's folder, without its data and its optimizer.

The run's config.yaml and the checkpoint hold everything that the recipe's model needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from comera.errors import CheckpointError
from comera.pretrained import WEIGHTS, load_pretrained
from comera.recipes.interface import Architecture, load_recipe
from comera.recipes.registry import RECIPES
from comera.trainer.checkpoint import checkpoints, find_checkpoint, run_in
from comera.trainer.trainer_json import read_trainer


@dataclass(frozen=True)
class Trained:
    """A run's trained model, in evaluation mode on the CPU. recipe: its name. config: the recipe's configuration.
    identity: what a resumed run must match, including the name of the prepared data."""

    recipe: str
    config: Any
    checkpoint: Path
    identity: Mapping[str, Any]
    architecture: Architecture
    model: nn.Module


def open_trained(
    path: Path, read_config: Callable[[str, Path], Any], which: Literal["last", "best"] = "last"
) -> Trained:
    """The model of a run or of one of its checkpoints. path: folder of the run or of the checkpoint. read_config:
    (recipe's name, config.yaml) -> the recipe's configuration. which: checkpoint of a run, its last one or that of the
    best evaluation. Raises CheckpointError for any other folder, and for an unfinished or truncated checkpoint."""
    checkpoint = _find(Path(path), which)
    file = checkpoint.parents[1] / "config.yaml"
    if not file.is_file():
        raise CheckpointError(f"expected the run's config.yaml at {file}, found none: keep a checkpoint in its run")
    identity = read_trainer(checkpoint).identity
    recipe = identity.get("recipe")
    if recipe not in RECIPES:
        raise CheckpointError(
            f"{checkpoint}: expected a run of {', '.join(RECIPES)}, got one of {recipe!r}: rebuild its model "
            "yourself, load it with comera.load_pretrained, and see comera.export"
        )
    config = read_config(recipe, file)
    architecture = load_recipe(recipe).architecture(config, identity, checkpoint)
    with torch.device("meta"):
        model = architecture.build()
    return Trained(recipe, config, checkpoint, identity, architecture, load_pretrained(model, checkpoint).eval())


def _find(path: Path, which: Literal["last", "best"]) -> Path:
    path = path.expanduser().resolve()
    if (path / "trainer.json").is_file() or (path / WEIGHTS).is_file():
        if path in checkpoints(path.parent.parent):
            return path
        raise CheckpointError(
            f"expected a complete checkpoint in the folder of its run, got {path}: give RUN, or RUN/checkpoints/step-…"
        )
    run = run_in(path)
    if (run / "config.yaml").is_file() and (run / "metrics.jsonl").is_file():
        return find_checkpoint(run, which)
    what = "another folder" if path.is_dir() else "a file" if path.exists() else "nothing"
    raise CheckpointError(
        f"expected the folder of a run or of one of its checkpoints at {path}, found {what}: give one that "
        "`comera train` wrote"
    )
