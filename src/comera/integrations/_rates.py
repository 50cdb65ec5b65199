"""Whether an optimizer trains tensor trains at rates of their own, and how one that has a single rate does."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from comera.nn.tensor_train import named_trains
from comera.optim.param_groups import param_groups
from comera.rank.optimizer_state import unwrap

Rate = tuple[float, float]
"""Of a core or gates: its rate and its weight decay, as multiples of those of a dense weight."""
_OF_TRAINS = ("cores", "tables", "ranks")


def warn_of_rates(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Warn of rates and weight decay that are not those of `comera.param_groups`."""
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


def measured_rates(model: nn.Module) -> dict[str, Rate]:
    """The rates of `comera.param_groups` by the names of cores and gates, JSON-ready."""
    groups = [group for group in param_groups(model, lr=1.0, weight_decay=1.0) if group["name"] in _OF_TRAINS]
    rates = {p: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: rates[p] for name, p in model.named_parameters() if p in rates}


class StepRates:
    """Lets the steps of an optimizer see groups with the rates of tensor trains, which follow from its own groups.

    Between steps its groups are those that it was made with, so that a schedule finds the base rates that it was made
    for, and a checkpoint loads into an optimizer that is made alike.

    optimizer: not a wrapper, and one that keeps nothing in its groups. rates: of parameters that have their own.
    """

    def __init__(self, optimizer: Optimizer, rates: Mapping[Tensor, Rate]) -> None:
        self._rates = rates
        self._own = self._split = optimizer.param_groups
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer.param_groups is not self._split:  # it is where the last step failed
            self._own = optimizer.param_groups
        self._split = [part for group in self._own for part in self._parts(group)]
        optimizer.param_groups = self._split

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        optimizer.param_groups = self._own

    def _parts(self, group: dict[str, Any]) -> Iterable[dict[str, Any]]:
        members: dict[Rate, list[Tensor]] = {}
        for parameter in group["params"]:
            members.setdefault(self._rates.get(parameter, (1.0, 1.0)), []).append(parameter)
        for (rate, decay), held in members.items():
            own = {"params": held, "lr": group["lr"] * rate, "weight_decay": group["weight_decay"] * decay}
            yield {**group, **own}
