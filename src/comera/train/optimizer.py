"""Parameter groups for any torch optimizer, a run's own one, and the learning-rate schedule as a pure function."""

from __future__ import annotations

from math import cos, isfinite, pi
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from comera.errors import ConfigError
from comera.nn.bonds import named_trains
from comera.train.adamw import AdamW
from comera.train.config import TrainConfig
from comera.train.task import Task
from comera.tt.spec import TTMSpec

OptimizerName = Literal["adamw", "adagrad", "sgd"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)


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


def make_optimizer(task: Task, config: TrainConfig) -> Optimizer:
    """The task's own optimizer, or fused AdamW over `param_groups`; every group has a "name" then."""
    own = getattr(task, "optimizer", None)
    if own is not None:
        optimizer: Optimizer = own(config)
        for k, group in enumerate(optimizer.param_groups):
            group.setdefault("name", f"group_{k}")
        return optimizer
    return named_optimizer("adamw", task.model, config)


def named_optimizer(name: OptimizerName, model: nn.Module, config: TrainConfig) -> Optimizer:
    """One optimizer over `param_groups` at the configuration's rates; Adagrad and SGD take sparse gradients too."""
    groups = param_groups(
        model,
        lr=config.lr,
        core_lr=config.core_lr,
        table_lr=config.table_lr,
        rank_lr=config.rank_lr,
        weight_decay=config.weight_decay,
    )
    if name == "adamw":
        # Fused where torch takes the step: on CPU 2-3 times faster over dense weights.
        return AdamW(groups, betas=config.betas, fused=True)
    if name == "adagrad":
        # As it is by default, but said aloud: Adagrad makes sparse tensors, and torch warns of what is left unsaid.
        torch.sparse.check_sparse_tensor_invariants.disable()
        return torch.optim.Adagrad(_fused_apart(groups, model))
    return torch.optim.SGD(groups)


def _fused_apart(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """The same groups, those with parameters of sparse and of dense gradients in two, of which the latter is fused."""
    sparse = {table.get_parameter("weight") for table in model.modules() if getattr(table, "sparse", False)}
    apart = []
    for group in groups:
        for fused in (True, False):
            members = [p for p in group["params"] if (p not in sparse and p.device.type in ("cpu", "cuda")) == fused]
            if members:
                apart.append({**group, "params": members, "fused": fused})
    return apart


def lr_multiplier(
    progress: float, *, warmup: float, schedule: Literal["cosine", "linear", "constant"], final: float
) -> float:
    """What to multiply each group's learning rate by at `progress`, the part of training that is done.

    progress: steps done per steps, or time per budget; clamped to [0, 1]. warmup: the part, in [0, 1), over which the
    multiplier rises linearly from 0 to 1. Then it falls to `final`, in [0, 1], along a half cosine or a line;
    "constant" stays at 1. Raises ConfigError for values out of range.
    """
    if not 0 <= warmup < 1:
        raise ConfigError(f"warmup must be a part of training, 0 <= warmup < 1, got {warmup}")
    if not 0 <= final <= 1:
        raise ConfigError(f"final must be a multiplier from 0 to 1, got {final}")
    if schedule not in ("cosine", "linear", "constant"):
        raise ConfigError(f"schedule must be 'cosine', 'linear' or 'constant', got {schedule!r}")
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    done = (progress - warmup) / (1 - warmup)
    falls = {"cosine": (1 - cos(pi * done)) / 2, "linear": done, "constant": 0.0}
    return 1 - (1 - final) * falls[schedule]
