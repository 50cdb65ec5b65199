"""What a run shows on the terminal."""

import io

from rich.console import Console

from comera.trainer.display import Display


def show(terminal: bool, shown: bool = True, counted: str = "tokens", width: int = 160) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=width, quiet=not shown, color_system=None)
    with Display("tiny", shown=shown, counted=counted, console=console) as display:
        display.update(0.25, step=1234, loss=2.5, held_out_loss=2.25, tokens_per_s=5678.9, ratio=42.0, time=5180.0)
        display.announce("tiny: held-out loss 2.0 [best]")
    return screen.getvalue()


def test_a_terminal_shows_a_bar_with_losses_speed_ratio_and_time_left() -> None:
    text = show(terminal=True)
    parts = (
        "25%",
        "loss 2.5000",
        "held out 2.2500",
        "4 h 19 min left",
        "step 1,234",
        "5,679 tokens/s",
        "42.0x smaller",
    )
    for part in (*parts, "held-out loss"):
        assert part in text


def test_a_narrow_terminal_keeps_the_losses_and_the_time_left() -> None:
    text = show(terminal=True, width=80)
    assert "tiny ━━━━━" in text
    assert "25% loss 2.5000  held out 2.2500  4 h 19 min left" in text
    assert "tokens/s" not in text


def test_the_rate_is_named_after_what_the_task_counts() -> None:
    assert "5,679 pairs/s" in show(terminal=True, counted="pairs")


def test_without_a_terminal_only_lines_are_printed() -> None:
    first, announced = show(terminal=False).splitlines()
    assert first.startswith("tiny: 25%  loss 2.5000  held out 2.2500  4 h 19 min left  step 1,234")
    assert announced == "tiny: held-out loss 2.0 [best]"


def test_without_a_terminal_progress_comes_at_once_and_then_ever_more_rarely() -> None:
    screen = io.StringIO()
    display = Display("tiny", console=Console(file=screen, force_terminal=False, width=160))
    for step in range(1000):
        about = {"loss": 1.0, "held_out_loss": None, "tokens_per_s": 1.0, "ratio": 1.0}
        display.update(step / 1000, step=step, time=3.6 * step, **about)
    times = [3.6 * int(line.split("step ")[1].split()[0].replace(",", "")) for line in screen.getvalue().splitlines()]
    assert times[0] == 0
    assert times[1] < 15
    assert 8 <= len(times) <= 12  # an hour


def test_nothing_is_printed_when_not_shown() -> None:
    assert show(terminal=False, shown=False) == ""
