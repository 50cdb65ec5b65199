"""Shows runs: tables, plots, an HTML page."""

from comera.report.compare import compare
from comera.report.html import render
from comera.report.inspect import inspect
from comera.report.run import RunData, read_run

__all__ = ["RunData", "compare", "inspect", "read_run", "render"]
