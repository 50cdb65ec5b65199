"""`--zoo-page FILE` writes the table of families and checks, from the results of this run."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--zoo-page", type=Path, default=None, help="where to write the zoo's table, such as docs/zoo.md")


def pytest_configure(config: pytest.Config) -> None:
    target = config.getoption("--zoo-page", None)  # without it where this file is loaded late
    if target is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Collector(target))


class _Collector:
    """Gathers what the tests recorded, from every worker."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.results: dict[tuple[str, str], tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = dict(report.user_properties)
        if "zoo" not in said or (report.when != "call" and not report.failed):
            return
        key = tuple(said["zoo"])
        if report.skipped:
            self.results[key] = "skipped", report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            self.results[key] = "failed", ""
        elif "shortfall" in said:
            self.results[key] = "shortfall", said["shortfall"]
        else:
            self.results[key] = "passed", said["remark"]

    def pytest_sessionfinish(self) -> None:
        from .page import page  # heavy

        self.target.write_text(page(self.results))
