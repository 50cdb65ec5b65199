"""What a conversion did to each layer and left of the other parameters, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from comera.tt.spec import Spec, spec_from_dict


@dataclass(frozen=True)
class LayerRow:
    """One layer of a type that can be converted or of a subclass of one, or another module with parameters of its own.

    before, after: type of module; the same if it stays dense. spec: None for a dense one. dense, stored: parameters of
    the weight before and now, without biases; a tied weight counts at its first layer. error: relative Frobenius error
    of the decomposition; None for random cores. note: why the layer stays dense, or what it is tied to. bias: the
    layer's parameters besides its weight, which stay as they are. layer: False for another module, all of whose
    parameters count as dense and stored.
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


@dataclass(frozen=True)
class TensorizeReport:
    """What a conversion did: a row for each layer and each other module that has parameters, in order, and the
    parameters of the whole model, before and now. Printing it gives a table."""

    rows: tuple[LayerRow, ...]
    dense_total: int
    total: int

    @classmethod
    def of(cls, model: nn.Module, rows: Iterable[LayerRow]) -> TensorizeReport:
        """The report on a model that has just been converted."""
        rows = tuple(rows)
        total = sum(p.numel() for p in model.parameters())
        return cls(rows, total + sum(row.dense - row.stored for row in rows), total)

    @property
    def dense_tensorized(self) -> int:
        """Parameters that the weights of the compressed layers had."""
        return sum(row.dense for row in self.rows if row.compressed)

    @property
    def tensorized(self) -> int:
        """Parameters that the compressed layers store in cores and gates."""
        return sum(row.stored for row in self.rows if row.compressed)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: "rows", one object each, and the totals."""
        totals = ("dense_total", "total", "dense_tensorized", "tensorized")
        return {"rows": [row.to_dict() for row in self.rows], **{name: getattr(self, name) for name in totals}}

    def __str__(self) -> str:
        with_errors = any(row.error is not None for row in self.rows)
        head = ("layer", "was", "is", "modes and ranks", "dense", "stored", "ratio", "error", "note")
        table = [head]
        for row in fold(self.rows):
            error = f"{row.error:.2g}" if row.error is not None else ""
            after, form = (row.after, str(row.spec)) if row.compressed else ("dense", "")
            table.append((row.name, row.before, after, form, *_sizes(row.dense, row.stored), error, row.note))
        layers = [row for row in self.rows if row.layer]
        compressed = f"{sum(row.compressed for row in layers)} of {len(layers)} layers compressed"
        biases = sum(row.bias for row in layers)
        if biases:
            table.append(("biases of the layers", "", "dense", "", *_sizes(biases, biases), "", ""))
        table.append((compressed, "", "", "", *_sizes(self.dense_tensorized, self.tensorized), "", ""))
        table.append(("whole model", "", "", "", *_sizes(self.dense_total, self.total), "", ""))

        columns = [i for i, name in enumerate(head) if with_errors or name != "error"]
        widths = [max(len(cells[i]) for cells in table) for i in range(len(head))]
        right = {"dense", "stored", "ratio", "error"}
        lines = [
            "  ".join(f"{c[i]:>{widths[i]}}" if head[i] in right else f"{c[i]:<{widths[i]}}" for i in columns).rstrip()
            for c in table
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-2], rule, *lines[-2:]])


def _sizes(dense: int, stored: int) -> tuple[str, str, str]:
    ratio = f"{dense / stored:.1f}x" if dense and stored else ""
    return f"{dense:,}" if dense else "-", f"{stored:,}" if stored else "-", ratio
