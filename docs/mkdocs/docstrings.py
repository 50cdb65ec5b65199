"""Docstrings as this project writes them, made into what mkdocstrings expects."""

import re
from pathlib import Path
from typing import Any

import griffe

HEADINGS = re.findall(
    r"^## (\d+)\. (.+)$", (Path(__file__).parents[1] / "method.md").read_text("utf-8"), flags=re.MULTILINE
)
ANCHORS = {number: f"{number}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}" for number, title in HEADINGS}


class Docstrings(griffe.Extension):
    """`Example:` is a section, literal blocks after `::` are code, and sections of docs/method.md are links."""

    def on_instance(self, *, obj: griffe.Object | griffe.Alias, **_: Any) -> None:
        if not isinstance(obj, griffe.Alias) and obj.docstring is not None:
            obj.docstring.value = improve(obj.docstring.value)


def improve(text: str) -> str:
    """The docstring with sections, code and links that Markdown understands."""
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(r"::\n\n", ":\n\n", text)
    return re.sub(
        r"docs/method\.md §(\d+)", lambda cited: f"[method §{cited[1]}](../method.md#{ANCHORS[cited[1]]})", text
    )
