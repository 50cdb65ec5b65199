"""Parameter groups for any torch optimizer: a learning rate for each kind of parameter."""

from __future__ import annotations

from math import isfinite
from typing import Any

from torch import nn

from comera.errors import ConfigError
from comera.nn.tensor_train import named_trains
from comera.tt.spec import TTMSpec


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    core_lr: float | None = None,
    table_lr: float | None = None,
    rank_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Groups for an optimizer's constructor, each with its "name", "lr" and "weight_decay".

    "cores": `core_lr` (`lr` if left out), decayed. "tables": cores of tensor-train matrices, `table_lr` (`core_lr`),
    decayed. "ranks": `rank_lr` (`lr`), never decayed: the size objective alone pulls them down. "dense": other
    parameters of two dimensions or more, decayed. "dense_no_decay": biases and norms.

    Tables want a rate of their own, two to ten times `core_lr`: under Adam a row of a dense table moves by some 30
    times the rate each time its token comes, since the second moment forgets it between; a compressed row has no
    entries of its own, its cores are met by every token in every step.

    A parameter's group follows from the chain that owns it, whatever its name; each trainable parameter is in one
    group once, tied or not; empty groups are left out.
    Raises ConfigError for a negative value or a model without trainable parameters.
    """
    core_lr, rank_lr = lr if core_lr is None else core_lr, lr if rank_lr is None else rank_lr
    table_lr = core_lr if table_lr is None else table_lr
    rates = {"lr": lr, "core_lr": core_lr, "table_lr": table_lr, "rank_lr": rank_lr, "weight_decay": weight_decay}
    for name, value in rates.items():
        if not isfinite(value) or value < 0:
            raise ConfigError(f"{name} must be a finite number >= 0, got {value}")

    trains = [train for _, train in named_trains(model)]
    cores = {core for train in trains for core in train.cores}
    tables = {core for train in trains if isinstance(train.spec, TTMSpec) for core in train.cores}
    ranks = {d for train in trains for d in train.rank_params}
    kinds = ("cores", "tables", "ranks", "dense", "dense_no_decay")
    members: dict[str, list[nn.Parameter]] = {kind: [] for kind in kinds}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter in tables:
            kind = "tables"
        elif parameter in cores:
            kind = "cores"
        elif parameter in ranks:
            kind = "ranks"
        else:
            kind = "dense" if parameter.ndim >= 2 else "dense_no_decay"
        members[kind].append(parameter)
    if not any(members.values()):
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameter (all have requires_grad=False, or there are none): "
            "unfreeze what is to be trained"
        )
    settings = {
        "cores": (core_lr, weight_decay),
        "tables": (table_lr, weight_decay),
        "ranks": (rank_lr, 0.0),
        "dense": (lr, weight_decay),
        "dense_no_decay": (lr, 0.0),
    }
    return [
        {"name": name, "params": parameters, "lr": settings[name][0], "weight_decay": settings[name][1]}
        for name, parameters in members.items()
        if parameters
    ]
