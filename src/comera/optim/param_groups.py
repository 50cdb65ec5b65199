"""Parameter groups for any torch optimizer, with a learning rate for each role of a parameter."""

from collections.abc import Callable
from math import isfinite
from statistics import fmean
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from comera.distributed import check_whole
from comera.errors import ConfigError, check_module
from comera.nn.embedding import TTMProjection
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.optim.core_rates import ADAM, Reach, core_rates
from comera.tt.ngram import NGramSpec
from comera.tt.spec import TTMSpec

_NAMES = ("cores", "tables", "ranks", "dense", "dense_no_decay")


class _Role(NamedTuple):
    """What the members of a group have in common.

    core: the last part of its layer's name, the size of its weight and its number, of a core whose rate follows from
    the dense one. These stay when ranks fall and values change, so that an optimizer made anew can load its state.
    """

    name: str
    weight_decay: float
    core: tuple[object, ...] = ()


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    rates: Literal["flat", "spectral"] = "spectral",
    core_lr: float | None = None,
    table_lr: float | None = None,
    rank_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimizer, by the role of each parameter.

    | group            | parameters                                     | rate                       | decayed |
    |------------------|------------------------------------------------|----------------------------|---------|
    | "cores"          | cores of tensor trains, P of n-gram tables     | `core_lr`, or by `rates`   | yes     |
    | "tables"         | cores of TT-matrices, as in embedding tables,  | `table_lr`, or by `rates`  | yes     |
    |                  | and of n-gram tables                           |                            |         |
    | "ranks"          | gates (`rank_params`)                          | `lr`                       | never   |
    | "dense"          | other parameters with two dimensions or more   | `lr`                       | yes     |
    | "dense_no_decay" | biases and norms                               | `lr`                       | never   |

    One rate is enough: that of the dense model. With `rates="spectral"` a core gets the rate at which it moves its
    weight as far, in spectral norm, as that rate moves a dense weight (under Adam; `core_rates`). Cores of layers of
    the same size and the same name in their blocks ("q_proj") share the mean of their rates, and a group; weights of
    zeros, of which nothing can be measured, are not in that mean, and have the rate `lr` where there are no others.
    Which group a parameter is in does not change when ranks fall, so an optimizer made anew can load its state. Each
    trainable parameter is in exactly one group, even if it is tied. Empty groups are omitted.

    Weight decay acts once per weight: W is a product of its cores, so each of n trainable cores gets 1/n of it. Gates
    are never decayed, because the size objective alone pulls them down.

    Args:
        model: any module, compressed or not. The rates follow from its cores as they are now.
        lr: learning rate of the dense parameters.
        rates: what the rates of cores are where none is given: "spectral", as above, or "flat", `lr` itself.
        core_lr: one rate for all cores of linear layers.
        table_lr: one rate for all cores of tables; default `core_lr` if that is given.
        rank_lr: one rate for the gates; default `lr`.
        weight_decay: of each weight in the groups that are decayed, dense or a tensor train.

    Returns:
        Dictionaries with "name", "params", "lr" and "weight_decay", for an optimizer's constructor; where a rate
        follows from the dense one, also with "times", how many times that it is.

    Raises:
        ConfigError: a rate that is negative or not finite, another rule, or a model without trainable parameters.
        RankError: a process does not hold all of a tensor train (FSDP).

    Example:
        >>> import comera, torch
        >>> from torch.nn import Embedding, LayerNorm, Linear, Sequential
        >>> model = Sequential(Embedding(1000, 256), Linear(256, 256), LayerNorm(256))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.BTT(rank=2), comera.TTM(order=2, rank=8)))
        >>> optimizer = torch.optim.AdamW(comera.param_groups(model, lr=1e-3))
        >>> [group["name"] for group in optimizer.param_groups]
        ['cores', 'cores', 'tables', 'tables', 'ranks', 'dense_no_decay']
        >>> groups = comera.param_groups(model, lr=1e-3, core_lr=5e-3, weight_decay=0.012)
        >>> [(group["name"], group["lr"], group["weight_decay"]) for group in groups]
        [('cores', 0.005, 0.006), ('tables', 0.005, 0.006), ('ranks', 0.001, 0.0), ('dense_no_decay', 0.001, 0.0)]

    Source: docs/method.md §9.
    """
    return groups_for(model, lambda train: ADAM, lr, rates, core_lr, table_lr, rank_lr, weight_decay)


def groups_for(
    model: nn.Module,
    reach_of: Callable[[TensorTrain], Reach],
    lr: float,
    rates: Literal["flat", "spectral"],
    core_lr: float | None,
    table_lr: float | None,
    rank_lr: float | None,
    weight_decay: float,
) -> list[dict[str, Any]]:
    """`param_groups` for an optimizer whose steps have a reach of their own for each tensor train (`core_rates`)."""
    check_module(model)
    values = {"lr": lr, "core_lr": core_lr, "table_lr": table_lr, "rank_lr": rank_lr, "weight_decay": weight_decay}
    for name, value in values.items():
        if value is not None and (not isfinite(value) or value < 0):
            raise ConfigError(f"{name} must be a finite number >= 0, got {value}")
    if rates not in ("flat", "spectral"):
        raise ConfigError(f"rates must be 'flat' or 'spectral', got {rates!r}")
    core_lr = lr if core_lr is None and rates == "flat" else core_lr
    given = {"cores": core_lr, "tables": core_lr if table_lr is None else table_lr}

    roles: dict[nn.Parameter, _Role] = {}
    lrs = {_Role("ranks", 0.0): lr if rank_lr is None else rank_lr}
    measured: dict[_Role, list[float]] = {}
    heads = {module.tt for module in model.modules() if isinstance(module, TTMProjection)}
    for path, train in named_trains(model):
        check_whole(train.tensors[0])
        share = weight_decay / max(1, sum(core.requires_grad for core in train.cores))
        reach = reach_of(train)
        names = path.split(".")[: -1 if train.starts_at_zero else None]  # of an adapter: that of its layer
        linear = set(linear_cores(train))
        kinds = ["cores" if core in linear else "tables" for core in train.cores]
        asked = any(given[name] is None for name in kinds)
        multiples = core_rates(train, reach, logits=train in heads) if asked else None
        for k, (core, name) in enumerate(zip(train.cores, kinds, strict=True)):
            rate = given[name]
            place = 0 if name == "tables" and isinstance(train.spec, NGramSpec) else k  # all of one rate
            own = (names[-2:][0], train.spec.padded_shape, place, reach)
            role = _Role(name, share, () if rate is not None else own)
            roles[core] = role
            if rate is not None:
                lrs[role] = rate
            elif multiples is not None:
                measured.setdefault(role, []).append(lr * multiples[k])
        roles |= dict.fromkeys(train.rank_params, _Role("ranks", 0.0))
    lrs |= {role: fmean(each) for role, each in measured.items()}

    def decay(role: _Role) -> float:
        """AdamW multiplies it by the group's own rate: where that follows from the dense one, this makes up for it."""
        rate = lrs.get(role, lr)
        return role.weight_decay * lr / rate if role.core and rate else role.weight_decay

    members: dict[_Role, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            role = _Role("dense", weight_decay) if parameter.ndim >= 2 else _Role("dense_no_decay", 0.0)
            members.setdefault(roles.get(parameter, role), []).append(parameter)
    if not members:
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameter (all have requires_grad=False, or there are none): "
            "unfreeze the parameters to train"
        )
    ordered = sorted(members, key=lambda role: (_NAMES.index(role.name), role.weight_decay))
    groups: list[dict[str, Any]] = []
    for role in ordered:
        rate = lrs.get(role, lr)
        groups.append({"name": role.name, "params": members[role], "lr": rate, "weight_decay": decay(role)})
        if role.core and lr:
            groups[-1]["times"] = rate / lr
    return groups


def linear_cores(train: TensorTrain) -> list[Tensor]:
    """The cores that multiply what a layer is given; the others are looked up by ids."""
    cores, _ = train.tensors
    if isinstance(train.spec, NGramSpec):
        return cores[-1:]
    return [] if isinstance(train.spec, TTMSpec) else cores
