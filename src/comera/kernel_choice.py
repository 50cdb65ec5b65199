"""Which optional kernels may take work, by COMERA_KERNELS: "all", "none", or names by commas."""

from __future__ import annotations

import os
from functools import lru_cache

from comera.errors import ConfigError

TRITON = ("two_sided", "rows")
NATIVE = ("two_sided", "feed_forward", "attention", "residual", "merge", "gradients", "adamw", "memory")
NAMES = tuple(dict.fromkeys((*TRITON, *NATIVE)))


def asked(kernel: str) -> bool | None:
    """Whether the user asks for `kernel`, a name in NAMES; None where the user leaves the choice to the measurements.

    Raises ConfigError when COMERA_KERNELS names an unknown kernel.
    """
    names = _names(os.environ.get("COMERA_KERNELS", ""))
    return None if names is None else kernel in names


@lru_cache(maxsize=8)
def _names(setting: str) -> frozenset[str] | None:
    if not setting:
        return None
    names = frozenset({"all": NAMES, "none": ()}.get(setting, tuple(setting.split(","))))
    if not names <= set(NAMES):
        raise ConfigError(f"expected COMERA_KERNELS to be all, none or some of {', '.join(NAMES)}; got {setting!r}")
    return names
