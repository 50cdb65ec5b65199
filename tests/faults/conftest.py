"""`--faults-page FILE` writes the table of the fault campaign, from the results of this run."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-page", type=Path, default=None, help="where to write the table, such as docs/faults.md")


def pytest_configure(config: pytest.Config) -> None:
    target = config.getoption("--faults-page", None)  # without it where this file is loaded late
    if target is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Collector(target))


class _Collector:
    """Gathers what the tests recorded, from every worker."""

    def __init__(self, target: Path) -> None:
        self.target = target
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

    def pytest_sessionfinish(self) -> None:
        from .page import page

        self.target.write_text(page(self.campaigns, self.others))
