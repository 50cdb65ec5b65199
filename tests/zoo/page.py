"""docs/zoo.md: the table of families and checks, and the reasons for what falls short."""

from .checks import CHECKS, LEAST_SHARE
from .families import FAMILIES

# (family, check) -> ("passed", remark) | ("shortfall", reason) | ("skipped", reason) | ("failed", "")
Results = dict[tuple[str, str], tuple[str, str]]

_INTRODUCTION = f"""# The zoo

Small models of {len(FAMILIES)} families, built from random weights, against {len(CHECKS)} checks. `make zoo` runs them
and writes this page; `make test` runs the first two checks of every family, and most checks of a few. To add a family,
add a line to `tests/zoo/families.py`.

A number refers to the notes below the table: a known shortfall, with its reason. A test fails where one does not occur
any more. After "–" it says why there was nothing to check.
"""


def page(results: Results) -> str:
    """The page, in Markdown. A family that could not be built here says why."""
    notes: dict[str, int] = {}
    lines = [f"| family | {' | '.join(CHECKS)} |", f"|---|{'---|' * len(CHECKS)}"]
    for family in FAMILIES:
        if family.missing:
            cells = [family.missing, *[""] * (len(CHECKS) - 1)]
        else:
            cells = [_cell(results.get((family.name, check), ("not run", "")), notes) for check in CHECKS]
        lines.append(f"| {family.name} | {' | '.join(cells)} |")
    meanings = [f"- **{name}**: {_purpose(name)}" for name in CHECKS]
    reasons = [f"{number}. {reason}" for reason, number in notes.items()]
    parts = [_INTRODUCTION, *meanings, "", *lines, "", "## Notes", "", *reasons]
    return "\n".join(parts) + "\n"


def _cell(result: tuple[str, str], notes: dict[str, int]) -> str:
    kind, text = result
    if kind == "passed":
        return text or "yes"
    if kind == "shortfall":
        return f"[{notes.setdefault(text, len(notes) + 1)}]"
    if kind == "skipped":
        return f"– [{notes.setdefault(text, len(notes) + 1)}]"
    return "**fails**" if kind == "failed" else kind


def _purpose(check: str) -> str:
    text = " ".join((CHECKS[check].__doc__ or "").split())
    return text.replace("the compressed layers", f"compressed layers, {LEAST_SHARE:.0%} at least")
