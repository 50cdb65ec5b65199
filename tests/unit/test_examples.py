"""The examples in docstrings run, and print what they show."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.run_folders import write_run
from tests.unit.test_documents import public_names, reference_names

import comera

SRC = Path(comera.__file__).parent
FILES = [path.relative_to(SRC.parent) for path in sorted(SRC.rglob("*.py")) if ">>> " in path.read_text("utf-8")]
NAMES = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in FILES]


def examples(path: Path) -> Iterator[doctest.DocTest]:
    """The examples of every docstring in a file, each as a program of its own, with its own imports.

    doctest's own search leaves out decorated functions."""
    parser = doctest.DocTestParser()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text, name, line = ast.get_docstring(node), getattr(node, "name", path.stem), getattr(node, "lineno", 1)
            test = parser.get_doctest(text or "", {"__name__": "example"}, name, str(path), line)
            if test.examples:
                yield test


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    if name.startswith("comera.report."):  # as `comera compare lm --out runs/compare` leaves it
        for method in ("dense", "comera"):
            write_run(Path("runs/compare", method), method=method)
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples(Path(str(module.__file__))):
        runner.run(test)
    assert runner.tries
    assert not runner.failures


def test_the_example_of_a_decorated_function_runs(tmp_path: Path) -> None:
    file = tmp_path / "decorated.py"
    file.write_text('@torch.no_grad()\ndef one():\n    """One.\n\n    >>> 1 + 1\n    1\n    """\n')
    (found,) = examples(file)
    assert doctest.DocTestRunner(verbose=False).run(found, out=lambda text: None).failed == 1


# --- every public name has one --------------------------------------------------------------------------------------


def surface() -> dict[str, Any]:
    """What the reference lists, and everything that the public rooms offer, by its full name."""
    listed = {name: resolve(name) for name in reference_names()}
    return {**public_names(), **listed}


def resolve(name: str) -> Any:
    room, _, last = name.rpartition(".")
    return getattr(importlib.import_module(room), last)


def docstring(found: Any) -> str:
    return inspect.getdoc(inspect.unwrap(found)) or ""


def has_example(found: Any) -> bool:
    return re.search(r"^Example:\n+    .*>>> ", docstring(found), re.MULTILINE) is not None


def shown_elsewhere(found: Any) -> bool:
    """Whether this is a value whose docstring names a function, the example of which has it."""
    if not dataclasses.is_dataclass(found):
        return False
    cited = re.findall(r"^See ([^.]*)", docstring(found), re.MULTILINE)
    named = {name for line in cited for name in re.findall(r"`(\w+)`", line)}
    functions = {name.rpartition(".")[2]: other for name, other in surface().items() if inspect.isroutine(other)}
    return bool(named) and all(name in functions and has_example(functions[name]) for name in named)


@cache
def documented_constants() -> set[str]:
    """Names that a file of the package assigns, with a docstring under the assignment."""
    found = set()
    for path in SRC.rglob("*.py"):
        for node, under in pairwise(ast.parse(path.read_text("utf-8")).body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant):
                room = path.relative_to(SRC).parts[0].removesuffix(".py")
                found |= {f"comera.{room}.{target.id}" for target in targets if isinstance(target, ast.Name)}
    return found


def test_every_public_name_has_an_example() -> None:
    lacking = []
    for name, found in surface().items():
        if inspect.isclass(found) and issubclass(found, Exception):
            continue  # raised, not called
        if inspect.isclass(found) or inspect.isroutine(found):
            lacking += [] if has_example(found) or shown_elsewhere(found) else [name]
        else:
            lacking += [] if name in documented_constants() else [name]
    assert lacking == []
