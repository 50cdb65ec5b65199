"""Whether an optimizer trains tensor trains at rates of their own, which trainers and schedules overwrite."""

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from comera.nn.tensor_train import named_trains
from comera.rank.optimizer_state import unwrap


def warn_of_rates(model: nn.Module, optimizers: Iterable[Optimizer]) -> bool:
    """Warn of rates and weight decay that are not those of `comera.param_groups`; returns whether there were any."""
    trains = [train for _, train in named_trains(model)]
    cores = {core for train in trains for core in train.cores}
    gates = {d for train in trains for d in train.rank_params}
    groups = [(group, set(group["params"])) for each in optimizers for group in unwrap(each).param_groups]
    faults = ["decays gates, which pulls all ranks down whatever they are worth"] * any(
        group.get("weight_decay") and held & gates for group, held in groups
    )
    if any(group.get("name") not in ("cores", "tables") and held & cores for group, held in groups):
        faults.append("has no rates of their own for cores, which need others than dense weights")
    if faults:
        warnings.warn(
            f"the optimizer {' and '.join(faults)}: give the trainer one of "
            "comera.param_groups(model, lr=..., weight_decay=...)",
            stacklevel=3,
        )
    bases = [_base(group) / group["times"] for group, _ in groups if group.get("times")]
    overwritten = bool(bases) and max(bases) > 1.001 * min(bases)
    if overwritten:
        warnings.warn(
            "a schedule has overwritten the rates of comera.param_groups, which differ by group: use one that scales "
            "each group's rate (LambdaLR, CosineAnnealingLR), or give it a rate for each, as "
            'OneCycleLR(optimizer, max_lr=[group["lr"] for group in optimizer.param_groups], ...) and '
            "StochasticWeightAveraging(swa_lrs=[...]) take them",
            stacklevel=3,
        )
    return bool(faults) or overwritten


def _base(group: dict[str, Any]) -> float:
    """The rate of a group before its schedule."""
    return float(group.get("initial_lr", group["lr"]))
