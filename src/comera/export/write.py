"""Writes the weights of a model in one of two forms, and verifies them before they appear.

    compressed   model.safetensors, comera.json   for comera.load_pretrained; cores pruned, gates absorbed
    dense        model.safetensors                for from_pretrained or safetensors' load_model; materialized weights
                                                  under the names of the original architecture

Each is written to a temporary folder, loaded again, compared with the model, and only then renamed.
"""

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_model, save_file
from torch import Tensor, nn

from comera.errors import ConversionError
from comera.export.folder import Exported, Inputs, compare, count, new_folder, one_more_row, size
from comera.export.layers import copy_with_own_trains, dense_copy
from comera.files import replace_file
from comera.nn.tensor_train import named_trains
from comera.pretrained import WEIGHTS, load_pretrained, save_pretrained, tensor_headers
from comera.rank.prune import prune_

Build: TypeAlias = Callable[[Path], nn.Module]


def export_compressed(
    model: nn.Module,
    example_inputs: Inputs,
    folder: str | Path,
    build: Build,
    *,
    metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write the compressed weights to `folder`, for `comera.load_pretrained`; does not change the model.

    Pruned slices are removed and the gates absorbed into the cores, so all gates are ones.

    Args:
        model: compressed or not.
        example_inputs: arguments of forward to compare outputs with, positional or by name, batch first.
        folder: appears once it is whole and verified.
        build: called with the folder, returns a model of the same architecture, dense or converted.
        metadata: JSON-ready entries for the manifest.
        files: further files of the folder, text by name, such as a tokenizer.
        overwrite: replace an earlier export.

    Raises:
        ConfigError: something else is at `folder`, or it cannot be written.
        CheckpointError: the reloaded model computes something else.

    Example:
        >>> import tempfile, torch, comera
        >>> from comera.export import export_compressed
        >>> def build(folder):
        ...     return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
        >>> model = build(None)
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=8)))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     written = export_compressed(model, [torch.randn(4, 64)], f"{place}/small", build)
        >>> written.difference < 1e-5
        True
    """
    folder = Path(folder)
    small = copy_with_own_trains(model)
    prune_(small)
    for _, tt in named_trains(small):
        tt.set_(tt.spec, tt.effective_cores())
    with new_folder(folder, small, files, overwrite) as beside:
        save_pretrained(small, beside, metadata=metadata)
        loaded = load_pretrained(build(beside), beside).eval()
        difference = compare(model, loaded, one_more_row(example_inputs), folder)
        headers = tensor_headers(beside).values()
        parameters = sum(prod(shape) for shape, kind in headers if kind.startswith(("F", "BF")))
    return Exported(folder, size(folder), parameters, difference)


def export_dense(
    model: nn.Module,
    example_inputs: Inputs,
    folder: str | Path,
    build: Build,
    *,
    files: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write the dense state dict to `folder`: model.safetensors and, for models of transformers, config.json.

    Names are those of the original architecture; what is tied there, too, has the first of its names alone. A model of
    transformers loads with `AutoModel...from_pretrained(folder)`, any other with `safetensors.torch.load_model`, or
    `load_state_dict` where nothing is tied: without this library.

    Args:
        model: compressed or not.
        example_inputs: as in `export_compressed`.
        folder: as in `export_compressed`.
        build: called with the folder, returns the original architecture.
        files: as in `export_compressed`.
        overwrite: replace an earlier export.

    Raises:
        ConfigError: something else is at `folder`, or it cannot be written.
        ConversionError: the weights do not fit the original architecture.
        CheckpointError: the reloaded model computes something else.

    Example:
        >>> import tempfile, torch, comera
        >>> from comera.export import export_dense
        >>> from safetensors.torch import load_file
        >>> def build(folder):
        ...     return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
        >>> model = build(None)
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=8)))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     written = export_dense(model, [torch.randn(4, 64)], f"{place}/dense", build)
        ...     sorted(load_file(written.path / "model.safetensors"))
        ['0.bias', '0.weight']
    """
    folder = Path(folder)
    dense = dense_copy(model)
    contiguous = torch.contiguous_format
    with new_folder(folder, dense, files, overwrite) as beside:
        original = build(beside)
        tied = original.state_dict(keep_vars=True)
        first: dict[Any, tuple[str, Tensor]] = {}
        for name, tensor in dense.state_dict(keep_vars=True).items():
            first.setdefault((tensor, tied.get(name)), (name, tensor))
        tensors = {name: t.detach().cpu().clone(memory_format=contiguous) for name, t in first.values()}
        replace_file(beside / WEIGHTS, lambda path: save_file(tensors, path, {"format": "pt"}))
        try:
            load_model(original, beside / WEIGHTS)
        except RuntimeError as error:
            raise ConversionError(
                f"the weights of this {type(model).__name__} do not fit the dense {type(original).__name__} "
                f"({' '.join(str(error).split())[:200]}): export its compressed weights or a program"
            ) from error
        difference = compare(model, original.eval(), one_more_row(example_inputs), folder)
    return Exported(folder, size(folder), count(tensors), difference)
