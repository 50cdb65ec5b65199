"""What all exports share: a folder that appears whole or not at all, and proof that it computes what the model does."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from comera.errors import CheckpointError, ConfigError
from comera.export.layers import copy_with_own_trains
from comera.files import flush, replace_folder
from comera.pretrained import MANIFEST, WEIGHTS

Inputs: TypeAlias = Sequence[Tensor] | Mapping[str, Tensor]

PROGRAM, ONNX = "model.pt2", "model.onnx"

# Largest difference of outputs that counts as rounding, relative to the largest output if that is above 1.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Exported:
    """What was written, with its size.

    Attributes:
        path: the folder.
        bytes: of its files.
        parameters: of the weights in it.
        difference: the largest one between its outputs and the model's.
        call: how to call a program, with the names of its arguments if it has them.

    See `export_program`.
    """

    path: Path
    bytes: int
    parameters: int
    difference: float
    call: str = ""

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.parameters:,} parameters, {self.bytes / 2**20:,.2f} MB; its outputs differ from the "
            f"model's by at most {self.difference:.1e}{self.call and f'; run it with {self.call}'}"
        )


@contextmanager
def new_folder(folder: Path, model: nn.Module, files: Mapping[str, str] | None, overwrite: bool) -> Iterator[Path]:
    """A temporary folder to write an export to; takes the place of `folder` on success and is removed after an error.

    It gets `files`, text by name, and the config.json of a model of transformers. Raises ConfigError, before anything
    is written, if anything is at `folder`, or, with `overwrite`, anything but an earlier export.
    """
    _check_free(folder, overwrite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
            beside = Path(place, folder.name)
            beside.mkdir()
            _save_config(model, beside)
            for name, text in (files or {}).items():
                (beside / name).write_text(text, "utf-8")
            yield beside
            for written in [*beside.rglob("*"), beside]:
                flush(written)
            replace_folder(beside, folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"expected a place that can be written to, got {folder} ({error}): give another") from error


def _check_free(folder: Path, overwrite: bool) -> None:
    if folder.suffix in (".pt2", ".onnx", ".safetensors"):
        raise ConfigError(f"expected a folder to export to, got {folder}, the name of a file: give its folder instead")
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise ConfigError(f"expected a folder that is not there yet, got {folder}: give another, or set overwrite")
    exported = any((folder / name).is_file() for name in (WEIGHTS, MANIFEST, PROGRAM, ONNX))
    if not exported or (folder / "trainer.json").exists():  # that is a checkpoint
        raise ConfigError(f"expected an earlier export to overwrite, got {folder}: give another folder")


def _save_config(model: nn.Module, folder: Path) -> None:
    """Write config.json for `from_pretrained`, with the tie of head and embedding, if the model is of transformers."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_json_file") or not hasattr(model, "get_output_embeddings"):
        return
    config = type(config).from_dict(config.to_dict())  # type: ignore[union-attr]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    weights = [getattr(layer, "tt", None) or getattr(layer, "weight", None) for layer in (embedding, head)]
    config.tie_word_embeddings = weights[0] is weights[1]
    config.architectures = [type(model).__name__]
    config.to_json_file(folder / "config.json")


def arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Inputs as positional and named arguments."""
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


@torch.no_grad()
def compare(model: nn.Module, written: Callable[..., Any], batches: Sequence[Inputs], folder: Path) -> float:
    """Largest difference between the outputs of both models, over all batches.

    Raises CheckpointError if it exceeds rounding.
    """
    model = copy_with_own_trains(model).eval()
    largest = 0.0
    for batch in batches:
        args, kwargs = arguments(batch)
        for want, got in zip(tensors(model(*args, **kwargs)), tensors(written(*args, **kwargs)), strict=True):
            if want.shape != got.shape:
                raise _mismatch(folder, f"outputs of shape {tuple(want.shape)}", f"shape {tuple(got.shape)}")
            if not want.numel():
                continue
            want, got = (t if t.is_floating_point() else t.double() for t in (want, got))
            closed = want.isinf()  # as masked logits are: the same ones in both
            difference = float((want - got).masked_fill(closed & (want == got), 0.0).abs().max())
            scale = max(1.0, float(want.masked_fill(closed, 0.0).abs().max()))
            allowed = _ROUNDING.get(want.dtype, 0.0) * scale
            if not difference <= allowed:  # also for NaN
                raise _mismatch(folder, f"the model's outputs to within {allowed:.0e}", f"{difference:.1e} off")
            largest = max(largest, difference)
    return largest


def one_more_row(inputs: Inputs) -> list[Inputs]:
    """The inputs, and, if all have one batch, the same with a row more."""
    batches = {len(tensor) for tensor in pytree.tree_leaves(arguments(inputs))}
    if len(batches) != 1:
        return [inputs]
    return [inputs, pytree.tree_map(lambda tensor: torch.cat([tensor, tensor[:1]]), inputs)]


def tensors(outputs: Any) -> list[Tensor]:
    """The tensors in a model's outputs, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    items = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, list | tuple) else ()
    return [tensor for item in items for tensor in tensors(item)]


def count(stored: Mapping[str, Tensor]) -> int:
    """Parameters among tensors, tied ones once, without the integers of buffers (ids, ranks of blocks)."""
    sizes = {t.data_ptr(): t.numel() for t in stored.values() if t.is_floating_point()}
    return sum(sizes.values())


def size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*"))


def _mismatch(folder: Path, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: expected {expected}, got {got} after loading it again; nothing was written: check that all weights "
        "are finite and that the model is deterministic"
    )
