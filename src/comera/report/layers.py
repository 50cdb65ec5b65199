"""The table of layers: what each became, its ranks at first and now, the numbers it stores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from comera.report.run import RunData
from comera.report.tables import Table, times


def chain_sizes(form: str) -> tuple[int, ...]:
    """Entries of each core's modes, from how a spec prints itself: "TT 4·2 / 2·4 ranks …", "TTM 4·2 × 2·4 ranks …"."""
    kind, _, rest = form.partition(" ")
    groups = [
        [int(mode) for mode in group.split("·")]
        for group in rest.partition(" ranks")[0].split(" × " if kind == "TTM" else " / ")
    ]
    return tuple(map(prod, zip(*groups, strict=True))) if kind == "TTM" else tuple(groups[0] + groups[1])


def stored_numbers(form: str, bonds: Sequence[int]) -> int:
    """Numbers in cores and rank parameters with these ranks of the inner bonds."""
    ranks = (1, *bonds, 1)
    return sum(r * n * s for (r, s), n in zip(pairwise(ranks), chain_sizes(form), strict=True)) + sum(bonds)


def layer_table(run: RunData) -> Table | None:
    """Layers as the conversion left them, with the ranks last recorded as active; None for a dense run."""
    if not run.layers:
        return None
    now = run.sizes[-1].ranks if run.sizes else {}
    rows, dense_total, stored_total = [], 0, 0
    for layer in run.layers:
        modes, _, first = layer.format.partition(" ranks ")
        bonds = now.get(f"{layer.name}.tt")
        stored = stored_numbers(layer.format, bonds) if bonds is not None and layer.compressed else layer.stored
        dense_total, stored_total = dense_total + layer.dense, stored_total + stored
        ratio = times(layer.dense / stored) if layer.compressed and layer.dense and stored else ""
        last = "-".join(map(str, bonds or ())) if now else first
        after = layer.after if layer.compressed else "dense"
        rows.append((layer.name, after, modes, first, last, f"{layer.dense:,}", f"{stored:,}", ratio, layer.note))
    ratio = times(dense_total / stored_total if stored_total else None)
    rows.append(("all layers", "", "", "", "", f"{dense_total:,}", f"{stored_total:,}", ratio, ""))
    header = ("layer", "is", "modes", "ranks at first", "ranks now", "numbers dense", "now", "ratio", "note")
    return Table(header, "lllllrrrl", tuple(rows), total=True)
