"""The size that a user names: a part of the present one, numbers, or bytes."""

from __future__ import annotations

import re

from torch import nn

from comera.errors import RankError
from comera.nn.tensor_train import named_trains
from comera.tt.spec import Spec

_UNITS = {"b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BYTES = re.compile(r"\s*(\d{1,15}(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def spec_size(spec: Spec) -> int:
    """Numbers that a chain of `spec` stores: its cores and rank parameters."""
    return spec.numel + spec.rank_numel


def smallest_size(model: nn.Module, *, multiple: int = 1) -> int:
    """Numbers that the model's chains store with all bonds at rank 1, or at `multiple` where they have more.

    A chain with an empty bond stands for zero and stores nothing in the end; one of order 1 has no bonds to cut.
    """
    specs = [train.spec for _, train in named_trains(model)]
    smallest = [spec.with_ranks((1, *(min(rank, multiple) for rank in spec.inner_ranks), 1)) for spec in specs]
    return sum(spec_size(spec) for spec in smallest if all(spec.inner_ranks))


def check_multiple(multiple: int) -> None:
    """Raise RankError unless ranks can be kept at multiples of it."""
    if multiple < 1:
        raise RankError(f"multiple: expected ranks at multiples of 1 or more, got {multiple}")


def resolve_target(target: float | int | str, *, size: int, smallest: int, bytes_per_number: float, where: str) -> int:
    """The target in numbers stored.

    target: a float in (0, 1], part of `size`; an integer, numbers; a text such as "1.5MB", bytes (1 MB = 2^20).
    where: what the target is called, for the error.
    Raises RankError for anything else, and for a target above `size` or below `smallest`.
    """
    if isinstance(target, str):
        found = _BYTES.fullmatch(target)
        unit = _UNITS.get(found[2].lower()) if found else None
        if found is None or unit is None:
            raise RankError(f"{where}: expected bytes such as '1.5MB' or '700 kB', got {target!r}")
        numbers = int(float(found[1]) * unit / (bytes_per_number or 1.0))  # 0 where no chain stores anything
    elif isinstance(target, bool) or not isinstance(target, float | int) or not target > 0:
        raise RankError(f"{where}: expected a part such as 0.2, numbers such as 350000 or '1.5MB', got {target!r}")
    elif isinstance(target, float):
        if target > 1:
            raise RankError(f"{where}: a float is a part of the size, in (0, 1], got {target}; numbers are integers")
        numbers = int(target * size)
    else:
        numbers = target
    if numbers > size:
        raise RankError(
            f"{where}: expected at most the present {size:,} numbers of the tensorized layers "
            f"({size * bytes_per_number / 2**20:.2f} MB), got {target!r} = {numbers:,}: ranks only fall"
        )
    if numbers < smallest:
        raise RankError(
            f"{where}: {target!r} = {numbers:,} numbers is below the smallest possible, {smallest:,} "
            f"({smallest * bytes_per_number / 2**20:.3f} MB), which all bonds at their least rank take"
        )
    return numbers
