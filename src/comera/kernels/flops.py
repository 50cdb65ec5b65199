"""FLOP formulas of our operations, given to torch's counters as soon as one counts them.

torch.utils.flop_counter imports triton, which takes longer than all of comera: this file waits until somebody else has
imported it. A counter copies the registered formulas when it is built, so one that is already counting gets them too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Formula = Callable[..., int]

_PENDING: dict[Any, Formula] = {}  # operation (torch.ops.comera.NAME) -> formula not yet known to torch


def flop_formula(operation: Any) -> Callable[[Formula], Formula]:
    """Decorate the formula of `operation`; its arguments are as for torch.utils.flop_counter.register_flop_formula."""

    def keep(formula: Formula) -> Formula:
        _PENDING[operation] = formula
        return formula

    return keep


def register_formulas() -> None:
    """Give all formulas to torch and to the counters that are counting; does nothing while no one can count."""
    counting = sys.modules.get("torch.utils.flop_counter")
    if not _PENDING or counting is None:
        return
    formulas = {operation: counting.register_flop_formula(operation)(f) for operation, f in _PENDING.items()}
    _PENDING.clear()
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, counting.FlopCounterMode):
            counter.flop_registry.update(formulas)
