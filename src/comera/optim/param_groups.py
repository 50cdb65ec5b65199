"""Parameter groups for any torch optimizer, with a learning rate for each role of a parameter."""

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
    """Parameter groups for any torch optimizer, by the role of each parameter.

    | group            | parameters                                     | rate                    | decayed |
    |------------------|------------------------------------------------|-------------------------|---------|
    | "cores"          | cores of tensor trains                         | `core_lr`               | yes     |
    | "tables"         | cores of TT-matrices, as in embedding tables   | `table_lr`              | yes     |
    | "ranks"          | gates (`rank_params`)                          | `rank_lr`               | never   |
    | "dense"          | other parameters with two dimensions or more   | `lr`                    | yes     |
    | "dense_no_decay" | biases and norms                               | `lr`                    | never   |

    A parameter's group follows from the module that owns it, not from its name. Each trainable parameter is in exactly
    one group, even if it is tied. Empty groups are omitted.

    Weight decay acts once per weight: W is a product of its cores, so each of n trainable cores gets 1/n of it. Tensor
    trains of different n are in groups of their own, with the same name.

    Gates are never decayed, because the size objective alone pulls them down. Tables want a rate of their own, two to
    ten times `core_lr`. Under Adam, a row of a dense table moves by some 30 times the rate each time its token occurs,
    because the second moment decays in between. A compressed row has no entries of its own: every token in every step
    updates its cores.

    Args:
        model: any module, compressed or not.
        lr: learning rate of the dense parameters.
        core_lr: default `lr`.
        table_lr: default `core_lr`.
        rank_lr: default `lr`.
        weight_decay: of each weight in the groups that are decayed, dense or a tensor train.

    Returns:
        Dictionaries with "name", "params", "lr" and "weight_decay", for an optimizer's constructor.

    Raises:
        ConfigError: a rate that is negative or not finite, or a model without trainable parameters.

    Example:
        >>> import comera, torch
        >>> from torch.nn import Embedding, LayerNorm, Linear, Sequential
        >>> model = Sequential(Embedding(1000, 256), Linear(256, 256), LayerNorm(256))
        >>> _ = comera.tensorize_(model)
        >>> groups = comera.param_groups(model, lr=1e-3, core_lr=5e-3, weight_decay=0.012)
        >>> [(group["name"], group["lr"], group["weight_decay"]) for group in groups]
        [('cores', 0.005, 0.002), ('tables', 0.005, 0.003), ('ranks', 0.001, 0.0), ('dense_no_decay', 0.001, 0.0)]
        >>> optimizer = torch.optim.AdamW(groups)

    Source: docs/method.md §9.
    """
    core_lr, rank_lr = lr if core_lr is None else core_lr, lr if rank_lr is None else rank_lr
    table_lr = core_lr if table_lr is None else table_lr
    rates = {"lr": lr, "core_lr": core_lr, "table_lr": table_lr, "rank_lr": rank_lr, "weight_decay": weight_decay}
    for name, value in rates.items():
        if not isfinite(value) or value < 0:
            raise ConfigError(f"{name} must be a finite number >= 0, got {value}")

    roles: dict[nn.Parameter, tuple[str, float]] = {}  # name of the group, weight decay
    for _, train in named_trains(model):
        share = weight_decay / max(1, sum(core.requires_grad for core in train.cores))
        roles |= dict.fromkeys(train.cores, ("tables" if isinstance(train.spec, TTMSpec) else "cores", share))
        roles |= dict.fromkeys(train.rank_params, ("ranks", 0.0))
    rate_of = {"cores": core_lr, "tables": table_lr, "ranks": rank_lr, "dense": lr, "dense_no_decay": lr}
    members: dict[tuple[str, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            role = ("dense", weight_decay) if parameter.ndim >= 2 else ("dense_no_decay", 0.0)
            members.setdefault(roles.get(parameter, role), []).append(parameter)
    if not members:
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameter (all have requires_grad=False, or there are none): "
            "unfreeze the parameters to train"
        )
    return [
        {"name": name, "params": members[name, decay], "lr": rate, "weight_decay": decay}
        for name, rate in rate_of.items()
        for decay in sorted(decay for each, decay in members if each == name)
    ]
