"""`--zoo-page FILE` writes the table of families and checks, from the results of this run."""

from pathlib import Path

import pytest

from ..helpers.pages import Collector, add_page_option, collect_for_page


def pytest_addoption(parser: pytest.Parser) -> None:
    add_page_option(parser, "--zoo-page", "docs/zoo.md")


def pytest_configure(config: pytest.Config) -> None:
    collect_for_page(config, "--zoo-page", _Collector)


class _Collector(Collector):
    def __init__(self, target: Path) -> None:
        super().__init__(target)
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

    def page(self) -> str:
        from .page import page  # heavy

        return page(self.results)
