"""The confusion matrix of a classifier, as a picture, and what follows from it for each label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from comera.report.tables import number
from comera.tables import Table

_MOST = 25  # labels in a picture
_CELL = 46  # units of the picture
_LONGEST = 18  # characters of a label in it
_LETTER = 7.5  # units of a character, about


@dataclass(frozen=True)
class Confusion:
    """Answers of the final model. labels: their names. counts: by part of the data, how many examples of each label
    (row) got each answer (column)."""

    labels: tuple[str, ...]
    counts: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Confusion:
        """From confusion.json. Raises ValueError, TypeError or KeyError for anything else."""
        labels = tuple(map(str, stored["labels"]))
        counts = {str(part): np.asarray(rows, np.int64) for part, rows in stored["counts"].items()}
        for part, matrix in counts.items():
            if matrix.shape != (len(labels), len(labels)) or (matrix < 0).any():
                raise ValueError(f"{part} of {len(labels)} labels has the shape {matrix.shape}")
        return cls(labels, counts)


def confusion_section(confusion: Confusion) -> str:
    """A picture and a table for each part of the data."""
    return "\n".join(_figure(confusion.labels, matrix, part) for part, matrix in confusion.counts.items())


def _figure(labels: tuple[str, ...], matrix: np.ndarray, part: str) -> str:
    shown, about = np.arange(len(labels)), ""
    if len(labels) > _MOST:
        wrong = matrix.sum(0) + matrix.sum(1) - 2 * matrix.diagonal()
        shown = np.sort(np.argsort(-wrong, kind="stable")[:_MOST])
        about = f" Of {len(labels)} labels, the {_MOST} that are mistaken most often."
    total = int(matrix.sum())
    title = f"Labels and answers, {part} examples"
    caption = (
        f"{total:,} examples: a row for each label, a column for each answer; colored by the share of the row. What is "
        f"off the diagonal is wrong.{about}"
    )
    picture = _picture([labels[k] for k in shown], matrix[np.ix_(shown, shown)], matrix.sum(1)[shown], title)
    return (
        f'<figure><h3>{escape(title)}</h3><div class="scroll">{picture}</div><figcaption>{escape(caption)}</figcaption>'
        f"</figure>{_by_label(labels, matrix).html()}"
    )


def _picture(labels: list[str], matrix: np.ndarray, sizes: np.ndarray, title: str) -> str:
    short = [label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…" for label in labels]
    side, left = len(labels) * _CELL, _LETTER * max(map(len, short)) + 12
    width, height = left + side + 2, left + side + 2
    parts = []
    for row, label in enumerate(short):
        y = left + row * _CELL
        parts.append(f'<text x="{left - 8:g}" y="{y + _CELL / 2 + 4:g}" text-anchor="end">{escape(label)}</text>')
        x = left + row * _CELL + _CELL / 2 + 4
        parts.append(f'<text transform="translate({x:g} {left - 8:g}) rotate(-90)">{escape(label)}</text>')
        for column, count in enumerate(matrix[row].tolist()):
            share, x = count / max(1, int(sizes[row])), left + column * _CELL
            parts.append(
                f"<g><title>{escape(labels[row])} answered as {escape(labels[column])}: {count:,}, {100 * share:.1f} %"
                f'</title><rect x="{x + 1:g}" y="{y + 1:g}" width="{_CELL - 2}" height="{_CELL - 2}" rx="4" '
                f'fill-opacity="{0.05 + 0.6 * share:.2f}"/><text x="{x + _CELL / 2:g}" y="{y + _CELL / 2 + 4:g}" '
                f'text-anchor="middle">{_short(count)}</text></g>'
            )
    return (
        f'<svg class="confusion" role="img" aria-label="{escape(title)}" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">{"".join(parts)}</svg>'
    )


def _short(count: int) -> str:
    """A count of at most five characters."""
    if count < 100_000:
        return str(count)
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count // 1000}k"


def _by_label(labels: tuple[str, ...], matrix: np.ndarray) -> Table:
    rows = []
    right, of, answered = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    for k, label in enumerate(labels):
        shares = [
            100 * right[k] / whole if whole else None for whole in (answered[k], of[k], (answered[k] + of[k]) / 2)
        ]
        rows.append((label, f"{of[k]:,}", f"{answered[k]:,}", *(number(share) for share in shares)))
    header = ("label", "examples", "answers", "precision %", "recall %", "F1 %")
    return Table(header, "lrrrrr", tuple(rows))
