"""Writes the notebooks of examples/ from pages: text between the blocks as text, each block of Python as a cell, run.

OMP_NUM_THREADS=1 python docs/mkdocs/notebooks.py
"""

import ast
import contextlib
import io
import json
import posixpath
import re
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
PAGES = {"quickstart": "quickstart.md", "convert": "guides/convert.md", "decompose": "guides/decompose.md"}


def notebook(page: str) -> dict[str, Any]:
    """The notebook of a page, without outputs."""
    parts = re.split(r"^```python\n(.*?)^```$", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    cells = []
    for number, part in enumerate(parts):
        source = part.strip("\n")
        if not source:
            continue
        cell = {"cell_type": "markdown", "id": f"cell-{number}", "metadata": {}, "source": _links(source, page)}
        if number % 2:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": [], "source": source}
        cells.append(cell | {"source": str(cell["source"]).splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def run(made: dict[str, Any]) -> None:
    """Run the cells in an empty folder, and store what they print and their last values, as Jupyter does."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        code = [cell for cell in made["cells"] if "outputs" in cell]
        for count, cell in enumerate(code, 1):
            cell["execution_count"], cell["outputs"] = count, _outputs("".join(cell["source"]), names, count)


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    body, value = ast.parse(source).body, None
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    found: list[dict[str, Any]] = []
    if text := printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        shown = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            shown["text/html"] = value._repr_html_().splitlines(keepends=True)
        found.append({"data": shown, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return found


def _links(text: str, page: str) -> str:
    """The text with the page's links, as they are seen from examples/."""

    def moved(link: re.Match[str]) -> str:
        if re.match(r"[a-z]+:|#", link[1]):
            return link[0]
        return f"]({posixpath.relpath(posixpath.join('docs', posixpath.dirname(page), link[1]), 'examples')})"

    text = re.sub(r"\[([^\]]*)\]\[[\w.]+\]", r"\1", text)  # links into the reference, which only the site has
    return re.sub(r"\]\(([^)\s]+)\)", moved, text)


def main() -> None:
    for name, page in PAGES.items():
        made = notebook(page)
        run(made)
        text = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
        (DOCS.parent / "examples" / f"{name}.ipynb").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
