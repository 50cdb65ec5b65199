"""What `comera export` does with a trained run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from comera.baselines import has_own_layers
from comera.errors import ConfigError
from comera.export.write import Exported, export_compressed, export_dense, export_program
from comera.recipes.trained import Trained

TARGETS = ("safetensors", "dense", "program", "onnx")


def export_run(trained: Trained, target: str, out: Path, *, overwrite: bool = False) -> Exported:
    """Write the model of a run to `out` as one of TARGETS; what is raised: see `comera.export`."""
    form, model = trained.architecture, trained.model

    def as_trained(folder: Path) -> nn.Module:
        with torch.device("meta"):  # a dense table that is far larger than the file never exists
            return form.build() if has_own_layers(trained.config.method) else form.dense(folder)

    if target == "safetensors":
        about = {"recipe": trained.recipe, "method": trained.config.method, "checkpoint": trained.checkpoint.name}
        metadata = {**about, **form.about}
        return export_compressed(model, form.inputs, out, as_trained, metadata=metadata, overwrite=overwrite)
    if target == "dense":
        return export_dense(model, form.inputs, out, form.dense, overwrite=overwrite)
    if target == "program":
        return export_program(model, form.inputs, out, dynamic_shapes=form.dynamic, overwrite=overwrite)
    if target == "onnx":
        raise ConfigError(
            "expected safetensors, dense or program, got onnx: that takes the package onnxscript, which does not come "
            "with this library; with it installed, export the run to a program, and write that with "
            'torch.onnx.export(torch.export.load("FILE.pt2"), f="FILE.onnx", dynamo=True)'
        )
    raise ConfigError(f"expected one of {', '.join(TARGETS)} to export to, got {target!r}")
