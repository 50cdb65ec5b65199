"""The examples in docstrings run, and print what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

import comera

SRC = Path(comera.__file__).parent
FILES = [path.relative_to(SRC.parent) for path in sorted(SRC.rglob("*.py")) if ">>> " in path.read_text("utf-8")]
NAMES = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in FILES]


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed
