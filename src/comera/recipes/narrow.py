"""The method narrow in the recipes, and methods that add to it: the dense model with so few channels that a step costs
no more than a compressed one's. `config`: of a recipe, with the fields `method`, `baselines` and `model`, whose sizes
have `narrowed(hidden)`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from comera.baselines import Narrow, widest


def settings(config: Any) -> Narrow | None:
    """Those of the method, if it is narrow or adds to it."""
    own = getattr(config.baselines, config.method, None)
    return own if isinstance(own, Narrow) else None


def width_name(method: str) -> str:
    """The width's name in a run's identity."""
    return f"baselines.{method}.hidden"


def sizes(config: Any, flops: Callable[[Any], float]) -> Any:
    """The sizes of the model that is trained: those of `config.model`, for narrow of fewer channels: as set by hand, or
    as many as cost no more than the compressed model on the same batch. flops: of a training step, for a config."""
    own = settings(config)
    if own is None:
        return config.model
    hidden = own.hidden
    if hidden is None:
        limit = flops(replace(config, method="comera"))

        def dense(width: int) -> float:
            return flops(replace(config, method="dense", model=config.model.narrowed(width)))

        hidden = widest(limit, dense)
    return config.model.narrowed(hidden)


def note(task: Any, width: int | None, whole: Callable[[], nn.Module]) -> None:
    """Set what the method narrow decides of a task, none for other methods: its width, under which alone a run resumes,
    and the parameters of the dense model `whole`, which is made on the meta device."""
    if settings(task.config) is not None:
        with torch.device("meta"):
            task.dense_total = sum(p.numel() for p in whole().parameters())
        task.identity[width_name(task.method)] = width


def about(task: Any) -> list[str]:
    """What became of the model, in lines to print: none for other methods."""
    if settings(task.config) is None:
        return []
    width = task.identity[width_name(task.method)]
    return [f"{task.method}: dense and {width} wide instead of {task.config.model.hidden}"]


def as_begun(config: Any, identity: Mapping[str, Any]) -> Any:
    """`config`, for narrow with the width that was chosen when the run started."""
    own = settings(config)
    if own is None:
        return config
    as_it_was = replace(own, hidden=identity[width_name(config.method)])
    return replace(config, baselines=replace(config.baselines, **{config.method: as_it_was}))
