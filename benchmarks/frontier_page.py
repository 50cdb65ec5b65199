"""Write docs/frontier.md and its figure from results/frontier.csv and results/frontier_costs.csv.

python benchmarks/frontier_page.py
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from common import measured
from figures import GREY, ORANGE, PURPLE, TEAL, png, styled
from frontier import TUNING, parse
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

PAGE = Path(__file__).parents[1] / "docs" / "frontier.md"
FIGURE = PAGE.with_suffix(".png")
# color by the beginning of a name
FAMILIES = {"dense-": GREY, "densec": GREY, "densev": ORANGE, "densen": ORANGE, "btt": TEAL, "tt": PURPLE}
COLUMNS = 3  # of the figure
_TIMED = ("part", "budget", "vocab", "optimizer", "case", "steps")
_ABOUT = ("machine", "threads", "python", "torch", "commit")

HEAD = """# The frontier: what is learned for what it costs

Written by `python benchmarks/frontier_page.py`; `make frontier BUDGET=600s` measures anew. Every case is the recipe
`lm` (Llama-style, {layers} blocks unless its name says otherwise), trained for the same time in measured steps,
with fused kernels and one optimizer. **The baseline is the best dense model of any width, with short
convolutions or without.** `btt2-384` is a block
tensor train of rank 2 in about as many blocks as features in each, 384 wide, `btt8b4-384` of rank 8 in 4 × 4 blocks;
`btt4b4e8h2b4-128` has a token embedding of rank 8 and an output head of rank 2 in 4 × 4 blocks, too;
`tt6r30-384` is a tensor train of order 6 and rank 30. `btt8b4v32-192` and `densev32-128` have one table of plain low
rank, 32, for token embedding and head; the layers of the latter are dense. `densev32n4r160-64` has a table of all
strings of four tokens beside that one; `densec4-48` is dense with short convolutions of four taps. Base rates are
tuned, out of those that the
tables name, for 1/{tuning} of a budget of time and, on prose, for the whole of one of steps, on one half of the
held-out text; figures are read from the other half. A case that ran a whole budget of time at several rates has the
best of these: after a fifth of the time too high a rate can look best. Rates of block tensor trains in rows of commits
before 71ba085 are those of an older rule for cores under Muon: 0.7 times as high by today's. The text `code` is
Python's own library, `packages` that of the packages installed beside it, ten times as much.

## Where compression can win

Written down from the costs below while the first runs were under way, before any of their figures.

A dense layer does 6 FLOPs a parameter and token, forward and backward, in products that run at the machine's peak. A
block tensor train does 6 as well, TT and plain low rank up to 6, so FLOPs per parameter are no handicap. What is: a
compressed model of as many FLOPs is two to four times wider, and everything between the layers (norms, activations,
attention) costs in proportion to the width, at the speed of memory; and small blocks run below the peak.

- **Compute-limited** (minutes, a small model): the narrow dense model takes the most steps. Compression wins only if a
  step teaches so much more that this is made up for.
- **Capacity-limited** (long training, a model that has stopped improving): what counts is the loss at equal parameters.
  Here block tensor trains should win.
- **Memory-limited**: optimizer state and gradients are 3 of the 4 copies of each parameter; with recomputation,
  activations are low-rank. At equal peak memory the compressed model may be several times wider.
- **Bandwidth-limited** (one sequence a step): a step reads every parameter once for few FLOPs; fewer parameters win
  directly.

## The map

What was found, in ten minutes of two cores on code, one seed each unless the tables say more:

- **Layers are most of the model** (plain bytes): a narrow dense model wins by 0.12, with 1.3 times as many steps and
  1.2 times as many parameters.
- **The table of a large vocabulary is most of the model** (32,768 tokens): **at any size dense is ahead by 0.002**, 128
  wide with short convolutions, 1.025 in 20.0 MB; 128 wide with a table of rank 64 in place of its embedding and head,
  and convolutions, has 1.027 in 11.7, dense 96 wide 1.043 in 14.4 (all at 0.004, one seed, steps as many as fit by
  timings in turns). Up to 8 MB compression wins by 0.046,
  three seeds of each, within 0.010 of each other and within 0.023: `btt8b4v32-192`, whose token embedding and head are
  one table of plain low rank, 1.076 in 6.0 MB, dense 56 wide 1.122 in 8.0. Both have the loss kernel that writes no
  logits, and steps of about 60 and 57 ms (AMD EPYC with AVX-512, products by oneDNN). **What wins is the table**: with
  it and dense layers, 128 wide, 1.073 in 7.4 MB (one seed), level with block tensor trains, which are a fifth smaller.
  Before that table and that kernel
  it lost, by 0.045 (Intel): a TT-matrix with a head of its own learned less a step, and its steps took 1.5 times as
  long. It wins at 2 MB, too, where a dense model has 14 channels left, by 0.05 on code (three seeds) and 0.03 on prose
  (one), and loses at 0.5 MB, where both have stopped learning: 4 channels, or ranks of 1 and 2. These are of the Intel
  machine.
- **Who may choose the vocabulary** and trains for ten minutes takes bytes, and short convolutions: dense 128 wide
  with them has 1.060 in 3.5 MB at 0.004 (1.075 at 0.008), ahead of every other model here, of 32,768 tokens, too. A
  table of all strings of six bytes beside a dense model of that width has 1.072 at the same rate for all, 1.080 with
  the table at eleven times that (the rule, which is 0.027 better after 800 steps), and with convolutions 1.063: **in
  ten minutes they add nothing to each other**. Hashed tables in as many bytes have 1.235, at 0.004. After two minutes
  tokens are ahead: dense 48 wide with convolutions 1.205, of bytes 1.359, with a table of all strings of four tokens
  1.128 ([log](log.md)). One seed each.
- **Equal time and bytes, of any vocabulary** (goal: 0.15): dense is ahead, of bytes and with convolutions, by 0.055 at
  0.5 MB (44 wide 1.220; 32 wide with a table of all strings of six bytes, too, 1.275; each the better of 0.008 and
  0.016), by 0.011 at 2 MB (96 wide 1.092; 64 wide and such a table 1.103 in 2.1), and by 0.003 at 8 (the two above).
- **Equal parameters and steps**: level. On prose, with every rate tuned over all 1,600 steps (Muon, one seed), block
  tensor trains are 0.012 ahead of dense at 0.5 million parameters and 0.000 and 0.002 behind at 0.9 and 1.9; 0.1 was
  the goal. Earlier leads, of up to 0.094, were rates tuned over too few steps, which is worse for dense models than for
  block tensor trains ([log](log.md)). On code (dense at 0.004, block tensor trains at 0.008, one seed) 0.015 and 0.010
  ahead at 0.5 and 0.9 million; at 1.9 dense is 0.02 ahead; the three seeds below have the rates of 320 steps. With
  AdamW, after 320 and 400 steps, it was 0.05 and 0.10: a better optimizer and a longer run help dense models more.
- **Against the same model dense** steps are 2 to 7 times faster and, recomputing, take an eighth of the memory
  ([benchmarks](benchmarks.md)): so where the width is given, by a model to be compatible with, compression pays.
- **Equal peak memory**: hardly a question of its own for models this small. Processes of dense 14 wide peaked at 882
  to 999 MB from run to run, those of the compressed model of 2 MB at 881 to 995; on plain bytes dense at 752 MB,
  compressed at 785. The 1,453 to 1,525 MB of `btt8b4v32-192`, dense 56 wide 885, are mostly what oneDNN had kept of
  1,024 shapes of operands, which change with every rank that falls; it keeps 64 since ([log](log.md)).
- **A long text** of 32,768 tokens (packages, 86 million of them), ten minutes: **ours is ahead by 0.008, in a model
  of 0.6 times the size**: 128 wide, a table of rank 64 and n-grams of four tokens, 0.931 in 12.2 MB; dense 128 wide
  with short convolutions, the best of four widths and the widest, 0.939 in 20.0. All at 0.004, steps as many as fit
  by timings in turns on another machine (`BY_STEPS` in the script). **It is the table that saves the time**: with
  convolutions in place of n-grams ours has 0.935. Its rank decides: with 32 and n-grams 0.977, in 8.0 MB, where dense
  of 9.2 MB, 64 wide, has 0.995. N-grams add nothing to dense 96 wide with convolutions (0.953, 0.954 with them).
  **After twenty minutes, in the steps of twice the time, dense is ahead by 0.013**: 0.899, ours 0.912. After an hour,
  nearly every token read once, ours 64 wide with rank 32 and dense 48 wide have 0.989 and 1.016, both too small by
  then; wider ones were not run for so long. One seed but of ours 64 wide, two.
- **Prose**, ten minutes, 32,768 tokens: dense 128 wide with short convolutions is ahead by 0.004, 1.071 in 20.0 MB;
  ours, 128 wide, a table of rank 64 and n-grams, has 1.075 in 12.2. Both at 0.004. At 0.008 dense 64 wide with
  convolutions has 1.086 in 9.2 MB, 48 wide 1.124 in 6.7, n-grams, 64 wide with rank 32, 1.100 in 5.3. One seed each.
  **Of bytes** dense 128 wide with convolutions has 1.146 in 3.5 MB, with a table of all strings of six bytes in their
  place 1.148 in 4.9.
- Not measured: wider models for an hour, bytes for an hour, hashed n-grams of tokens for longer than two minutes,
  equal memory with recomputation, one sequence a step.
"""

COMMANDS = """Bold: short of the goal. Each figure: `python benchmarks/frontier.py final --cases DENSE COMPRESSED` with
`--text`, `--vocab`, `--budget` and `--optimizer` of its setting, after `speed` (the seconds of a step) and `tune`
with the same options."""

Row = dict[str, str]


class Setting(NamedTuple):
    """What the runs of a table have in common. machine: of a budget of time, the one whose steps were timed, which buys
    other steps on each; a run takes them anywhere."""

    text: str
    vocab: int
    budget: str
    optimizer: str
    machine: str = ""

    def __str__(self) -> str:
        equal = f"{self.budget.removesuffix('steps')} steps" if self.budget.endswith("steps") else self.budget
        on = f", {MACHINES[self.machine]}" if self.machine else ""
        return f"{self.text}, vocabulary {self.vocab:,}, {equal}, {self.optimizer}{on}"


INTEL, AMD = "Intel(R) Xeon(R) Processor", "AMD EPYC, AVX512, oneDNN"
MACHINES = {INTEL: "Intel", AMD: "AMD", "AMD EPYC": "AMD, AVX2"}  # as results name them, and in short

# runs of so many steps as fit into a time by timings in turns with the cases of its table, on another machine
BY_STEPS = {
    (case, text, vocab, f"{steps}steps"): (budget, AMD)
    for case, vocab, budget, steps, *texts in (
        ("densec4-96", 32768, "600s", 6500, "packages", "code"),
        ("densec4-128", 32768, "600s", 4830, "packages", "prose", "code"),
        ("densec4-128", 32768, "1200s", 9660, "packages"),
        ("densen4r160c4-96", 32768, "600s", 6060, "packages"),
        ("densev64c4-128", 32768, "600s", 6480, "packages", "code"),
        ("densev64n4r160-128", 32768, "600s", 6480, "packages", "prose"),
        ("densev64n4r160-128", 32768, "1200s", 12960, "packages"),
        ("dense-128", 256, "600s", 10905, "code", "prose"),
        ("densen6r160q1c4-64", 256, "600s", 21100, "code"),
        ("densec4-44", 256, "600s", 32960, "code"),
        ("hashed6r2840d24-128", 256, "600s", 10438, "code"),
        ("densen6r32q1c4-32", 256, "600s", 44170, "code"),
        ("densec4-128", 256, "600s", 9850, "prose"),
        ("densen6r160q1-128", 256, "600s", 9303, "prose"),
    )
    for text in texts
}


class Goal(NamedTuple):
    """Compressed beside the best baseline, in one setting.

    megabytes: only models of this size at most, give or take a tenth. pair: only these two. baseline: how the names
    of the baselines begin. taps: with short convolutions, too, on either side. vocabularies: those of which the best
    model counts on each side; none: that of the setting.
    """

    what: str
    ahead: float  # nats per byte that are asked for
    setting: Setting
    megabytes: float | None = None
    pair: tuple[str, str] | None = None
    baseline: tuple[str, ...] = ("dense", "summed")
    taps: bool = True
    vocabularies: tuple[int, ...] = ()


def _goals() -> Iterator[Goal]:
    without = Setting("code", 256, "600s", "muon", INTEL)
    yield Goal("equal time, dense of any width; no n-grams on either side", 0.05, without)
    for text in ("code", "prose"):
        for budget in ("600s", "3600s"):
            setting = Setting(text, 256, budget, "muon", AMD)
            yield Goal("equal time, plain dense of any width", 0.12, setting, baseline=("dense",), taps=False)
    hashing = "equal time and bytes, dense with hashed tables of n-grams"
    yield Goal(hashing, 0.1, Setting("code", 256, "600s", "muon", AMD), baseline=("hashed",), taps=False)
    settings = [(text, vocab, "600s") for vocab in (256, 32768) for text in ("code", "prose")]
    for text, vocab, budget in [*settings, *(("packages", 32768, seconds) for seconds in ("600s", "1200s", "3600s"))]:
        with_taps = Setting(text, vocab, budget, "muon", AMD)
        yield Goal("equal time, the best dense width run, with short convolutions or sums", 0.04, with_taps)
    for size in (0.5, 2, 8):
        setting = Setting("code", 256, "600s", "muon", AMD)
        vocabularies = (256, 32768)
        yield Goal(f"equal time and size, {size:g} MB", 0.15, setting, megabytes=size, vocabularies=vocabularies)
    for text, size, machine in (("code", 0.5, INTEL), ("code", 2, INTEL), ("code", 8, AMD), ("prose", 2, INTEL)):
        setting = Setting(text, 32768, "600s", "muon", machine)
        yield Goal(f"equal time and size, {size:g} MB", 0.15, setting, megabytes=size)
    for text in ("code", "prose"):
        for pair in PAIRS:
            yield Goal("equal parameters and steps", 0.1, Setting(text, 256, "1600steps", "muon"), pair=pair)


# as many parameters before any gate falls, give or take a twentieth
PAIRS = (("dense-96", "btt1-256"), ("dense-128", "btt1-384"), ("dense-192", "btt14b4-384"))


def main() -> None:
    rows, costs = measured("frontier"), measured("frontier_costs")
    tuned = _whole([row for row in rows if row["part"] == "tune"])
    final = _at_their_rates([row for row in rows if row["part"] == "final"], tuned)
    lines = [HEAD.format(layers=4, tuning=TUNING), *_goal_table(final), *_rate_table(tuned)]
    settings = sorted({_setting(row) for row in final})
    if final:
        _draw(final)
        legend = "Held-out nats per byte over parameters, dense and compressed, by text, time, optimizer and machine."
        lines += ["", "## Measured", "", f"![{legend}]({FIGURE.name})"]
    for setting in settings:
        own = [row for row in final if _setting(row) == setting]
        rates = _rates(row for row in tuned if _setting(row) == setting) | _run_whole(rows, setting)
        lines += ["", f"### {setting}", "", *_table(own, rates)]
    lines += ["", "## Costs", "", "| vocabulary | case | parameters | MFLOPs a token | FLOPs a parameter |"]
    lines.append("|--:|---|--:|--:|--:|")
    for row in costs:
        lines.append(
            f"| {int(row['vocab']):,} | {row['case']} | {int(row['parameters']):,} | {row['mflops_token']} | "
            f"{row['flops_per_parameter']} |"
        )
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(PAGE)


def _goal_table(final: list[Row]) -> list[str]:
    """A row for each goal, those that fell short or were not measured included."""
    lines = [
        "## Goals and figures",
        "",
        "Nats per held-out byte that the best compressed model is ahead of the best baseline.",
        "",
    ]
    lines += ["| | setting | goal | measured | baseline | compressed | seeds |", "|---|---|--:|--:|---|---|--:|"]
    for goal in _goals():
        settings = [goal.setting._replace(vocab=vocab) for vocab in goal.vocabularies or (goal.setting.vocab,)]
        fitting = [row for row in final if _setting(row) in settings and _fits(row, goal)]
        ours = _best_run(row for row in fitting if parse(row["case"]).method == "comera")
        others = (row for row in fitting if parse(row["case"]).method != "comera")
        baseline = _best_run(row for row in others if row["case"].startswith(goal.baseline))
        where = str(goal.setting)
        if goal.vocabularies:
            where = where.replace(f"vocabulary {goal.setting.vocab:,}", "any vocabulary")
        start = f"| {goal.what} | {where} | ≥ {goal.ahead} |"
        if baseline is None or ours is None:
            lines.append(f"{start} not measured | | | |")
            continue
        seeds = min(baseline.seeds, ours.seeds)
        figure = baseline.loss - ours.loss
        reached = f"{figure:+.3f}" if figure >= goal.ahead else f"**{figure:+.3f}**"
        lines.append(f"{start} {reached} | {baseline} | {ours} | {seeds} |")
    return [*lines, "", COMMANDS]


class Best(NamedTuple):
    """The case of the lowest mean loss over its seeds."""

    loss: float
    case: str
    seeds: int

    def __str__(self) -> str:
        return f"{self.case}: {self.loss:.3f}"


def _best_run(rows: Iterable[Row]) -> Best | None:
    by_case: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        by_case.setdefault((row["case"], row["vocab"]), []).append(float(row["nats_per_byte"]))
    means = (Best(statistics.fmean(own), case, len(own)) for (case, _), own in by_case.items())
    return min(means, default=None)


def _rate_table(tuned: list[Row]) -> list[str]:
    """One base rate for all formats: what each case loses by it against its own best."""
    lines: list[str] = []
    for setting in sorted({_setting(row) for row in tuned}):
        grid: dict[str, dict[float, float]] = {}
        for row in tuned:
            if _setting(row) == setting:
                grid.setdefault(row["case"], {})[float(row["lr"])] = float(row["nats_per_byte"])
        rates = sorted(set.intersection(*(set(own) for own in grid.values())))
        if len(grid) < 4 or len(rates) < 3:
            continue
        loss = {rate: max(own[rate] - min(own.values()) for own in grid.values()) for rate in rates}
        shared = min(loss, key=loss.__getitem__)
        best = {name: min(own, key=own.__getitem__) for name, own in grid.items()}
        far = max(math.exp(abs(math.log(rate / shared))) for rate in best.values())
        said = (
            f"The best shared rate is {shared:g}: at most {loss[shared]:.3f} nats are lost by it (goal: 0.01), and "
            f"the best rate of each case is within a factor of {far:.3g} of it (goal: 2)."
        )
        lines += [f"### {setting}", "", said, ""]
        lines += ["| case | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---|" + "--:|" * len(rates)]
        for name, own in sorted(grid.items()):
            cells = (f"**{own[rate]:.3f}**" if rate == best[name] else f"{own[rate]:.3f}" for rate in rates)
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return ["", "## One base rate", "", *lines] if lines else []


def _table(rows: list[Row], tuned: dict[str, list[float]]) -> list[str]:
    """A row for each case, the best first: mean and spread over seeds, and the distance from the best dense model.

    tuned: the rates that each case was tuned over for this budget, the best first; a star marks the rates of others.
    """
    means = _means(rows)
    dense = _best(means, "dense")
    lines = [
        "| case | nats per byte | spread | seeds | to the best dense | rate | steps | parameters | model MB | peak MB |"
    ]
    lines += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for name in sorted(means, key=means.__getitem__):
        own = [row for row in rows if row["case"] == name]
        losses = [float(row["nats_per_byte"]) for row in own]
        spread = f"{max(losses) - min(losses):.3f}" if len(own) > 1 else ""
        apart = "" if dense is None else f"{means[name] - dense[0]:+.3f}"
        first = own[0]
        tried = ", ".join(f"{rate:g}" for rate in sorted(tuned.get(name, [])))
        rate = f"{first['lr']} of {tried}" if tried else f"{first['lr']} \\*"
        lines.append(
            f"| {name} | {means[name]:.3f} | {spread} | {len(own)} | {apart} | {rate} | {first['steps']} | "
            f"{float(first['parameters']):,.0f} | {float(first['model_mb']):.3g} | {float(first['peak_mb']):,.0f} |"
        )
    abouts = sorted({", ".join(f"{key} {row[key]}" for key in _ABOUT) for row in rows})
    if set(means) - set(tuned):
        abouts.append("\n\\* given by hand, not tuned for this budget")
    return [*lines, "", *abouts]


def _draw(rows: list[Row]) -> None:
    """Loss over parameters, a panel for each setting; all points of a panel cost the same time, or the same steps."""
    compared = {_setting(row): {other["case"] for other in rows if _setting(other) == _setting(row)} for row in rows}
    settings = sorted(setting for setting, cases in compared.items() if len(cases) > 1)
    lines = math.ceil(len(settings) / COLUMNS)
    with styled():
        figure = Figure(figsize=(10, 3.1 * lines))
        panels = figure.subplots(lines, min(COLUMNS, len(settings)), squeeze=False).flatten()
        for axes, setting in zip(panels, settings, strict=False):
            _panel(axes, [row for row in rows if _setting(row) == setting])
            axes.set_title(fill(str(setting), 40), fontsize=8)
        for axes in panels[len(settings) :]:
            axes.set_visible(False)
        figure.supxlabel("parameters", fontsize=9)
        figure.supylabel("held-out nats per byte", fontsize=9)
        figure.draw_without_rendering()
        for axes in panels:
            _hide_overlaps(axes)
        FIGURE.write_bytes(png(figure))


def _panel(axes: Axes, rows: list[Row]) -> None:
    """One line for each family of cases, from the smallest model to the largest."""
    means = _means(rows)
    sizes = {row["case"]: float(row["parameters"]) for row in rows}
    for family, color in FAMILIES.items():
        names = sorted((name for name in means if name.startswith(family)), key=sizes.__getitem__)
        axes.plot(
            [sizes[name] for name in names], [means[name] for name in names], "o-", color=color, markersize=4, lw=1
        )
        right, side = (1, "left") if color == GREY else (-1, "right")  # dense models are the larger ones
        for k, name in enumerate(names):
            at = (4 * right, -8 if k % 2 else 4)
            axes.annotate(name, (sizes[name], means[name]), textcoords="offset points", xytext=at, fontsize=6, ha=side)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(min(sizes.values()) / 5, max(sizes.values()) * 3)  # room for labels
    axes.margins(y=0.15)


def _hide_overlaps(axes: Axes) -> None:
    """Leave out labels that would cover one of a case with a lower loss; the tables have them all."""
    shown: list[Bbox] = []
    labels = [text for text in axes.texts if isinstance(text, Annotation)]
    for label in sorted(labels, key=lambda each: float(each.xy[1])):
        box = label.get_window_extent()
        label.set_visible(not any(box.overlaps(other) for other in shown))
        shown += [box] if label.get_visible() else []


def _setting(row: Row) -> Setting:
    place = row["text"], int(row["vocab"])
    budget, machine = BY_STEPS.get((row["case"], *place, row["budget"]), (row["budget"], ""))
    if not machine and not budget.endswith("steps"):
        machine = _timed(*map(row.__getitem__, _TIMED), row["machine"])
    return Setting(*place, budget, row["optimizer"], machine)


@cache
def _timed(part: str, budget: str, vocab: str, optimizer: str, case: str, steps: str, ran_on: str) -> str:
    """The machine that timed a run's steps: that of the timing which gives it so many; of a run that is older than
    this timing the one that it ran on."""
    share = 1 / TUNING if part == "tune" else 1
    for row in measured("frontier_speed"):
        if (row["vocab"], row["optimizer"], row["case"]) == (vocab, optimizer, case):
            by_it = int(share * (int(budget.removesuffix("s")) / (float(row["step_ms"]) / 1e3)))
            return row["machine"] if by_it == int(steps) else ran_on
    return ran_on


def _whole(tuned: list[Row]) -> list[Row]:
    """Of a budget of steps the runs of all steps alone, where a setting has any."""
    steps = {
        setting: max(int(row["steps"]) for row in tuned if _setting(row) == setting) for setting in map(_setting, tuned)
    }
    return [row for row in tuned if not row["budget"].endswith("steps") or int(row["steps"]) == steps[_setting(row)]]


def _rates(tuned: Iterable[Row]) -> dict[str, list[float]]:
    """The rates that each case of a setting was tuned over, the best first."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in tuned:
        found.setdefault(row["case"], []).append((float(row["nats_per_byte"]), float(row["lr"])))
    return {name: [rate for _, rate in sorted(losses)] for name, losses in found.items()}


def _run_whole(rows: list[Row], setting: Setting) -> dict[str, list[float]]:
    """The rates of the cases that ran a whole budget of time at several, the one of the best mean over seeds first."""
    if setting.budget.endswith("steps"):
        return {}  # tuned over all of them
    losses: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if row["part"] == "final" and _setting(row) == setting:
            losses.setdefault(row["case"], {}).setdefault(float(row["lr"]), []).append(float(row["nats_per_byte"]))
    return {
        name: sorted(own, key=lambda rate, own=own: statistics.fmean(own[rate]))  # type: ignore[misc]
        for name, own in losses.items()
        if len(own) > 1
    }


def _at_their_rates(final: list[Row], tuned: list[Row]) -> list[Row]:
    """The rows of each case at its best rate of the whole budget, if it ran that at several; else at its tuned rate; of
    a case that was not tuned, or not run at it, at the one last run."""
    kept = []
    for setting in {_setting(row) for row in final}:
        rates = _rates(row for row in tuned if _setting(row) == setting) | _run_whole(final, setting)
        for name in {row["case"] for row in final if _setting(row) == setting}:
            own = _own(final, setting, name)
            ran = [float(row["lr"]) for row in own]
            rate = next((best for best in rates.get(name, [])[:1] if best in ran), ran[-1])
            kept += [row for row in own if float(row["lr"]) == rate]
    return kept


def _own(rows: Iterable[Row], setting: Setting, name: str) -> list[Row]:
    return [row for row in rows if _setting(row) == setting and row["case"] == name]


def _fits(row: Row, goal: Goal) -> bool:
    """Whether the goal is about models of this case."""
    if goal.pair is not None:
        return row["case"] in goal.pair
    if not goal.taps and parse(row["case"]).taps:
        return False
    return goal.megabytes is None or float(row["model_mb"]) <= 1.1 * goal.megabytes


def _best(means: dict[str, float], method: str) -> tuple[float, str] | None:
    cases = {name: parse(name) for name in means}
    own = [name for name, case in cases.items() if case.method == method]
    return min(((means[name], name) for name in own), default=None)


def _means(rows: Iterable[Row]) -> dict[str, float]:
    """The mean over seeds of each case."""
    losses: dict[str, list[float]] = {}
    for row in rows:
        losses.setdefault(row["case"], []).append(float(row["nats_per_byte"]))
    return {name: statistics.fmean(own) for name, own in losses.items()}


if __name__ == "__main__":
    main()
