"""The look of the documents' figures, which scripts draw: one palette, thin axes; saved as PNG."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#1d2330", "#69707d", "#e1e4ea", "#ffffff"
ORANGE, TEAL, PURPLE, GREY = "#c8590b", "#0e857a", "#7b4fc4", "#7a828f"
_RC: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.formatter.limits": (-4, 6),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9,
    "axes.linewidth": 0.6,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.facecolor": PAPER,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.major.size": 3,
    "xtick.major.width": 0.6,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
}


@contextmanager
def styled() -> Iterator[None]:
    """Our style while figures are drawn and saved; restores matplotlib's settings afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def png(figure: Figure) -> bytes:
    """The figure as PNG on white."""
    out = BytesIO()
    figure.savefig(out, format="png", dpi=200)
    return out.getvalue()
