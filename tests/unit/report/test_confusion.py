"""The confusion matrix of a run: read, drawn, and what cannot be read is said."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comera.errors import DataError
from comera.report import read_run, render
from comera.report.confusion import Confusion, confusion_section

from ...helpers.run_folders import Page, assert_self_contained, write_run

COUNTS = {"held-out": [[8, 2], [0, 10]], "test": [[120_000, 0], [1, 2_500_000]]}


def write(folder: Path, content: Any) -> Path:
    run = write_run(folder / "run")
    (run / "confusion.json").write_text(json.dumps(content))
    return run


def test_the_page_shows_counts_shares_and_what_follows_for_each_label(tmp_path: Path) -> None:
    run = write(tmp_path, {"labels": ["<b>bad", "good"], "counts": COUNTS})
    page = Page(render(run))
    assert_self_contained(page)
    assert page.source.count('<svg class="confusion" role="img"') == 2
    assert "<b>bad" not in page.source
    for shown in ("<b>bad answered as good: 2, 20.0 %", "120k", "2.5M", "20 examples: a row for each label"):
        assert shown in page.text
    # of label 0: 8 answers, all right, of 10 examples; of label 1: 10 of 12 answers are right
    assert "<b>bad10810080.088.9" in page.text.replace("\n", "")
    assert "good101283.310090.9" in page.text.replace("\n", "")


def test_of_many_labels_the_most_mistaken_are_drawn() -> None:
    matrix = np.diag(np.full(40, 5))
    matrix[39, 38] = 3
    text = confusion_section(Confusion(tuple(f"label {k}" for k in range(40)), {"held-out": matrix}))
    assert text.count("<rect ") == 25 * 25
    assert "Of 40 labels, the 25 that are mistaken most often." in text
    assert "label 39 answered as label 38: 3, 37.5 %" in text
    assert text.count("<tr>") == 41  # every label has a row in the table
    empty = confusion_section(Confusion(("a", "b"), {"test": np.array([[0, 0], [0, 3]])}))
    assert "a answered as a: 0, 0.0 %" in empty
    assert "–" in empty  # neither asked for nor answered: no precision


@pytest.mark.parametrize(
    "content",
    [[], {}, {"labels": ["a"], "counts": {"test": [[1, 2]]}}, {"labels": ["a"], "counts": {"test": [[-1]]}},
     {"labels": ["a"], "counts": {"test": [["x"]]}}, {"labels": 3, "counts": {}}],
)  # fmt: skip
def test_a_damaged_matrix_is_said(content: Any, tmp_path: Path) -> None:
    run = write(tmp_path, content)
    with pytest.raises(DataError, match=r"confusion\.json: expected the counts of a confusion matrix"):
        read_run(run)
    assert "expected the counts of a confusion matrix" in Page(render(run)).text
