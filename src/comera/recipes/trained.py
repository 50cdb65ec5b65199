"""Trained models: what a recipe's module offers to the command line, to export and to reports, and how a run's model is
rebuilt from its folder, without its data and its optimizer.

The run's config.yaml and the checkpoint hold everything that the recipe's model needs."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from comera.baselines import Method
from comera.errors import CheckpointError, ConfigError
from comera.memory.estimate import MemoryEstimate
from comera.pretrained import WEIGHTS, load_pretrained, read_manifest, tensor_headers
from comera.recipes.base import as_begun
from comera.recipes.registry import RECIPES
from comera.trainer.checkpoint import checkpoints, find_checkpoint, run_in
from comera.trainer.metrics import Summary
from comera.trainer.trainer_json import read_trainer

_ROWS, _TOKENS = 4, 64  # of an example batch


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
    """The functions of a recipe's module. config: a `comera.recipes.config.RecipeConfig`."""

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


def check_length(field: str, length: int, longest: int) -> None:
    """Raise ConfigError if sequences are longer than the model can read."""
    if length > longest:
        raise ConfigError(
            f"{field} ({length}) must not be above model.max_positions ({longest}): lower the one or raise the other"
        )


def transformers_architecture(
    model_class: Any,
    build: Callable[[], nn.Module],
    inputs: dict[str, Tensor],
    model: Any,
    *,
    longest: int,
    files: Mapping[str, str],
    **sizes: int,
) -> Architecture:
    """How to rebuild a model of transformers. model_class: the class of the dense model. build: makes the method's
    model. inputs: an example batch (B, T) by argument of forward; both dimensions are dynamic. model: a dataclass of
    its sizes. longest: sequence that it reads. files: see `Architecture`. sizes: those that the data decides."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=longest)

    def dense(folder: Path) -> nn.Module:
        made: nn.Module = model_class(model_class.config_class.from_pretrained(folder))
        return made

    dynamic = {name: {0: batch, 1: length} for name in inputs}
    return Architecture(build, dense, inputs, dynamic, {**sizes, "model": asdict(model)}, files)


def example_ids(vocab_size: int, longest: int) -> Tensor:
    """Token ids of an example batch (B, T)."""
    return torch.randint(vocab_size, (_ROWS, min(_TOKENS, longest)), generator=torch.Generator().manual_seed(0))


def stored_rows(checkpoint: Path, layer: str) -> int:
    """Rows of a layer's weight in a checkpoint, compressed or dense. Raises CheckpointError if there is none."""
    for entry in read_manifest(checkpoint)["trains"]:
        if f"{layer}.tt" in entry["names"]:
            return int(entry["spec"]["num_embeddings"])
    try:
        return tensor_headers(checkpoint)[f"{layer}.weight"][0][0]
    except KeyError as error:
        raise CheckpointError(f"{checkpoint}: expected the weight of {layer}, found none ({error})") from error


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
    config = as_begun(read_config(recipe, file), identity)
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
