"""Callbacks for changes of a model's tensor trains.

They run after a conversion, and when a late stage begins, and update what is recorded about tensor trains elsewhere,
such as in a model's config. So conversions need not know of these records.
"""

from collections.abc import Callable

from torch import nn

_LISTENERS: list[Callable[[nn.Module], object]] = []


def when_converted(act: Callable[[nn.Module], object]) -> None:
    """Register `act`, to be called with every model that is converted, or whose late stage begins."""
    _LISTENERS.append(act)


def notify_conversion(model: nn.Module) -> None:
    """Run all callbacks of `when_converted` on a model that has changed."""
    for act in _LISTENERS:
        act(model)
