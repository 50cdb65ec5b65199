"""The table of layers: what each became, its ranks at first and now, the numbers it stores."""

from __future__ import annotations

from comera.report.run import RunData
from comera.report.tables import Table, times


def layer_table(run: RunData) -> Table | None:
    """Layers as the conversion left them, with the ranks last recorded as active; None for a dense run."""
    if not run.layers:
        return None
    now = run.sizes[-1].ranks if run.sizes else {}
    rows, dense_total, stored_total = [], 0, 0
    for layer in run.layers:
        modes, _, first = str(layer.spec or "").partition(" ranks ")
        bonds = now.get(f"{layer.name}.tt")
        stored = layer.stored
        if layer.spec is not None and bonds is not None:
            left = layer.spec.with_ranks((1, *bonds, 1))
            stored = left.numel + left.rank_numel
        dense_total, stored_total = dense_total + layer.dense, stored_total + stored
        changed = layer.after != layer.before
        ratio = times(layer.dense / stored) if changed and layer.dense and stored else ""
        last = "-".join(map(str, bonds or ())) if now else first
        after = layer.after if changed else "dense"
        rows.append((layer.name, after, modes, first, last, f"{layer.dense:,}", f"{stored:,}", ratio, layer.note))
    ratio = times(dense_total / stored_total if stored_total else None)
    rows.append(("all layers", "", "", "", "", f"{dense_total:,}", f"{stored_total:,}", ratio, ""))
    header = ("layer", "is", "modes", "ranks at first", "ranks now", "numbers dense", "now", "ratio", "note")
    return Table(header, "lllllrrrl", tuple(rows), total=True)
