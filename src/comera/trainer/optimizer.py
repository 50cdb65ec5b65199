"""The optimizer of a configuration, and the learning-rate schedule as a pure function."""

from math import cos, pi
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from comera.errors import ConfigError
from comera.optim.names import Rates, optimizer_named
from comera.trainer.config import TrainConfig


def named_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """The optimizer of a configuration, at its rates, over `param_groups`."""
    return optimizer_named(config.optimizer).make(model, Rates.of(config))


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
