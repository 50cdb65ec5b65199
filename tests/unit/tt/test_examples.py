"""The examples in docstrings give what they print."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("module", ["tt.spec", "tt.shapes", "tt.decompose", "ops.planner.groups"])
def test_examples_run(module):
    failed, attempted = doctest.testmod(import_module(f"comera.{module}"))
    assert attempted
    assert not failed
