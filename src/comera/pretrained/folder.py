"""What a folder with a saved model holds: its tensors in `model.safetensors`, and a manifest of its tensor trains.

The manifest is stored in the header of model.safetensors, so that a single rename replaces tensors and manifest and an
interrupted save never leaves a pair that does not match. `comera.json` is a copy for people; loading does not read it.

    {"format": 1, "comera": version, "metadata": {...},
     "trains": [{"names": {"encoder.0.tt": "TTLinear"}, "spec": {...}, "init_std": 0.02, "threshold": 0.01,
                 "late_from": 9812}],       parameters when a late stage first began; absent before
     "tied": {"head.tt.cores.0": "embed.tt.cores.0"},      a tied tensor is stored once, under its first name
     "transient": ["embed.positions"]}      buffers with persistent=False, read only for models on the meta device
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from comera.errors import CheckpointError, SpecError
from comera.nn.tensor_train import TensorTrain
from comera.pretrained.sharded import type_name
from comera.tt.spec import Spec, spec_from_dict

WEIGHTS, MANIFEST = "model.safetensors", "comera.json"
FORMAT = 1


@dataclass(frozen=True)
class SavedTrain:
    """One entry of "trains". names: qualified name of the tensor train -> type of the layer that holds it there."""

    names: Mapping[str, str]
    spec: Spec
    init_std: float
    threshold: float
    late_from: int | None = None

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> SavedTrain:
        """Read an entry of the manifest."""
        spec = spec_from_dict(entry["spec"])
        late_from = None if entry.get("late_from") is None else int(entry["late_from"])
        return cls(dict(entry["names"]), spec, float(entry["init_std"]), float(entry["threshold"]), late_from)

    @staticmethod
    def entry(train: TensorTrain, names: Mapping[str, str]) -> dict[str, Any]:
        """The entry of a tensor train, which `of` reads."""
        late = {} if train.late_from is None else {"late_from": train.late_from}
        constants = {"init_std": train.init_std, "threshold": train.threshold}
        return {"names": dict(names), "spec": train.spec.to_dict(), **constants, **late}

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors in the file, for the train registered as `name`: cores first."""
        cores = {f"{name}.cores.{k}": shape for k, shape in enumerate(self.spec.core_shapes)}
        return cores | {f"{name}.rank_params.{k}": (rank,) for k, rank in enumerate(self.spec.inner_ranks)}


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a saved model; reads only the header of model.safetensors.

    Raises CheckpointError for a file that is missing, truncated, foreign or of a later format.
    """
    return read_folder(Path(folder), with_tensors=False)[0]


def tensor_headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type ("F32") of every tensor that model.safetensors stores, from its header; tied ones once.

    Raises OSError or SafetensorError for a file that is missing, truncated or foreign.
    """
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (tuple(header.get_shape()), header.get_dtype()) for name, header in headers.items()}


def read_folder(folder: Path, *, with_tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Manifest and tensors of a saved model, tied tensors under each of their names; from one open file."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("comera")
            tensors = {name: file.get_tensor(name) for name in (file.keys() if with_tensors else ())}
    except FileNotFoundError as error:
        raise CheckpointError(f"expected a saved model in {folder}, but it has no {WEIGHTS}") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is truncated or no safetensors file ({error}): take another copy") from error
    if text is None:
        raise CheckpointError(
            f"{path} was not written by save_pretrained of this library: it has no manifest. To start from the weights "
            "of a dense model, load them into it and call tensorize_ with init='decompose'"
        )
    try:
        manifest: dict[str, Any] = json.loads(text)
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: expected manifest format {FORMAT}, got {manifest['format']} "
                f"(written by version {manifest['comera']}): update this library"
            )
        for entry in manifest["trains"]:
            SavedTrain.of(entry)
        if with_tensors:
            tensors |= {name: tensors[source] for name, source in manifest["tied"].items()}
            if not set(manifest["transient"]) <= tensors.keys():
                raise KeyError("transient")
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, SpecError) as error:
        raise CheckpointError(f"{path}: its manifest is damaged ({error!r}): take another copy") from error
    return manifest, tensors


def train_names(model: nn.Module) -> dict[TensorTrain, dict[str, str]]:
    """Every tensor train with all of its names, and the type of the layer that holds it under each."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[TensorTrain, dict[str, str]] = {}
    for name, module in modules.items():
        if isinstance(module, TensorTrain):
            names.setdefault(module, {})[name] = type_name(modules[name.rpartition(".")[0]])
    return names


def transient_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that `state_dict` skips (persistent=False)."""
    saved = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in saved}
