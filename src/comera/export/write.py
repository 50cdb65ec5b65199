"""Writes a model in one of three formats, and verifies it before it appears.

    compressed   FOLDER/model.safetensors, comera.json   for comera.load_pretrained; cores pruned, gates absorbed
    dense        FOLDER/model.safetensors                for load_state_dict or from_pretrained; materialized weights
                                                         under the names of the original architecture
    program      FILE.pt2                                for torch.export.load, without comera; its weights are the
                                                         cores, the batch has any size

Each is written to a temporary place, loaded again, compared with the model, and only then renamed.
"""

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from comera.convert import materialize_
from comera.errors import CheckpointError, ConfigError, ConversionError
from comera.export.layers import copy_with_own_trains, serving_copy
from comera.files import flush, replace_file, replace_folder
from comera.nn.tensor_train import CompressedLayer, named_trains
from comera.pretrained import WEIGHTS, load_pretrained, save_pretrained
from comera.rank.prune import prune_

Inputs: TypeAlias = Sequence[Tensor] | Mapping[str, Tensor]
Build: TypeAlias = Callable[[Path], nn.Module]

# Largest difference of outputs that counts as rounding, relative to the largest output if that is above 1.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Exported:
    """What was written, with its size. difference: the largest one between its outputs and the model's.

    call: how to call a program, with the names of its arguments if it has them.
    """

    path: Path
    bytes: int
    parameters: int
    difference: float
    call: str = ""

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.parameters:,} parameters, {self.bytes / 1e6:,.2f} MB; its outputs differ from the "
            f"model's by at most {self.difference:.1e}{self.call and f'; run it with {self.call}'}"
        )


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

    Pruned slices are removed and the gates absorbed into the cores, so all gates are ones. example_inputs: arguments of
    forward to compare outputs with, positional or by name, batch first. build: called with the folder, returns a model
    of the same architecture, dense or converted. metadata: JSON-compatible entries for the manifest. files: further
    files of the folder, text by name. overwrite: replace an earlier export. Raises ConfigError if something else is at
    `folder`, CheckpointError if the reloaded model computes something else; nothing is written then.
    """
    _check_free(Path(folder), overwrite)
    small = copy_with_own_trains(model)
    prune_(small)
    for _, tt in named_trains(small):
        tt.set_(tt.spec, tt.effective_cores())
    with _beside(Path(folder)) as beside:
        save_pretrained(small, beside, metadata=metadata)
        _save_config(small, beside)
        _save_files(files, beside)
        difference = _compare(model, load_pretrained(build(beside), beside).eval(), example_inputs, folder)
        parameters = _count(load_file(beside / WEIGHTS))
    return Exported(Path(folder), _size(Path(folder)), parameters, difference)


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

    Names are those of the original architecture; a tied weight appears under each of its names. Arguments are those of
    `export_compressed`, except that `build` returns the original architecture. Also raises ConversionError if the
    weights do not fit it.
    """
    _check_free(Path(folder), overwrite)
    dense = copy_with_own_trains(model)
    if any(isinstance(module, CompressedLayer) for module in dense.modules()):
        materialize_(dense)
    contiguous = torch.contiguous_format
    tensors = {name: t.detach().cpu().clone(memory_format=contiguous) for name, t in dense.state_dict().items()}
    with _beside(Path(folder)) as beside:
        replace_file(beside / WEIGHTS, lambda path: save_file(tensors, path, {"format": "pt"}))
        _save_config(dense, beside)
        _save_files(files, beside)
        original = build(beside)
        try:
            original.load_state_dict(load_file(beside / WEIGHTS))
        except RuntimeError as error:
            raise ConversionError(
                f"the weights of this {type(model).__name__} do not fit the dense {type(original).__name__} "
                f"({' '.join(str(error).split())[:200]}): export it to safetensors or to a program"
            ) from error
        difference = _compare(model, original.eval(), example_inputs, folder)
    return Exported(Path(folder), _size(Path(folder)), _count(tensors), difference)


def export_program(
    model: nn.Module, example_inputs: Inputs, path: str | Path, *, dynamic_shapes: Any = None, overwrite: bool = False
) -> Exported:
    """Write a program for `torch.export.load(path).module()`, which needs torch alone.

    It computes in evaluation mode, without gradients. Contractions are planned for the example's batch size and valid
    for any other. example_inputs: as in `export_compressed`, with two rows or more. path: the .pt2 file.
    dynamic_shapes: as for torch.export.export; by default the batch may have any size. Also raises ConversionError if
    torch.export cannot trace the model.
    """
    if Path(path).suffix != ".pt2":  # torch recognizes its programs by it
        raise ConfigError(f"expected a file that ends in .pt2 for a program, got {path}: rename it")
    _check_free(Path(path), overwrite, folder=False)
    served = serving_copy(model)
    served.forward = _plain_outputs(served.forward)  # type: ignore[method-assign]
    args, kwargs = _arguments(example_inputs)
    if dynamic_shapes is None:
        batch = torch.export.Dim("batch")
        dynamic_shapes = pytree.tree_map(lambda _: {0: batch}, kwargs or args)
    with torch.no_grad():
        served(*args, **kwargs)  # the layers plan for this batch size
        try:
            program = torch.export.export(served, args, kwargs, dynamic_shapes=dynamic_shapes)
        except Exception as error:  # the tracer raises many types
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConversionError(
                f"torch.export cannot trace this {type(model).__name__} ({reason}): export its weights instead, or "
                "remove branches on values and sizes of tensors from its forward"
            ) from error
    with _beside(Path(path), folder=False) as beside:
        stored = io.BytesIO()  # torch's own writing to a file ends the process where the disk is full
        torch.export.save(program, stored)
        beside.write_bytes(stored.getbuffer())
        loaded = torch.export.load(beside)
        difference = _compare(model, loaded.module(), example_inputs, path)
        parameters = _count(loaded.state_dict)
    arguments = ", ".join(f"{name}=..." for name in kwargs) or "..."
    call = f"torch.export.load({str(path)!r}).module()({arguments})"
    return Exported(Path(path), _size(Path(path)), parameters, difference, call)


def _plain_outputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose outputs torch.export can store: model outputs of transformers become dictionaries."""

    @wraps(forward)
    def plain(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        return dict(outputs) if isinstance(outputs, Mapping) else outputs

    return plain


def _arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


@torch.no_grad()
def _compare(model: nn.Module, written: nn.Module, inputs: Inputs, path: str | Path) -> float:
    """Largest difference between the outputs of both models, for the inputs and, if all have one batch, a row more.

    Raises CheckpointError if it exceeds rounding.
    """
    model = copy_with_own_trains(model).eval()
    largest = 0.0
    batches = {len(tensor) for tensor in pytree.tree_leaves(_arguments(inputs))}
    for more in (0, 1) if len(batches) == 1 else (0,):
        args, kwargs = pytree.tree_map(lambda tensor, n=more: torch.cat([tensor, tensor[:n]]), _arguments(inputs))
        for want, got in zip(_tensors(model(*args, **kwargs)), _tensors(written(*args, **kwargs)), strict=True):
            if want.shape != got.shape:
                raise _mismatch(path, f"outputs of shape {tuple(want.shape)}", f"shape {tuple(got.shape)}")
            if not want.numel():
                continue
            difference, scale = float((want - got).abs().max()), max(1.0, float(want.abs().max()))
            allowed = _ROUNDING.get(want.dtype, 0.0) * scale
            if not difference <= allowed:  # also for NaN
                raise _mismatch(path, f"the model's outputs to within {allowed:.0e}", f"{difference:.1e} off")
            largest = max(largest, difference)
    return largest


def _mismatch(path: str | Path, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected {expected}, got {got} after loading it again; nothing was written: check that all weights "
        "are finite and that the model is deterministic"
    )


def _tensors(outputs: Any) -> list[Tensor]:
    """The tensors in a model's outputs, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    items = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


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


def _save_files(files: Mapping[str, str] | None, folder: Path) -> None:
    for name, text in (files or {}).items():
        (folder / name).write_text(text, "utf-8")


def _check_free(path: Path, overwrite: bool, *, folder: bool = True) -> None:
    """Raise ConfigError if anything is at `path`, or, with `overwrite`, anything but an earlier export."""
    kind = "folder" if folder else "file"
    if os.path.lexists(path) and not overwrite:
        raise ConfigError(f"expected a {kind} that is not there yet, got {path}: give another, or set overwrite")
    if os.path.lexists(path) and not ((path / WEIGHTS).is_file() if folder else path.is_file()):
        raise ConfigError(f"expected an earlier export to overwrite, got {path}: give another {kind}")


@contextmanager
def _beside(path: Path, *, folder: bool = True) -> Iterator[Path]:
    """A temporary place to write to; replaces `path` on success and is removed after an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as place:
            beside = Path(place, path.name)
            if folder:
                beside.mkdir()
            yield beside
            for written in [*beside.rglob("*"), beside]:
                flush(written)
            if folder:
                replace_folder(beside, path)
            else:
                os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"expected a place that can be written to, got {path} ({error}): give another") from error


def _count(tensors: Mapping[str, Tensor]) -> int:
    """Parameters among them, without the integers of buffers (ids, ranks of blocks)."""
    return sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
