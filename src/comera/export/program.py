"""Writes a model as a program, without its Python code, and verifies it before it appears.

    program   model.pt2    for torch.export.load, with torch alone
    ONNX      model.onnx   for onnxruntime and other engines; from 2 GB on, its weights are beside it

The weights in them are cores, or with `dense` materialized ones; the batch has any size.
"""

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from comera.errors import ConversionError
from comera.export.folder import (
    ONNX,
    PROGRAM,
    Exported,
    Inputs,
    arguments,
    compare,
    count,
    new_folder,
    one_more_row,
    size,
    tensors,
)
from comera.export.layers import dense_copy, serving_copy
from comera.extras import require
from comera.nn.ngram import NGramEmbedding


def export_program(
    model: nn.Module,
    example_inputs: Inputs,
    folder: str | Path,
    *,
    dynamic_shapes: Any = None,
    dense: bool = False,
    files: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write model.pt2, a program for `torch.export.load(path).module()`, which needs torch alone.

    It computes in evaluation mode, without gradients. Contractions are planned for the example's batch size and valid
    for any other.

    Args:
        model: compressed or not; it does not change.
        example_inputs: arguments of forward, positional or by name, batch first, with two rows or more.
        folder: appears once it is whole and verified.
        dynamic_shapes: as for torch.export.export. Default: the batch has any size.
        dense: store dense weights instead of cores.
        files: further files of the folder, text by name, such as a tokenizer.
        overwrite: replace an earlier export.

    Raises:
        ConfigError: something else is at `folder`, or it cannot be written.
        ConversionError: torch.export cannot trace the model.
        CheckpointError: the reloaded program computes something else.

    Example:
        >>> import tempfile, torch, comera
        >>> from comera.export import export_program
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=8)))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     written = export_program(model, [torch.randn(4, 64)], f"{place}/program")
        ...     program = torch.export.load(written.path / "model.pt2").module()
        >>> program(torch.randn(7, 64)).shape
        torch.Size([7, 256])
    """
    folder = Path(folder)
    shapes = _dynamic_shapes(example_inputs, dynamic_shapes)
    with new_folder(folder, model, files, overwrite) as beside:
        program, _ = _trace(model, example_inputs, shapes, dense)
        stored = io.BytesIO()  # torch's own writing to a file ends the process where the disk is full
        torch.export.save(program, stored)
        (beside / PROGRAM).write_bytes(stored.getbuffer())
        loaded = torch.export.load(beside / PROGRAM)
        difference = compare(model, loaded.module(), _batches(example_inputs, shapes), folder)
        parameters = count(loaded.state_dict)
    names = ", ".join(f"{name}=..." for name in arguments(example_inputs)[1]) or "..."
    call = f"torch.export.load({str(folder / PROGRAM)!r}).module()({names})"
    return Exported(folder, size(folder), parameters, difference, call)


def export_onnx(
    model: nn.Module,
    example_inputs: Inputs,
    folder: str | Path,
    *,
    dynamic_shapes: Any = None,
    dense: bool = False,
    files: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write model.onnx, for onnxruntime and other engines; needs the extra `onnx`.

    It computes in evaluation mode; with onnxruntime its outputs are compared with the model's. Inputs have the names of
    forward's arguments, dynamic axes those of `dynamic_shapes`.

    Args:
        model: compressed or not; it does not change.
        example_inputs: as in `export_program`.
        folder: appears once it is whole and verified.
        dynamic_shapes: as in `export_program`.
        dense: store dense weights instead of cores.
        files: further files of the folder, text by name, such as a tokenizer.
        overwrite: replace an earlier export.

    Raises:
        MissingPackageError: without onnx, onnxruntime or onnxscript.
        ConfigError: something else is at `folder`, or it cannot be written.
        ConversionError: the model cannot be traced, or ONNX lacks an operator that it uses.
        CheckpointError: the graph computes something else.

    Example:
        >>> import tempfile, torch, comera
        >>> from comera.export import export_onnx
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=8)))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     written = export_onnx(model, {"input": torch.randn(4, 64)}, f"{place}/onnx")
        >>> written.difference < 1e-5
        True
    """
    require("an export to ONNX", "comera[onnx]", "onnx", "onnxruntime", "onnxscript")
    folder = Path(folder)
    shapes = _dynamic_shapes(example_inputs, dynamic_shapes)
    with new_folder(folder, model, files, overwrite) as beside:
        program, outputs = _trace(model, example_inputs, shapes, dense)
        graph, parameters = _translate(program, outputs, shapes, type(model).__name__)
        graph.save(beside / ONNX)
        engine = _Engine(beside / ONNX, type(model).__name__)
        difference = compare(model, engine, _batches(example_inputs, shapes), folder)
    feed = ", ".join(f'"{name}": ...' for name in engine.inputs)
    call = f"onnxruntime.InferenceSession({str(folder / ONNX)!r}).run(None, {{{feed}}})"
    return Exported(folder, size(folder), parameters, difference, call)


def _dynamic_shapes(inputs: Inputs, given: Any) -> Any:
    args, kwargs = arguments(inputs)
    if given is None:
        batch = torch.export.Dim("batch")
        return pytree.tree_map(lambda _: {0: batch}, kwargs or args)
    return {name: given[name] for name in kwargs} if kwargs and isinstance(given, Mapping) else given


def _axes(shapes: Any) -> list[dict[int, Any]]:
    """The dynamic axes of each input, by dimension."""
    leaves = pytree.tree_leaves(shapes, is_leaf=lambda node: node is None or _is_axes(node))
    return [leaf if _is_axes(leaf) else {} for leaf in leaves]


def _is_axes(node: Any) -> bool:
    return isinstance(node, dict) and all(isinstance(key, int) for key in node)


def _batches(inputs: Inputs, shapes: Any) -> list[Inputs]:
    """Inputs to compare outputs for: the example, a row more, and shorter where another axis than the batch varies."""
    leaves, structure = pytree.tree_flatten(inputs)
    axes = _axes(shapes)
    batches = one_more_row(inputs)
    if len(axes) == len(leaves) and any(set(dims) - {0} for dims in axes):
        shorter = list(leaves)
        for place, dims in enumerate(axes):
            for dim in set(dims) - {0}:
                shorter[place] = shorter[place].narrow(dim, 0, -(-shorter[place].shape[dim] // 2))
        batches.append(pytree.tree_unflatten([tensor.contiguous() for tensor in shorter], structure))
    return batches


def _trace(model: nn.Module, inputs: Inputs, shapes: Any, dense: bool) -> tuple[ExportedProgram, list[str]]:
    """The graph of a model, with torch's operators only, and the names of its outputs."""
    args, kwargs = arguments(inputs)
    if len(args) + len(kwargs) > 1 and any(isinstance(module, NGramEmbedding) for module in model.modules()):
        raise ConversionError(
            "expected the ids alone as input of a model with n-grams, got more: masks, positions and caches decide "
            "which ids belong together, and a program takes each row of ids as one whole text; export its weights "
            "(safetensors), or train it without n-grams"
        )
    served = serving_copy(dense_copy(model) if dense else model)
    served.forward = _plain_outputs(served.forward)  # type: ignore[method-assign]
    with torch.no_grad():
        outputs = served(*args, **kwargs)  # the layers plan for this batch size
        try:
            program = torch.export.export(served, args, kwargs, dynamic_shapes=shapes)
        except Exception as error:  # the tracer raises many types
            raise ConversionError(
                f"torch.export cannot trace this {type(model).__name__} ({_reason(error)}): export its weights "
                "instead, or remove branches on values and sizes of tensors from its forward"
            ) from error
    _remove_unused(program)
    named = isinstance(outputs, dict) and all(isinstance(value, Tensor) for value in outputs.values())
    names = list(outputs) if named else [f"output_{k}" for k in range(len(tensors(outputs)))]
    return program, names if len(names) > 1 or named else ["output"]


def _remove_unused(program: ExportedProgram) -> None:
    """Remove what no output needs, such as dense weights of which a forward reads the dtype only.

    Assertions on the dtypes of intermediate results would keep it; those follow from the inputs, whose assertions stay.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default and node.args[0].op != "placeholder":
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _plain_outputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose outputs torch.export can store: model outputs of transformers become dictionaries."""

    @wraps(forward)
    def plain(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        return dict(outputs) if isinstance(outputs, Mapping) else outputs

    return plain


def _translate(program: ExportedProgram, outputs: Sequence[str], shapes: Any, model: str) -> tuple[Any, int]:
    """The program as an ONNX graph, and the number of its parameters."""
    with _quiet():
        try:
            graph = torch.onnx.export(program, dynamo=True, verbose=False, output_names=list(outputs))
        except Exception as error:  # the exporter raises many types
            raise _not_in_onnx(error, model) from error
        assert graph is not None
        axes, inputs = _axes(shapes), graph.model.graph.inputs
        names: dict[Any, str] = {}
        for put, dims in zip(inputs, axes, strict=True) if len(axes) == len(inputs) else ():
            assert put.shape is not None
            names |= {put.shape[dim]: axis.__name__ for dim, axis in dims.items() if hasattr(axis, "__name__")}
        graph.rename_axes(names)
    for node in graph.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, with the paths of this machine
    stored = (value.const_value for value in graph.model.graph.initializers.values())
    parameters = sum(tensor.size for tensor in stored if tensor is not None and tensor.dtype.is_floating_point())
    return graph, parameters


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch and onnxscript log about every operator that they do not fold, and about other packages."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _not_in_onnx(error: BaseException, model: str) -> ConversionError:
    missing = "No ONNX function found for"
    causes: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(_reason(cause))
        cause = cause.__cause__
    for text in causes:
        if missing in text:
            shown = text.partition(missing)[2].partition(". ")[0].strip(" .")
            operator = match[1] if (match := re.search(r"op='([^']+)'", shown)) else shown  # of an OpOverload
            return ConversionError(
                f"ONNX has no operator for {operator}, which this {model} uses: export it as a program, or compute "
                "that part with other operations"
            )
    return ConversionError(f"this {model} cannot be translated to ONNX ({causes[-1][:300]}): export it as a program")


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


class _Engine:
    """A graph in onnxruntime, called as the model is. inputs: their names, in order."""

    def __init__(self, file: Path, model: str) -> None:
        import onnxruntime

        self._model = model
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors; a warning is logged for each constant that it folds
        try:
            self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the engine's own types
            raise self._refused(error) from error
        self.inputs = [put.name for put in self._session.get_inputs()]

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> list[Tensor]:
        given = dict(zip(self.inputs, args, strict=False)) | kwargs
        try:
            feed = {name: given[name].detach().cpu().numpy() for name in self.inputs}
            return [torch.from_numpy(output) for output in self._session.run(None, feed)]
        except Exception as error:  # the engine's own types; NumPy has no bfloat16
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> ConversionError:
        return ConversionError(
            f"onnxruntime cannot run the graph of this {self._model} ({_reason(error)}): export the model in float32, "
            "or as a program"
        )
