"""The one table of optimizers by name: how each is made for a model, and what it keeps.

A new one needs a line in `OPTIMIZERS`; options, training, estimates and plans follow.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from comera.errors import ConfigError
from comera.optim.adamw import AdamW
from comera.optim.muon import Muon, orthogonal_parameters
from comera.optim.param_groups import param_groups
from comera.optim.smmf import SMMF, state_bytes


@dataclass(frozen=True)
class Rates:
    """What every optimizer is made with: rates as for `comera.param_groups`, and Adam's betas."""

    lr: float = 1e-3
    rates: Literal["flat", "spectral"] = "spectral"
    core_lr: float | None = None
    table_lr: float | None = None
    rank_lr: float | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)

    @classmethod
    def of(cls, config: Any) -> "Rates":
        """Those fields of a configuration."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    def groups(self, model: nn.Module, *, spectral: bool = True) -> list[dict[str, Any]]:
        """`comera.param_groups` of a model. spectral: whether the rule of that name, one for Adam's steps, may hold."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "betas"}
        return param_groups(model, **(given if spectral else {**given, "rates": "flat"}))


class NamedOptimizer(NamedTuple):
    """make: the optimizer of a model. state: of a model, the bytes of each tensor that it keeps, but for step counts.
    counts_steps: whether it has one for each parameter. sparse: whether it supports sparse gradients."""

    make: Callable[[nn.Module, Rates], Optimizer]
    state: Callable[[nn.Module], list[int]]
    counts_steps: bool = True
    sparse: bool = False

    def state_of(self, model: nn.Module) -> tuple[list[int], int]:
        """Bytes of each tensor that it keeps for a model, and of all step counts."""
        return self.state(model), 4 * len(_trained(model)) if self.counts_steps else 0


def optimizer_named(name: str) -> NamedOptimizer:
    """The optimizer of a name; ConfigError for an unknown one."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"expected an optimizer out of {', '.join(OPTIMIZERS)}, got {name!r}")
    return OPTIMIZERS[name]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _moments(count: int) -> Callable[[nn.Module], list[int]]:
    return lambda model: [p.nbytes for p in _trained(model) for _ in range(count)]


def _muon_state(model: nn.Module) -> list[int]:
    matrices = orthogonal_parameters(model)  # with one moment
    return [p.nbytes for p in _trained(model) for _ in range(1 if p in matrices else 2)]


def _adamw(model: nn.Module, rates: Rates) -> Optimizer:
    # Fused where torch takes the step: 2-3 times faster over dense weights on a CPU.
    return AdamW(rates.groups(model), betas=rates.betas, fused=not any(p.is_meta for p in model.parameters()))


def _muon(model: nn.Module, rates: Rates) -> Optimizer:
    return Muon(model, **{field.name: getattr(rates, field.name) for field in fields(rates)})


def _adagrad(model: nn.Module, rates: Rates) -> Optimizer:
    # This is the default, but torch warns when Adagrad makes sparse tensors and it was not set explicitly.
    torch.sparse.check_sparse_tensor_invariants.disable()
    return torch.optim.Adagrad(_split_by_fused(rates.groups(model, spectral=False), model))


def _split_by_fused(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """The same groups, each split into parameters with dense gradients, which are fused, and with sparse ones."""
    sparse = {table.get_parameter("weight") for table in model.modules() if getattr(table, "sparse", False)}
    split = []
    for group in groups:
        for fused in (True, False):
            members = [p for p in group["params"] if (p not in sparse and p.device.type in ("cpu", "cuda")) == fused]
            if members:
                split.append({**group, "params": members, "fused": fused})
    return split


def _contributed(name: str) -> NamedOptimizer:
    """AdamW on projected gradients, from a room that nothing here imports before its name is chosen."""

    def kind() -> Any:
        return getattr(import_module("comera.contrib"), name)

    def state(model: nn.Module) -> list[int]:
        made = kind()(param_groups(model, lr=0.0, rates="flat"))
        return [made.moment_bytes(p) for p in _trained(model)]

    return NamedOptimizer(lambda model, rates: kind()(rates.groups(model), betas=rates.betas), state)


OPTIMIZERS: Mapping[str, NamedOptimizer] = {
    "adamw": NamedOptimizer(_adamw, _moments(2)),
    "muon": NamedOptimizer(_muon, _muon_state),
    "smmf": NamedOptimizer(
        lambda model, rates: SMMF(rates.groups(model)), lambda model: [state_bytes(p.numel()) for p in _trained(model)]
    ),
    "adarankgrad": _contributed("AdaRankGrad"),
    "tensor_galore": _contributed("TensorGaLore"),
    "adagrad": NamedOptimizer(_adagrad, _moments(1), sparse=True),
    "sgd": NamedOptimizer(
        lambda model, rates: torch.optim.SGD(rates.groups(model, spectral=False)),
        _moments(0),
        counts_steps=False,
        sparse=True,
    ),
    "momentum": NamedOptimizer(
        lambda model, rates: torch.optim.SGD(rates.groups(model, spectral=False), momentum=0.9),
        _moments(1),
        counts_steps=False,
    ),
}
"""Every optimizer by name."""

if TYPE_CHECKING:  # a type that depends on values is none for them
    OptimizerName: TypeAlias = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]
