"""Folders that `save_pretrained` of a transformers model wrote: what config.json says of its tensor trains.

    "quantization_config": {"quant_method": "comera", "version": ...,
        "trains": [{"names": {"bert.pooler.dense.tt": "TTLinear"}, "spec": {...}, "init_std": ..., "threshold": ...}]}

It holds the modes, which only a conversion changes. Ranks fall while a model trains, so they are those of the tensors,
which are in model.safetensors or in shards with an index. A layer without cores among them is dense.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from comera.errors import CheckpointError
from comera.nn.adapted import train_names
from comera.pretrained.folder import SavedTrain, with_stored_layout
from comera.pretrained.stored import MANIFEST_ENTRY, StoredTensors

QUANT_METHOD = "comera"  # quant_method in config.json
CONFIG = "config.json"


def entries_of(model: nn.Module) -> list[dict[str, Any]]:
    """ "trains" of a model's config.json: its tensor trains, without their ranks."""
    entries = [SavedTrain.entry(tt, names) for tt, names in train_names(model).items()]
    for entry in entries:
        for ranks in ("ranks", "block_ranks", "columns"):
            entry["spec"].pop(ranks, None)
    return entries


def read_entries(entries: Sequence[Mapping[str, Any]], where: object) -> list[SavedTrain]:
    """The tensor trains of these entries, all ranks 1; `with_stored_ranks` knows better.

    Raises CheckpointError, naming `where`, for damaged entries.
    """
    try:
        trains = [SavedTrain.of({**entry, "spec": _with_unit_ranks(entry["spec"])}) for entry in entries]
        if not all(saved.names for saved in trains):
            raise KeyError("names")
        return trains
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # SpecError is a ValueError
        raise CheckpointError(
            f"{where}: what its config.json says of compressed layers is damaged ({error!r}): take another copy"
        ) from error


def _with_unit_ranks(spec: Mapping[str, Any]) -> dict[str, Any]:
    if spec["format"] == "btt":
        return {**spec, "block_ranks": 1}
    if spec["format"] == "ngram":
        return {**spec, "columns": None}
    order = len(spec["row_modes"]) if "row_modes" in spec else len(spec["in_modes"]) + len(spec["out_modes"])
    return {**spec, "ranks": [1] * (order + 1)}


def with_stored_ranks(saved: SavedTrain, shapes: Mapping[str, Sequence[int]], where: object) -> SavedTrain | None:
    """A tensor train with the ranks of its stored tensors.

    None if nothing of it is stored: its layers are dense in the folder, or only a submodel is, with the same config.
    shapes: name of each stored tensor -> its shape; a tied one may be there under one of its names only.
    Raises CheckpointError, naming `where`, for tensors that are incomplete or have other modes.
    """
    came = ""
    for name in saved.names:
        stored = {key: tuple(shapes[key]) for key in saved.shapes(name) if key in shapes}
        cores, gates = (
            [shape for key, shape in stored.items() if key.startswith(f"{name}.{part}.")]
            for part in ("cores", "rank_params")
        )
        with suppress(ValueError, IndexError):  # no matrices or vectors, or no ranks (SpecError)
            spec = saved.spec.with_shapes(cores, [rank for (rank,) in gates])
            if replace(saved, spec=spec).shapes(name) == stored:
                return replace(saved, spec=spec)
        came = str(stored) if stored else came
    if not came:
        return None
    raise CheckpointError(
        f"{where}: expected cores and gates of {' and '.join(saved.names)} with the modes of {saved.spec}, as its "
        f"config.json says, got {came}: take the weights that were saved with this config.json"
    )


def read_transformers_folder(folder: Path) -> tuple[list[SavedTrain], StoredTensors] | None:
    """Tensor trains and tensors of a folder, the trains' under each of their names; None for another kind of folder.

    Where `comera.save_pretrained` wrote the weights, their own manifest says more than config.json: None, too.
    Raises CheckpointError for damaged or missing files.
    """
    entries = _entries_in(folder)
    if entries is None:
        return None
    try:
        tensors = StoredTensors.open(folder)
    except FileNotFoundError as error:
        raise CheckpointError(f"expected all weights of a model in {folder}, but it has none: {error}") from error
    if MANIFEST_ENTRY in tensors.metadata:
        return None
    found = [with_stored_ranks(saved, tensors.shapes, folder) for saved in read_entries(entries, folder)]
    trains = [saved for saved in found if saved is not None]
    for k, saved in enumerate(trains):
        first = next(name for name in saved.names if f"{name}.cores.0" in tensors)
        if layout := saved.spec.layout_name:
            spec = with_stored_layout(saved.spec, tensors[f"{first}.{layout}"], first, folder)
            trains[k] = replace(saved, spec=spec)
        for name in saved.names:
            for key, same in zip(saved.shapes(name), saved.shapes(first), strict=True):
                if key not in tensors:
                    tensors.tie(key, same)
    return trains, tensors


def _entries_in(folder: Path) -> list[Mapping[str, Any]] | None:
    """ "trains" of the folder's config.json; None where there is none of a compressed model."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    formats = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(formats, dict) or formats.get("quant_method") != QUANT_METHOD:
        return None
    entries = formats.get("trains")
    if not isinstance(entries, list):
        raise CheckpointError(f"{folder / CONFIG}: expected a list of trains, got {entries!r:.80}: take another copy")
    return entries
