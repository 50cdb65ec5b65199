"""`save_pretrained`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from comera._version import __version__
from comera.errors import CheckpointError
from comera.files import replace_file
from comera.nn.adapted import refuse_adapters, train_names
from comera.pretrained.folder import FORMAT, MANIFEST, SavedTrain, file_header
from comera.pretrained.sharded import is_writer
from comera.pretrained.stored import WEIGHTS, write_tensors


def save_pretrained(model: nn.Module, folder: str | Path, *, metadata: Mapping[str, Any] | None = None) -> None:
    """Write a model, compressed or dense, to `folder`: model.safetensors and comera.json, each replaced as a whole.

    More than 1 GiB of tensors is written in shards with an index, as transformers names them, one shard at a time.
    With parameters that `fully_shard` has spread over processes, call it in every process; the first one writes.

    Args:
        model: its parameters and buffers are saved, tied tensors once.
        folder: created if it does not exist.
        metadata: JSON-ready values to keep in the manifest.

    Raises:
        CheckpointError: a model on the meta device, with adapters, or with state other than tensors. The folder is
            unchanged.

    Example:
        >>> import tempfile, torch, comera
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=8)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     comera.save_pretrained(model, folder, metadata={"step": 1000})
        ...     same = comera.load_pretrained(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU()), folder)
        >>> inputs = torch.randn(4, 64)
        >>> torch.equal(same(inputs), model(inputs))
        True
    """
    folder = Path(folder)
    instead = "comera.adapters.save_adapters writes them; to save the model itself, merge_adapters_ or remove_adapters_"
    refuse_adapters(model, CheckpointError, "save_pretrained", instead)
    tensors, tied, transient = _stored_tensors(model)
    manifest = {
        "format": FORMAT,
        "comera": __version__,
        "metadata": dict(metadata or {}),
        "trains": [SavedTrain.entry(tt, names) for tt, names in train_names(model).items()],
        "tied": tied,
        "transient": transient,
    }
    writer = is_writer(model.parameters())
    try:
        file_header(manifest)  # before anything is written
        if writer:
            folder.mkdir(parents=True, exist_ok=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"metadata for {folder} must be JSON-ready, but: {error}") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"expected a folder to save in, found a file at {folder}") from error

    def about(sums: str | dict[str, str]) -> dict[str, str]:
        manifest["checksum"] = sums
        return file_header(manifest)

    write_tensors(folder, WEIGHTS, tensors, about, writer=writer)
    if writer:
        replace_file(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _stored_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """The tensors to store, each once; other name -> stored name of the tied ones; names of transient buffers."""
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    state = model.state_dict(keep_vars=True)
    transient = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in state}
    state.pop("_metadata", None)  # neuraloperator notes there how a model was made
    for name, value in {**state, **transient}.items():
        if not isinstance(value, Tensor) or value.is_meta:
            found = "is on the meta device" if isinstance(value, Tensor) else f"is a {type(value).__name__}, no tensor"
            raise CheckpointError(f"{name} of this {type(model).__name__} {found}: only tensors with data can be saved")
        if id(value) in first:
            tied[name] = first[id(value)]
            continue
        first[id(value)] = name
        tensors[name] = value
    return tensors, tied, list(transient)
