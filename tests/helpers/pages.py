"""An option of pytest that writes a page of the documentation from the results of its run."""

from abc import ABC, abstractmethod
from pathlib import Path

import pytest


class Collector(ABC):
    """Gathers what the tests recorded, from every worker, in `pytest_runtest_logreport`."""

    def __init__(self, target: Path) -> None:
        self.target = target

    @abstractmethod
    def page(self) -> str:
        """The page, in Markdown."""

    def pytest_sessionfinish(self) -> None:
        self.target.write_text(self.page())


def add_page_option(parser: pytest.Parser, option: str, example: str) -> None:
    parser.addoption(option, type=Path, default=None, help=f"where to write the page of the results, such as {example}")


def collect_for_page(config: pytest.Config, option: str, collector: type[Collector]) -> None:
    target = config.getoption(option, None)  # without it where the conftest is loaded late
    if target is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(collector(target))
