"""Optimizers by name, and the learning-rate schedule as a pure function."""

from math import cos, pi
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from comera.errors import ConfigError
from comera.optim.adamw import AdamW
from comera.optim.muon import Muon
from comera.optim.param_groups import param_groups
from comera.optim.projected import AdaRankGrad, TensorGaLore
from comera.optim.smmf import SMMF
from comera.trainer.config import TrainConfig

PROJECTED: dict[str, type[AdaRankGrad | TensorGaLore]] = {"adarankgrad": AdaRankGrad, "tensor_galore": TensorGaLore}


def named_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """The optimizer of a configuration, at its rates, over `param_groups`."""
    rates = {name: getattr(config, name) for name in ("lr", "core_lr", "table_lr", "rank_lr", "weight_decay")}
    if config.optimizer == "muon":
        return Muon(model, rates=config.rates, betas=config.betas, **rates)
    # the spectral rule is one for Adam's steps
    as_adam = config.optimizer not in ("adagrad", "sgd")
    groups = param_groups(model, rates=config.rates if as_adam else "flat", **rates)
    if config.optimizer == "smmf":
        return SMMF(groups)
    if config.optimizer in PROJECTED:
        return PROJECTED[config.optimizer](groups, betas=config.betas)
    if config.optimizer == "adamw":
        # Fused where torch takes the step: 2-3 times faster over dense weights on a CPU.
        return AdamW(groups, betas=config.betas, fused=True)
    if config.optimizer == "adagrad":
        # This is the default, but torch warns when Adagrad makes sparse tensors and it was not set explicitly.
        torch.sparse.check_sparse_tensor_invariants.disable()
        return torch.optim.Adagrad(_split_by_fused(groups, model))
    return torch.optim.SGD(groups)


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


def lr_multiplier(
    progress: float, *, warmup: float, schedule: Literal["cosine", "linear", "constant"], final: float
) -> float:
    """The multiplier of the peak learning rates at `progress`, the fraction of training that is done.

    progress: clamped to [0, 1]. warmup: the fraction, in [0, 1), over which it rises linearly from 0 to 1.
    Then it falls to `final`, in [0, 1], along half a cosine or a line; "constant" stays at 1.
    Raises ConfigError for values out of range.
    """
    if not 0 <= warmup < 1:
        raise ConfigError(f"warmup must be a fraction of training, 0 <= warmup < 1, got {warmup}")
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
