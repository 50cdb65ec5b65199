"""A run on the terminal: a progress bar, and announced lines above it."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

_BAR = 20  # columns of the bar


class Display:
    """A progress bar on a terminal, elsewhere lines, at once and then in intervals that double; nothing unless `shown`.

    counted: the unit of the token rate.
    """

    def __init__(
        self, name: str, *, shown: bool = True, counted: str = "tokens", console: Console | None = None
    ) -> None:
        self.name, self.counted = name, counted
        self.console = console or Console(stderr=True, quiet=not shown, highlight=False)
        self._bar = Progress(
            TextColumn(name),
            BarColumn(_BAR),
            TaskProgressColumn(),
            TextColumn("{task.fields[text]}"),
            console=self.console,
            disable=not (shown and self.console.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task(name, total=1.0, text="")
        self._next_line = 0.0  # seconds of training, without a terminal

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def update(
        self,
        done: float,
        *,
        step: int,
        loss: float,
        held_out_loss: float | None,
        tokens_per_s: float,
        ratio: float,
        time: float,
    ) -> None:
        """Show the fraction of the run that is `done`, after `time` seconds of training.

        What matters most comes first: a narrow terminal leaves out the rest.
        """
        parts = [f"loss {figure(loss)}"]
        if held_out_loss is not None:
            parts.append(f"held out {figure(held_out_loss)}")
        if done:
            parts.append(f"{remaining(time / done * (1 - done))} left")
        parts += [f"step {step:,}", f"{tokens_per_s:,.0f} {self.counted}/s", f"{ratio:.1f}x smaller"]
        if not self.console.is_terminal and time >= self._next_line:
            self._next_line = max(10.0, 2 * time)
            self.announce(f"{self.name}: {100 * done:.0f}%  {'  '.join(parts)}")
        room = self.console.width - len(f"{self.name}  100% ") - _BAR
        while len("  ".join(parts)) > room and len(parts) > 1:
            parts.pop()
        self._bar.update(self._task, completed=done, text="  ".join(parts))

    def announce(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)


def figure(value: float | None) -> str:
    """A loss or metric with four decimals, a small one with its first two digits; – for none.

    >>> from comera.trainer.display import figure
    >>> figure(2.34567), figure(0.0), figure(0.0000144)
    ('2.3457', '0.0000', '1.4e-05')
    """
    if value is None:
        return "–"
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def remaining(seconds: float) -> str:
    """A time to wait, in hours and minutes, minutes, or seconds.

    >>> from comera.trainer.display import remaining
    >>> remaining(15_540), remaining(200), remaining(12)
    ('4 h 19 min', '3 min', '12 s')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
