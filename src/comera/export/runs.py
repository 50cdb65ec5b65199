"""Exports the model of a trained run."""

from pathlib import Path

import torch
from torch import nn

from comera.baselines import has_own_layers
from comera.errors import ConfigError
from comera.export.folder import Exported
from comera.export.program import export_onnx, export_program
from comera.export.write import export_compressed, export_dense
from comera.recipes.trained import Trained

FORMATS = ("safetensors", "program", "onnx")


def export_run(
    trained: Trained, target: str, folder: Path, *, dense: bool = False, overwrite: bool = False
) -> Exported:
    """Write the model of a run to `folder`, with its tokenizer if the recipe has one.

    Args:
        trained: the run.
        target: "safetensors", "program" or "onnx".
        folder: appears once it is whole and verified.
        dense: store dense weights instead of cores; as safetensors, they load with transformers' from_pretrained.
        overwrite: replace an earlier export.

    Raises:
        ConfigError: an unknown target, or what `comera.export` raises, as every other error.
    """
    architecture, model = trained.architecture, trained.model

    def build(beside: Path) -> nn.Module:
        with torch.device("meta"):  # dense tables may be far larger than the file: never allocate them
            return architecture.build() if has_own_layers(trained.config.method) else architecture.dense(beside)

    if target not in FORMATS:
        raise ConfigError(f"expected one of {', '.join(FORMATS)} to export to, got {target!r}")
    inputs, files = architecture.inputs, architecture.files
    if target != "safetensors":
        export = export_program if target == "program" else export_onnx
        shapes = architecture.dynamic
        return export(model, inputs, folder, dynamic_shapes=shapes, dense=dense, files=files, overwrite=overwrite)
    if dense:
        return export_dense(model, inputs, folder, architecture.dense, files=files, overwrite=overwrite)
    about = {"recipe": trained.recipe, "method": trained.config.method, "checkpoint": trained.checkpoint.name}
    metadata = {**about, **architecture.about}
    return export_compressed(model, inputs, folder, build, metadata=metadata, files=files, overwrite=overwrite)
