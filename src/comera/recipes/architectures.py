"""How recipes rebuild their models of transformers, and what they read of a checkpoint to do so."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comera.errors import CheckpointError, ConfigError
from comera.pretrained import read_manifest, tensor_headers
from comera.recipes.interface import Architecture

_ROWS, _TOKENS = 4, 64  # of an example batch


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
    files: Mapping[str, str] | None = None,
    **sizes: int,
) -> Architecture:
    """How to rebuild a model of transformers. model_class: the class of the dense model. build: makes the method's
    model. inputs: an example batch (B, T) by argument of forward; both dimensions are dynamic. model: a dataclass of
    its sizes. longest: sequence that it reads. files: see `Architecture`. sizes: those that the data decides."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=longest)
    dynamic = {name: {0: batch, 1: length} for name in inputs}
    about = {**sizes, "model": asdict(model)}

    def dense(folder: Path) -> nn.Module:
        model: nn.Module = model_class(model_class.config_class.from_pretrained(folder))
        return model

    return Architecture(build, dense, inputs, dynamic, about, files or {})


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
