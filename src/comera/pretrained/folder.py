"""What a folder with a saved model holds: its tensors in `model.safetensors`, and a manifest of its tensor trains.

The manifest is stored in the header of model.safetensors, so that a single rename replaces tensors and manifest and an
interrupted save never leaves a pair that does not match; a large model has shards and the manifest in their index.
`comera.json` is a copy for people; loading does not read it. "checksum" is that of all tensors, or those of the shards;
the manifest's own stands beside it in the header. Files without them, of before they were written, load as well.

    {"format": 1, "comera": version, "metadata": {...}, "checksum": "…",
     "trains": [{"names": {"encoder.0.tt": "TTLinear"}, "spec": {...}, "init_std": 0.02, "threshold": 0.01,
                 "late_from": 9812,          parameters when a late stage first began; absent before
                 "counts_elsewhere": true,   a tie that was cut; absent otherwise
                 "padding_row": true}],      a row of padding that is not zero; absent otherwise
     "tied": {"head.tt.cores.0": "embed.tt.cores.0"},      a tied tensor is stored once, under its first name
     "transient": ["embed.positions"]}      buffers with persistent=False, read only for models on the meta device
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from comera.errors import CheckpointError, SpecError
from comera.nn.tensor_train import TensorTrain
from comera.pretrained.stored import MANIFEST_ENTRY, WEIGHTS, StoredTensors
from comera.tt.spec import Spec, spec_from_dict

MANIFEST = "comera.json"
"""Name of the copy of the manifest for people; loading does not read it."""
FORMAT = 1
_MARKS = ("counts_elsewhere", "padding_row")  # of a tensor train; in its entry only where true
_SUM = "comera_xxh3_128"  # in the header: the manifest's checksum


@dataclass(frozen=True)
class SavedTrain:
    """One entry of "trains". names: qualified name of the tensor train -> type of the layer that holds it there."""

    names: Mapping[str, str]
    spec: Spec
    init_std: float
    threshold: float
    late_from: int | None = None
    counts_elsewhere: bool = False
    padding_row: bool = False

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> SavedTrain:
        """Read an entry of the manifest."""
        spec = spec_from_dict(entry["spec"])
        late_from = None if entry.get("late_from") is None else int(entry["late_from"])
        constants = float(entry["init_std"]), float(entry["threshold"])
        marks = (entry.get(mark) is True for mark in _MARKS)
        train = cls(dict(entry["names"]), spec, *constants, late_from, *marks)
        named = bool(train.names) and all(isinstance(text, str) for item in train.names.items() for text in item)
        if not named or not all(0 <= value < inf for value in (train.init_std, train.threshold, late_from or 0)):
            raise SpecError(f"expected names of layers and constants >= 0 for a tensor train, got {train}")
        return train

    @staticmethod
    def entry(train: TensorTrain, names: Mapping[str, str]) -> dict[str, Any]:
        """The entry of a tensor train, which `of` reads."""
        late: dict[str, Any] = {} if train.late_from is None else {"late_from": train.late_from}
        marks = {mark: True for mark in _MARKS if getattr(train, mark)}
        constants = {"init_std": train.init_std, "threshold": train.threshold}
        return {"names": dict(names), "spec": train.spec.to_dict(), **constants, **late, **marks}

    @property
    def marks(self) -> dict[str, Any]:
        """Attributes of the tensor train that are neither tensors nor arguments."""
        return {name: getattr(self, name) for name in ("late_from", *_MARKS)}

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors in the file, for the train registered as `name`: cores, then gates."""
        cores = {f"{name}.cores.{k}": shape for k, shape in enumerate(self.spec.core_shapes)}
        gates = {f"{name}.rank_params.{k}": (rank,) for k, rank in enumerate(self.spec.inner_ranks)}
        layout = {}
        if self.spec.layout_name:
            layout[f"{name}.{self.spec.layout_name}"] = tuple(torch.tensor(self.spec.layout).shape)
        return cores | gates | layout


def with_stored_layout(spec: Spec, layout: Tensor, name: str, where: object) -> Spec:
    """The spec with what is stored of it beside cores and gates, whose shapes do not show it.

    Raises CheckpointError, naming `where`, for a layout that does not fit them.
    """
    with suppress(SpecError):
        return spec.with_layout(layout.flatten().tolist())
    raise CheckpointError(
        f"{where}: expected {name}.{spec.layout_name} to hold {spec.layout_of} the cores and gates, got "
        f"{int(layout.sum())} in all, from {int(layout.min())} to {int(layout.max())}: the weights are damaged, take "
        "another copy"
    )


def file_header(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What the header of model.safetensors says of its tensors. Raises TypeError or ValueError unless JSON-ready."""
    text = json.dumps(manifest, allow_nan=False)
    return {"format": "pt", MANIFEST_ENTRY: text, _SUM: _text_sum(text)}


def _text_sum(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a saved model; reads only headers.

    Raises CheckpointError for a file that is missing, truncated, foreign or of a later format.

    Example:
        >>> import tempfile, torch, comera
        >>> from comera.pretrained import read_manifest
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.BTT(rank=1)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     comera.save_pretrained(model, folder, metadata={"trained on": "nothing yet"})
        ...     manifest = read_manifest(folder)
        >>> manifest["metadata"], [train["names"] for train in manifest["trains"]]
        ({'trained on': 'nothing yet'}, [{'0.tt': 'BTTLinear'}])
    """
    return read_folder(Path(folder), with_tensors=False)[0]


def tensor_headers(folder: str | Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type ("F32") of every tensor that a folder stores, from the headers of its files; tied ones once.

    Raises FileNotFoundError if there are no files, CheckpointError for ones that are truncated, foreign or not whole.

    Example:
        >>> import tempfile, torch, comera
        >>> from comera.pretrained import tensor_headers
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.BTT(rank=1)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     comera.save_pretrained(model, folder)
        ...     headers = tensor_headers(folder)
        >>> headers["0.bias"]
        ((64,), 'F32')
    """
    stored = StoredTensors.open(Path(folder))
    return {name: (shape, stored.types[name]) for name, shape in stored.shapes.items()}


@dataclass(frozen=True)
class Kind:
    """What a file holds, for errors: what it is, the call that writes it, and what to do with the file of another."""

    file: str
    what: str
    writer: str
    instead: str


MODEL = Kind(
    WEIGHTS,
    "a saved model",
    "save_pretrained",
    "To start from the weights of a dense model, load them into it and call tensorize_ with init='decompose'",
)


def read_folder(
    folder: Path, kind: Kind = MODEL, *, with_tensors: bool = True
) -> tuple[dict[str, Any], list[SavedTrain], StoredTensors]:
    """Manifest, tensor trains and tensors of a saved model, tied tensors under each of their names."""
    path = folder / kind.file
    try:
        tensors = StoredTensors.open(folder, kind.file)
    except FileNotFoundError as error:
        raise CheckpointError(f"expected {kind.what} in {folder}, but it has no {kind.file}") from error
    about = tensors.metadata
    text = about.get(MANIFEST_ENTRY)
    if text is None:
        raise CheckpointError(
            f"{path} was not written by {kind.writer} of this library: it has no manifest. {kind.instead}"
        )
    try:
        manifest: dict[str, Any] = json.loads(text)
        has_sums = "checksum" in manifest
        if about.get(_SUM) != (_text_sum(text) if has_sums else None):
            raise ValueError("it differs from its checksum")
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: expected manifest format {FORMAT}, got {manifest['format']} "
                f"(written by version {manifest['comera']}): update this library"
            )
        trains = [SavedTrain.of(entry) for entry in manifest["trains"]]
        if with_tensors and has_sums and manifest["checksum"] != tensors.sums():
            raise CheckpointError(f"{path} is damaged: its tensors differ from their checksum. Take another copy")
        if with_tensors:
            for name, source in manifest["tied"].items():
                tensors.tie(name, source)
            if not set(manifest["transient"]) <= tensors.keys():
                raise KeyError("transient")
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: its manifest is damaged ({error!r}): take another copy") from error
    return manifest, trains, tensors
