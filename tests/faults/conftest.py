"""`--faults-page FILE` writes the table of the fault campaign, from the results of this run."""

from pathlib import Path

import pytest

from ..helpers.pages import Collector, add_page_option, collect_for_page


def pytest_addoption(parser: pytest.Parser) -> None:
    add_page_option(parser, "--faults-page", "docs/faults.md")


def pytest_configure(config: pytest.Config) -> None:
    collect_for_page(config, "--faults-page", _Collector)


class _Collector(Collector):
    def __init__(self, target: Path) -> None:
        super().__init__(target)
        self.campaigns: dict[tuple[str, str], list[int]] = {}  # (file, fault) -> tries, failures
        self.others: dict[str, str] = {}  # test -> why it has no figures

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = dict(report.user_properties)
        if report.when == "call" and "fault" in said:
            fault, tries, failures = said["fault"]
            of = self.campaigns.setdefault((report.location[0], fault), [0, 0])
            of[0], of[1] = of[0] + tries, of[1] + failures
        elif report.skipped:
            self.others[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            self.others[report.nodeid] = "**fails**"

    def page(self) -> str:
        from .page import page

        return page(self.campaigns, self.others)
