"""What a conversion did to each layer and left of the other parameters, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from comera.nn.size import ModelSize
from comera.tables import Report, Table
from comera.tt.spec import Spec, spec_from_dict


@dataclass(frozen=True)
class LayerRow:
    """One layer of a type that can be converted or of a subclass of one, or another module with parameters of its own.

    before, after: type of module; the same if it stays dense. spec: None for a dense one. dense, stored: parameters of
    the weight before and now, without biases; a tied weight counts at its first layer. error: relative Frobenius error
    of the decomposition; None for random cores. note: why the layer stays dense, or what it is tied to. bias: the
    layer's parameters besides its weight, which stay as they are. layer: False for another module, all of whose
    parameters count as dense and stored.

    See `tensorize_`.
    """

    name: str
    before: str
    after: str
    spec: Spec | None
    dense: int
    stored: int
    error: float | None
    note: str
    bias: int = 0
    layer: bool = True

    @property
    def ratio(self) -> float | None:
        """Dense parameters per stored parameter; None if either is zero."""
        return self.dense / self.stored if self.dense and self.stored else None

    @property
    def compressed(self) -> bool:
        """Whether the layer is compressed now."""
        return self.spec is not None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` reads it back."""
        return {**vars(self), "spec": self.spec.to_dict() if self.spec else None, "ratio": self.ratio}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerRow:
        """Read `to_dict` back, also where it lists layers alone. Raises KeyError for a missing field, SpecError for a
        malformed spec."""
        spec = spec_from_dict(values["spec"]) if values["spec"] else None
        known = {"bias": 0, "layer": True, **values, "spec": spec}
        return cls(**{field.name: known[field.name] for field in fields(cls)})


def fold(rows: Iterable[LayerRow]) -> list[LayerRow]:
    """The layers, then other modules: one row for all of a type with the same note, named after the first."""
    layers, others = [], dict[tuple[str, str], list[LayerRow]]()
    for row in rows:
        if row.layer:
            layers.append(row)
        else:
            others.setdefault((row.before, row.note), []).append(row)
    for alike in others.values():
        name = alike[0].name or "the model itself"
        name += f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        dense, stored = sum(row.dense for row in alike), sum(row.stored for row in alike)
        layers.append(replace(alike[0], name=name, dense=dense, stored=stored))
    return layers


@dataclass(frozen=True, repr=False)
class TensorizeReport(Report):
    """What a conversion did: a row for each layer and each other module that has parameters, in order.

    rows: what became of each. size: parameters of the whole model and of its compressed layers, and the ratios to the
    dense ones. Printing it gives a table, and so does a notebook; `to_frame` and `to_dict` are for programs.

    See `tensorize_`.
    """

    rows: tuple[LayerRow, ...]
    size: ModelSize

    @property
    def dense_total(self) -> int:
        """Parameters that the whole model had, and has where it was converted."""
        return self.size.dense_total

    @property
    def total(self) -> int:
        """Parameters of the whole model now."""
        return self.size.total

    @property
    def ratio(self) -> float:
        """Of the whole model: `ModelSize.ratio`."""
        return self.size.ratio

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: "rows", one object each, and the totals."""
        totals = ("dense_total", "total", "dense_tensorized", "tensorized")
        return {"rows": [row.to_dict() for row in self.rows], **{name: getattr(self.size, name) for name in totals}}

    @property
    def headline(self) -> str:
        layers = [row for row in self.rows if row.layer]
        size = self.size
        return (
            f"{sum(row.compressed for row in layers)} of {len(layers)} layers compressed, "
            f"{size.dense_total:,} -> {size.total:,} parameters, {size.ratio:.1f}x smaller"
        )

    def records(self) -> list[dict[str, Any]]:
        return [
            {
                "layer": row.name,
                "was": row.before,
                "is": row.after,
                "format": str(row.spec) if row.spec else None,
                "dense": row.dense,
                "stored": row.stored,
                "bias": row.bias,
                "ratio": row.ratio,
                "error": row.error,
                "note": row.note,
            }
            for row in self.rows
        ]

    def table(self) -> Table:
        size = self.size
        rows = []
        for row in fold(self.rows):
            error = f"{row.error:.2g}" if row.error is not None else ""
            after, form = (row.after, str(row.spec)) if row.compressed else ("dense", "")
            rows.append((row.name, row.before, after, form, *_sizes(row.dense, row.stored), error, row.note))
        biases = sum(row.bias for row in self.rows if row.layer)
        if biases:
            rows.append(("biases of the layers", "", "dense", "", *_sizes(biases, biases), "", ""))
        rows.append(("compressed layers", "", "", "", *_sizes(size.dense_tensorized, size.tensorized), "", ""))
        rows.append(("whole model", "", "", "", *_sizes(size.dense_total, size.total), "", ""))
        header = ("layer", "was", "is", "modes and ranks", "dense", "stored", "ratio", "error", "note")
        shown = [k for k, name in enumerate(header) if name != "error" or any(row[k] for row in rows)]

        def chosen(cells: Sequence[str]) -> tuple[str, ...]:
            return tuple(cells[k] for k in shown)

        return Table(chosen(header), "".join(chosen("llllrrrrl")), tuple(map(chosen, rows)), total=True)


def _sizes(dense: int, stored: int) -> tuple[str, str, str]:
    ratio = f"{dense / stored:.1f}x" if dense and stored else ""
    return f"{dense:,}" if dense else "-", f"{stored:,}" if stored else "-", ratio
