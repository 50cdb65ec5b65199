"""A trained model on its own: rebuilt from a run's folder, without its data and its optimizer.

What the recipes' models need to be built again stands in config.yaml and in the checkpoint.  B batch, T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from comera.errors import CheckpointError
from comera.pretrained import WEIGHTS, load_pretrained, read_manifest
from comera.trainer.checkpoint import checkpoints, find_checkpoint

ROWS, TOKENS = 4, 64  # of the example batch of a transformer
CLICKS = 1024  # of that of a DLRM


@dataclass(frozen=True)
class Architecture:
    """What a recipe's model is built from.

    build: the method's model. plain: the original, dense one, in the form that the config.json of a folder tells, where
    there is one. inputs: an example batch, by the names of the arguments of forward. dynamic: as torch.export takes it.
    about: of the model's sizes, JSON-ready.
    """

    build: Callable[[], nn.Module]
    plain: Callable[[Path], nn.Module]
    inputs: dict[str, Tensor]
    dynamic: dict[str, dict[int, Any]]
    about: dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """A model as a run has trained it, in evaluation mode on the CPU.

    recipe: its name. config: of the recipe. identity: under which the run goes on, the prepared data's name among it.
    """

    recipe: str
    config: Any
    checkpoint: Path
    identity: Mapping[str, Any]
    architecture: Architecture
    model: nn.Module


def open_trained(path: Path, read_config: Callable[[str, Path], Any]) -> Trained:
    """The model of a run folder (its last checkpoint) or of a checkpoint in one.

    read_config: (name of a recipe, its config.yaml) -> the recipe's configuration.
    Raises CheckpointError for a folder that is neither, or a checkpoint that is unfinished or truncated.
    """
    checkpoint = _find(Path(path))
    file = checkpoint.parents[1] / "config.yaml"
    if not file.is_file():
        raise CheckpointError(f"expected the run's config.yaml at {file}, found none: leave a checkpoint in its run")
    try:
        identity = json.loads((checkpoint / "trainer.json").read_text("utf-8"))["identity"]
        recipe = identity["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint}: expected a whole trainer.json, got {error!r}: take another one"
        ) from error
    if recipe not in _ARCHITECTURES:
        raise CheckpointError(
            f"{checkpoint}: expected a run of {', '.join(_ARCHITECTURES)}, got one of {recipe!r}: rebuild its model "
            "yourself, load it with comera.load_pretrained, and see comera.export"
        )
    config = read_config(recipe, file)
    architecture = _ARCHITECTURES[recipe](config, identity, checkpoint)
    with torch.device("meta"):
        model = architecture.build()
    return Trained(recipe, config, checkpoint, identity, architecture, load_pretrained(model, checkpoint).eval())


def _find(path: Path) -> Path:
    """The checkpoint that a path means."""
    path = path.expanduser().resolve()
    if (path / "trainer.json").is_file() or (path / WEIGHTS).is_file():
        if path in checkpoints(path.parent.parent):
            return path
        raise CheckpointError(
            f"expected a complete checkpoint in the folder of its run, got {path}: give RUN, or RUN/checkpoints/step-…"
        )
    if (path / "config.yaml").is_file() and (path / "metrics.jsonl").is_file():
        return find_checkpoint(path)
    inside = sorted(metrics.parent.name for metrics in path.glob("*/metrics.jsonl"))
    if inside:
        raise CheckpointError(
            f"expected one run, got {path} with several ({', '.join(inside)}): name one, such as {path / inside[-1]}"
        )
    what = "a folder of something else" if path.is_dir() else "a file" if path.exists() else "nothing"
    raise CheckpointError(
        f"expected the folder of a run or of one of its checkpoints at {path}, found {what}: give one that "
        "`comera train` wrote"
    )


def _code_lm(config: Any, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
    from transformers import BertForMaskedLM

    from comera.recipes.code_lm import recipe as code_lm

    vocab_size = _rows(checkpoint, "bert.embeddings.word_embeddings")
    ids_BT = _ids(vocab_size, config.data.block_size)
    return Architecture(
        build=lambda: code_lm.build_model(config, vocab_size)[0],
        plain=partial(_from_config, BertForMaskedLM),
        inputs={"input_ids": ids_BT},
        dynamic=_dynamic(["input_ids"], config.model.max_positions),
        about={"vocab_size": vocab_size, "model": asdict(config.model)},
    )


def _mnli(config: Any, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
    from transformers import BertForSequenceClassification

    from comera.recipes.mnli import recipe as mnli

    vocab_size, labels = _rows(checkpoint, "bert.embeddings.word_embeddings"), _rows(checkpoint, "classifier")
    ids_BT = _ids(vocab_size, config.data.max_length)
    half = ids_BT.shape[1] // 2
    segments_BT, mask_BT = torch.zeros_like(ids_BT), torch.ones_like(ids_BT)
    segments_BT[:, half:] = 1
    mask_BT[1::2, half + 1 :] = 0  # every other pair is shorter
    inputs = {"input_ids": ids_BT, "token_type_ids": segments_BT, "attention_mask": mask_BT}
    return Architecture(
        build=lambda: mnli.build_model(config, vocab_size, labels)[0],
        plain=partial(_from_config, BertForSequenceClassification),
        inputs=inputs,
        dynamic=_dynamic([*inputs], config.model.max_positions),
        about={"vocab_size": vocab_size, "labels": labels, "model": asdict(config.model)},
    )


def _dlrm(config: Any, identity: Mapping[str, Any], checkpoint: Path) -> Architecture:
    from comera.recipes.dlrm import recipe as dlrm
    from comera.recipes.dlrm.criteo_parse import INTEGERS

    sizes = identity["data.table_sizes"]
    plain = replace(config, method="dense", optimizer="adamw")  # with tables of a kind that load_pretrained converts
    drawn = torch.Generator().manual_seed(0)
    dense_BI = 5 * torch.rand(CLICKS, INTEGERS, generator=drawn)
    ids_BF = torch.stack([torch.randint(size, (CLICKS,), generator=drawn) for size in sizes], 1)
    batch = torch.export.Dim("batch")
    return Architecture(
        build=lambda: dlrm.build_model(config, sizes)[0],
        plain=lambda folder: dlrm.build_model(plain, sizes)[0],
        inputs={"dense": dense_BI, "ids": ids_BF},
        dynamic={"dense": {0: batch}, "ids": {0: batch}},
        about={"table_sizes": sizes, "model": asdict(config.model)},
    )


_ARCHITECTURES: dict[str, Callable[[Any, Mapping[str, Any], Path], Architecture]] = {
    "code-lm": _code_lm,
    "mnli": _mnli,
    "dlrm": _dlrm,
}


def _from_config(kind: Any, folder: Path) -> nn.Module:
    """A fresh model of transformers, as the config.json of a folder describes it."""
    model: nn.Module = kind(kind.config_class.from_pretrained(folder))
    return model


def _ids(vocab_size: int, longest: int) -> Tensor:
    """Ids of an example batch (B, T)."""
    return torch.randint(vocab_size, (ROWS, min(TOKENS, longest)), generator=torch.Generator().manual_seed(0))


def _dynamic(names: list[str], longest: int) -> dict[str, dict[int, Any]]:
    """Batches of any size, with any length that the model can read."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=longest)
    return {name: {0: batch, 1: length} for name in names}


def _rows(checkpoint: Path, layer: str) -> int:
    """Rows of the weight of a layer of a checkpoint, compressed or dense."""
    for entry in read_manifest(checkpoint)["trains"]:
        if f"{layer}.tt" in entry["names"]:
            return int(entry["spec"]["num_embeddings"])
    try:
        with safe_open(checkpoint / WEIGHTS, framework="pt") as file:
            return int(file.get_slice(f"{layer}.weight").get_shape()[0])
    except SafetensorError as error:
        raise CheckpointError(f"{checkpoint}: expected the weight of {layer}, found none ({error})") from error
