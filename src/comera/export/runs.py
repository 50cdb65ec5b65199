"""Exports the model of a trained run."""

from pathlib import Path

import torch
from torch import nn

from comera.baselines import has_own_layers
from comera.errors import ConfigError
from comera.export.write import Exported, export_compressed, export_dense, export_program
from comera.recipes.trained import Trained

_TARGETS = ("safetensors", "dense", "program")


def export_run(trained: Trained, target: str, out: Path, *, overwrite: bool = False) -> Exported:
    """Write the model of a run to `out` as "safetensors", "dense" or "program"; raises as `comera.export` does."""
    architecture, model = trained.architecture, trained.model

    def build(folder: Path) -> nn.Module:
        with torch.device("meta"):  # dense tables may be far larger than the file: never allocate them
            return architecture.build() if has_own_layers(trained.config.method) else architecture.dense(folder)

    if target == "safetensors":
        about = {"recipe": trained.recipe, "method": trained.config.method, "checkpoint": trained.checkpoint.name}
        metadata = {**about, **architecture.about}
        return export_compressed(
            model, architecture.inputs, out, build, metadata=metadata, files=architecture.files, overwrite=overwrite
        )
    if target == "dense":
        return export_dense(
            model, architecture.inputs, out, architecture.dense, files=architecture.files, overwrite=overwrite
        )
    if target == "program":
        return export_program(model, architecture.inputs, out, dynamic_shapes=architecture.dynamic, overwrite=overwrite)
    raise ConfigError(f"expected one of {', '.join(_TARGETS)} to export to, got {target!r}")
