"""The table of layers: what each became, its initial and present ranks, its size; and what else has parameters."""

from comera.convert.report import fold
from comera.report.run import RunData
from comera.report.tables import Table, join_ranks, times
from comera.tt.spec import Spec


def layer_table(run: RunData) -> Table | None:
    """Every row of the conversion report, with the last logged ranks; None for a dense run."""
    if not run.layers:
        return None
    logged = run.sizes[-1].ranks if run.sizes else {}
    rows, dense_total, stored_total = [], 0, 0
    for layer in fold(run.layers):
        initial = join_ranks(layer.spec.inner_ranks) if layer.spec else ""
        ranks, stored = logged.get(f"{layer.name}.tt"), layer.stored
        if layer.spec is not None and ranks is not None:
            unpruned = layer.spec.with_ranks((1, *ranks, 1))
            stored = unpruned.numel + unpruned.rank_numel
        dense_total, stored_total = dense_total + layer.dense, stored_total + stored
        converted = layer.after != layer.before
        kind, modes = layer.after if converted else "dense", modes_of(layer.spec) if layer.spec else ""
        ratio = times(layer.dense / stored) if converted and layer.dense and stored else ""
        now = join_ranks(ranks or ()) if logged else initial
        rows.append((layer.name, kind, modes, initial, now, f"{layer.dense:,}", f"{stored:,}", ratio, layer.note))
    biases = sum(layer.bias for layer in run.layers if layer.layer)
    if biases:
        rows.append(("biases of the layers", "dense", "", "", "", f"{biases:,}", f"{biases:,}", "", ""))
    dense_total, stored_total = dense_total + biases, stored_total + biases
    ratio = times(dense_total / stored_total if stored_total else None)
    rows.append(("whole model", "", "", "", "", f"{dense_total:,}", f"{stored_total:,}", ratio, ""))
    header = ("layer", "type", "modes", "initial ranks", "ranks", "dense parameters", "parameters", "ratio", "note")
    return Table(header, "lllllrrrl", tuple(rows), total=True)


def modes_of(spec: Spec) -> str:
    """Format and modes of a tensor train, such as TT 8·8 / 16·16."""
    return str(spec).partition(" ranks ")[0]
