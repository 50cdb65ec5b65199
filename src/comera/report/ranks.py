"""The ranks of every tensor train over a run, as strips of color in a table; a line for ranks that stayed."""

from bisect import bisect_right
from collections.abc import Sequence
from html import escape
from itertools import groupby, takewhile

from comera.report.run import RunData
from comera.report.tables import join_ranks
from comera.tt.spec import Spec

_COLUMNS = 60  # time steps of a strip
_OPEN = 8  # tensor trains up to which their table is not folded
_STAYED = 0.01  # of the sum of ranks: moves of no more than this are not drawn


def ranks_section(run: RunData) -> str:
    """One row per tensor train, one strip per inner rank, folded where there are many.

    Ranks that stayed are a line that says why; "" for a dense run.
    """
    sizes = [size for size in run.sizes if size.ranks]
    if not sizes:
        return ""
    first, last, logged = sizes[0], sizes[-1], [size.step for size in sizes]
    names = list(first.ranks)
    positions = max(map(len, first.ranks.values()), default=0)
    if not positions:
        return ""
    begun, ended = (sum(sum(size.ranks.get(name, ())) for name in names) for size in (first, last))
    if abs(begun - ended) <= _STAYED * begun:
        return f"<p>Ranks stayed at {begun:,} → {ended:,}{escape(_why_they_stayed(run))}.</p>"
    steps = [first.step + (last.step - first.step) * k // (_COLUMNS - 1) for k in range(_COLUMNS)]
    at = [sizes[bisect_right(logged, step) - 1] for step in steps]
    rows = []
    for name, short in zip(names, short_names(names), strict=True):
        courses = zip(*(size.ranks.get(name, first.ranks[name]) for size in at), strict=False)
        spec = run.specs.get(name)
        cells = [f'<td class="rank">{_strip(course, spec)}</td>' for course in courses]
        cells += ["<td></td>"] * (positions - len(cells))
        rows.append(f'<tr><td class="txt">{escape(short)}</td>{"".join(cells)}</tr>')
    head = "".join(f'<th class="txt">inner rank {k}</th>' for k in range(1, positions + 1))
    table = (
        f'<div class="scroll"><table><thead><tr><th class="txt">tensor train</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    caption = (
        f"From step {first.step:,} to step {last.step:,}, left to right: the share of the initial rank that is "
        "unpruned, as color; of blocks, the mean rank of one. Strips that fade early belong to the layers that need "
        "the least capacity."
    )
    title = f"Ranks of {len(names)} tensor trains: their sum went from {begun:,} to {ended:,}"
    fold = "" if len(names) > _OPEN else " open"
    return f'<details{fold}><summary>{title}</summary><p class="muted">{caption}</p>{table}</details>'


def _why_they_stayed(run: RunData) -> str:
    """What the configuration says about it; "" where that is lost."""
    train = run.config.get("train")
    late = train.get("late") if isinstance(train, dict) else None
    if not isinstance(late, dict) or "target_size" not in late:
        return ""
    if late["target_size"] is None:
        return ": no target size was set (train.late.target_size)"
    stage = f"the late stage towards train.late.target_size = {late['target_size']}"
    return f", although {stage} began at step {run.stages[0].step:,}" if run.stages else f": {stage} did not begin"


def _strip(course: Sequence[int], spec: Spec | None) -> str:
    """A rank over time; the text beside it says where it began and ended."""
    begin, end = max(course[0], 1), course[-1]
    rects, x = "", 0
    for rank, group in groupby(course):
        width = len(list(group))
        rects += f'<rect x="{x}" width="{width}" height="1" fill-opacity="{0.06 + 0.84 * min(1.0, rank / begin):.2f}"/>'
        x += width
    first, last = join_ranks(course[:1], spec), join_ranks([end], spec)
    text = first if course[0] == end else f"{first} → {last}"
    return f'<svg class="strip" viewBox="0 0 {len(course)} 1" preserveAspectRatio="none">{rects}</svg> {text}'


def short_names(names: Sequence[str], longest: int = 48) -> list[str]:
    """Names without their common leading components and the trailing `.tt`, shortened in the middle."""
    parts = [name.removesuffix(".tt").split(".") for name in names]
    columns = zip(*parts, strict=False) if len(parts) > 1 else ()
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1 and not column[0].isdigit(), columns))
    cut = [".".join(part[shared:]) or ".".join(part) for part in parts]
    return [name if len(name) <= longest else f"{name[: longest // 2 - 1]}…{name[-longest // 2 :]}" for name in cut]
