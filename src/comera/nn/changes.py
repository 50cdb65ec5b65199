"""Who wants to know when the tensor trains of a model become others.

A conversion tells so, and a late stage that begins: what is noted of tensor trains outside of them, as in the config of
a model, then follows. Neither knows who listens.
"""

from collections.abc import Callable

from torch import nn

_LISTENERS: list[Callable[[nn.Module], object]] = []


def when_converted(act: Callable[[nn.Module], object]) -> None:
    """Call `act` from now on with every model in which other layers are compressed, or whose late stage begins."""
    _LISTENERS.append(act)


def notify_conversion(model: nn.Module) -> None:
    """Tell those who asked for it by `when_converted` that a model has changed."""
    for act in _LISTENERS:
        act(model)
