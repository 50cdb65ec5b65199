"""Numbers formatted for people."""

import re
from collections.abc import Iterable
from math import floor, isfinite, log10, prod

from comera.tt.spec import BTTSpec, Spec

SHARES = ("accuracy", "f1")  # metrics that are given in percent
_LABELS = {"f1": "macro F1", "relative_l2": "relative L2 error"}  # of metrics whose name does not read well
MEGA = 2**20  # bytes per MB throughout this library, as in the published results


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, at most five decimals, no exponent; a dash for an unknown value."""
    if value is None or not isfinite(value):
        return "∞" if value == float("inf") else "–"
    before = floor(log10(abs(value))) + 1 if value else 1
    return f"{value:,.{min(5, max(0, digits - before))}f}"


def count(value: float) -> str:
    """A count in thousands, millions or billions."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= unit:
            return number(value / unit) + name
    return f"{value:.0f}"


def megabytes(value: float) -> str:
    """Bytes in MB, without the unit; a dash for 0, which means unknown."""
    return number(value / MEGA if value else None)


def times(value: float | None) -> str:
    """A ratio."""
    shown = number(value)
    return shown if shown == "–" else f"{shown}×"


def label(name: str) -> str:
    """The name of a metric for people, such as nats per byte."""
    return _LABELS.get(name, name.replace("_per_", " per "))


def metric(name: str, value: float | None, percent: str = "") -> str:
    """A metric; shares in percent, followed by the sign `percent`; nats per byte in thousandths, as a loss."""
    if value is not None and name == "nats_per_byte":
        return f"{value:.3f}"
    return f"{100 * value:.1f}{percent}" if value is not None and name in SHARES else number(value)


def join_ranks(ranks: Iterable[int], spec: Spec | None) -> str:
    """Inner ranks of a tensor train, such as 8-12-12; of blocks the mean rank of one, as BTT(rank=8) gives it."""
    count = prod(spec.blocks) if isinstance(spec, BTTSpec) else 1
    return "-".join(f"{rank / count:.2f}".rstrip("0").rstrip(".") for rank in ranks)


def time_unit(longest: float) -> tuple[str, float]:
    """The unit for times up to `longest` seconds, and its length in seconds."""
    if longest < 600:
        return "s", 1.0
    return ("min", 60.0) if longest < 7200 else ("h", 3600.0)


def duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    unit, length = time_unit(seconds)
    return f"{number(seconds / length)} {unit}"


def modes_of(spec: Spec) -> str:
    """Format and modes of a tensor train, such as TT 8·8 / 16·16."""
    return re.split(" ranks? ", str(spec))[0]
