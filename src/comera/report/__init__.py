"""Shows runs: tables, plots, an HTML page."""

from comera.extras import require

require("comera.report", "comera[train]", "accelerate", "filelock", "rich", "yaml")

from comera.report.compare import compare, results
from comera.report.html import render
from comera.report.inspect import inspect
from comera.report.run import RunData, read_run

__all__ = ["RunData", "compare", "inspect", "read_run", "render", "results"]
