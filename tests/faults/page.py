"""docs/faults.md, the page "Failure tests": what was done, tries and failures."""

from collections.abc import Mapping, Sequence

_INTRODUCTION = """# Failure tests

What was done to the library and how often. A failure is anything lost, damaged data loaded in silence, a crash, or a
wrong result. `make faults` runs all of it and writes this page; `make test` runs a part.

- **kill**: a process that saves, prepares or exports is killed before each of its file operations, and at many bytes of
  each file. What is there afterwards is the old state or the new one, and the next save works.
- **disk full**: the same, but each operation that needs room fails from there on. It ends with one of our errors or the
  system's, leaves nothing behind, and the old state or the new one is there.
- **damage**: bits, noise, zeros, cuts, losses, swaps and additions in every file, and well-formed files of values that
  no run writes. Each is refused with nothing changed, is made anew, or changes nothing that is loaded.
- **the others**: results are those of the model alone, to the bit where it trains.

Each row is `pytest FILE -m "faults or not faults"`.
"""


def page(campaigns: Mapping[tuple[str, str], Sequence[int]], others: Mapping[str, str]) -> str:
    """The page, in Markdown. campaigns: (file, fault) -> tries, failures. others: tests without figures, and why."""
    lines = ["| fault | tries | failures | file |", "|---|--:|--:|---|"]
    lines += [
        f"| {fault} | {n:,} | {failures:,} | {file} |" for (file, fault), (n, failures) in sorted(campaigns.items())
    ]
    totals = [sum(figures) for figures in zip(*campaigns.values(), strict=True)] or [0, 0]
    lines.append(f"| **all** | {totals[0]:,} | {totals[1]:,} | |")
    notes = [f"- {test}: {why}" for test, why in sorted(others.items())]
    return "\n".join([_INTRODUCTION, *lines, *(["", "Without figures:", "", *notes] if notes else [])]) + "\n"
