"""A progress bar for preparing data and scoring rows."""

import sys
from contextlib import ExitStack

from rich import progress as rich
from rich.console import Console


class Progress(ExitStack):
    """A context manager that shows a progress bar on stderr; silent if `quiet`, or if stderr is no terminal."""

    def __init__(self, quiet: bool) -> None:
        super().__init__()
        columns = (
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.TaskProgressColumn(),
            rich.TimeRemainingColumn(),
            rich.TextColumn("{task.fields[note]}"),
        )
        live = sys.stderr.isatty() and not quiet
        bar = rich.Progress(*columns, console=Console(stderr=True), transient=True, disable=not live)
        self._bar = self.enter_context(bar)

    def start(self, what: str, total: int | None, unit: str = "") -> None:
        """Begin a new bar in place of the last one; total: None if unknown; unit: of the count in `to`."""
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._task, self._unit = self._bar.add_task(what, total=total, note=""), unit

    def to(self, done: int, count: int | None = None) -> None:
        """Move the bar to `done` of the total; count: items processed, shown beside the bar."""
        self._bar.update(self._task, completed=done, note="" if count is None else f"{count:,} {self._unit}")

    def add(self, amount: int = 1) -> None:
        """Move the bar forward; any thread may call this."""
        self._bar.advance(self._task, amount)
