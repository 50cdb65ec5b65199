"""Three forms in which a model is written, each tried before it takes its name.

    compressed   FOLDER/model.safetensors, comera.json   for comera.load_pretrained; inactive slices are cut, rank
                                                         parameters absorbed
    dense        FOLDER/model.safetensors                for load_state_dict or from_pretrained; every weight
                                                         materialised, under the names of the original architecture
    program      FILE.pt2                                for torch.export.load, without this library; the cores are its
                                                         weights, the batch has any size

Each is written beside its place, loaded again, compared with the model, and renamed only then.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from comera.convert import materialize_
from comera.errors import CheckpointError, ConfigError, ConversionError
from comera.export.layers import own_chains, serving_copy
from comera.files import flush
from comera.nn.tensor_train import CompressedLayer, named_trains
from comera.pretrained import WEIGHTS, load_pretrained, save_pretrained
from comera.rank.prune import prune_

Inputs: TypeAlias = Sequence[Tensor] | Mapping[str, Tensor]
Fresh: TypeAlias = Callable[[Path], nn.Module]

# The largest difference of an output that is rounding, relative to the largest output where that is above 1.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Exported:
    """What was written: bytes and numbers in it; difference: the largest one of an output to the model's own.

    call: how a program is called, with the names of its arguments, where it has them.
    """

    path: Path
    bytes: int
    numbers: int
    difference: float
    call: str = ""

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.numbers:,} numbers, {self.bytes / 1e6:,.2f} MB; loaded again, its outputs differ from "
            f"the model's by at most {self.difference:.1e}{self.call and f'; to run it: {self.call}'}"
        )


def export_compressed(
    model: nn.Module,
    example_inputs: Inputs,
    folder: str | Path,
    fresh: Fresh,
    *,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write the compressed weights to `folder`, for `comera.load_pretrained`; the model stays as it is.

    Inactive slices are cut; the rank parameters are ones, as they are absorbed into the cores.
    example_inputs: arguments of forward, in order or by name, the batch first in each, to try with what was written.
    fresh: called with the folder, gives a model of the same architecture, dense or converted. metadata: JSON-ready, for
    the manifest.
    Raises ConfigError for a path that is taken, and CheckpointError, with nothing written, where the reloaded model
    computes something else.
    """
    _check_free(Path(folder), overwrite)
    small = own_chains(model)
    prune_(small)
    for _, tt in named_trains(small):
        tt.set_(tt.spec, tt.effective_cores())
    with _beside(Path(folder)) as beside:
        save_pretrained(small, beside, metadata=metadata)
        _save_config(small, beside)
        difference = _compare(model, load_pretrained(fresh(beside), beside).eval(), example_inputs, folder)
        numbers = sum(tensor.numel() for tensor in load_file(beside / WEIGHTS).values())
    return Exported(Path(folder), _size(Path(folder)), numbers, difference)


def export_dense(
    model: nn.Module, example_inputs: Inputs, folder: str | Path, fresh: Fresh, *, overwrite: bool = False
) -> Exported:
    """Write the state dict of the dense model to `folder`: model.safetensors and, for transformers, config.json.

    It has the names of the original architecture, a tied weight under each of its names.
    fresh: called with the folder, gives the original architecture. Otherwise as `export_compressed`; raises
    ConversionError, too, for a model whose weights have no place there.
    """
    _check_free(Path(folder), overwrite)
    dense = own_chains(model)
    if any(isinstance(module, CompressedLayer) for module in dense.modules()):
        materialize_(dense)
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in dense.state_dict().items()
    }
    with _beside(Path(folder)) as beside:
        save_file(tensors, beside / WEIGHTS, {"format": "pt"})
        _save_config(dense, beside)
        original = fresh(beside)
        try:
            original.load_state_dict(load_file(beside / WEIGHTS))
        except RuntimeError as error:
            raise ConversionError(
                f"the weights of this {type(model).__name__} have no place in the dense {type(original).__name__} "
                f"({' '.join(str(error).split())[:200]}): export it to safetensors or to a program"
            ) from error
        difference = _compare(model, original.eval(), example_inputs, folder)
    return Exported(Path(folder), _size(Path(folder)), sum(map(torch.numel, tensors.values())), difference)


def export_program(
    model: nn.Module,
    example_inputs: Inputs,
    path: str | Path,
    *,
    dynamic_shapes: Any = None,
    overwrite: bool = False,
) -> Exported:
    """Write a program that `torch.export.load(path).module()` runs where only torch is installed.

    It computes as in evaluation mode, without gradients. Contractions are planned for the size of the example inputs
    and hold for any other.
    example_inputs: arguments of forward, in order or by name, the batch first in each, of two rows or more.
    dynamic_shapes: as torch.export.export takes them; by default the batch may have any size.
    Raises ConversionError for a model that cannot be traced, ConfigError for a path that is taken, and CheckpointError,
    with nothing written, where the program computes something else.
    """
    if Path(path).suffix != ".pt2":  # torch knows its programs by it
        raise ConfigError(f"expected a file that ends in .pt2 for a program, got {path}: give it that ending")
    _check_free(Path(path), overwrite, folder=False)
    served = serving_copy(model)
    served.forward = _plain_outputs(served.forward)  # type: ignore[method-assign]
    args, kwargs = _arguments(example_inputs)
    if dynamic_shapes is None:
        batch = torch.export.Dim("batch")
        dynamic_shapes = pytree.tree_map(lambda _: {0: batch}, kwargs or args)
    with torch.no_grad():
        served(*args, **kwargs)  # the layers see how large a batch is
        try:
            program = torch.export.export(served, args, kwargs, dynamic_shapes=dynamic_shapes)
        except Exception as error:  # of many kinds, from all over the tracer
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConversionError(
                f"torch.export cannot trace this {type(model).__name__} ({reason}): export its weights instead, or let "
                "its forward do without branches on the values and sizes of tensors"
            ) from error
    with _beside(Path(path), folder=False) as beside:
        torch.export.save(program, beside)
        loaded = torch.export.load(beside)
        difference = _compare(model, loaded.module(), example_inputs, path)
        numbers = sum(tensor.numel() for tensor in loaded.state_dict.values())
    given = ", ".join(f"{name}=..." for name in kwargs) or "..."
    call = f"torch.export.load({str(path)!r}).module()({given})"
    return Exported(Path(path), _size(Path(path)), numbers, difference, call)


def _plain_outputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose outputs are of types that torch knows: the dictionaries of transformers become plain ones."""

    @wraps(forward)
    def plain(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        return dict(outputs) if isinstance(outputs, Mapping) else outputs

    return plain


def _arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


@torch.no_grad()
def _compare(model: nn.Module, written: nn.Module, inputs: Inputs, path: str | Path) -> float:
    """The largest difference between the outputs of both, on the inputs and, where these have a batch, one row more.

    Raises CheckpointError where it is more than rounding.
    """
    model = own_chains(model).eval()
    largest = 0.0
    batches = {len(tensor) for tensor in pytree.tree_leaves(_arguments(inputs))}
    for more in (0, 1) if len(batches) == 1 else (0,):
        args, kwargs = pytree.tree_map(lambda tensor, n=more: torch.cat([tensor, tensor[:n]]), _arguments(inputs))
        for want, got in zip(_tensors(model(*args, **kwargs)), _tensors(written(*args, **kwargs)), strict=True):
            if want.shape != got.shape:
                raise _different(path, f"outputs of shape {tuple(want.shape)}", f"shape {tuple(got.shape)}")
            if not want.numel():
                continue
            difference, scale = float((want - got).abs().max()), max(1.0, float(want.abs().max()))
            allowed = _ROUNDING.get(want.dtype, 0.0) * scale
            if not difference <= allowed:  # NaN too
                raise _different(path, f"outputs as the model gives them, to {allowed:.0e}", f"{difference:.1e} off")
            largest = max(largest, difference)
    return largest


def _different(path: str | Path, expected: str, came: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected {expected}, got {came} after loading it again; nothing was written: are all weights finite, "
        "and does the model compute the same each time?"
    )


def _tensors(outputs: Any) -> list[Tensor]:
    """The tensors in what a model gives, in their order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _save_config(model: nn.Module, folder: Path) -> None:
    """config.json of a model of transformers, for `from_pretrained`; it says whether head and embedding are tied."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_json_file") or not hasattr(model, "get_output_embeddings"):
        return
    config = type(config).from_dict(config.to_dict())  # type: ignore[union-attr]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    held = [getattr(layer, "tt", None) or getattr(layer, "weight", None) for layer in (embedding, head)]
    config.tie_word_embeddings = held[0] is held[1]
    config.architectures = [type(model).__name__]
    config.to_json_file(folder / "config.json")


def _check_free(path: Path, overwrite: bool, *, folder: bool = True) -> None:
    """Raise ConfigError when something is at `path`; with `overwrite`, when that is nothing that an export leaves."""
    kind = "folder" if folder else "file"
    if os.path.lexists(path) and not overwrite:
        raise ConfigError(f"expected a {kind} that is not there yet, got {path}: give another, or set overwrite")
    if os.path.lexists(path) and not ((path / WEIGHTS).is_file() if folder else path.is_file()):
        raise ConfigError(f"expected an earlier export to overwrite, got {path}: give another {kind}")


@contextmanager
def _beside(path: Path, *, folder: bool = True) -> Iterator[Path]:
    """A place to write to, which replaces `path` when all went well; after an error nothing is left of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    if not folder:
        beside = beside.with_name(beside.name + path.suffix)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if folder:
            beside.mkdir()
        yield beside
        for written in [*beside.rglob("*"), beside] if folder else [beside]:
            flush(written)
        if folder and path.exists():
            old = path.rename(beside.with_suffix(".old"))
            beside.rename(path)
            shutil.rmtree(old)
        else:
            os.replace(beside, path)
    except OSError as error:
        raise ConfigError(f"expected a place that can be written to, got {path} ({error}): give another") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        with suppress(OSError):
            beside.unlink()


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
