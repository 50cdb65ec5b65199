"""What a run or a comparison comes to, in plain sentences: also where ours is behind."""

from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np

from comera.report.curves import WATT_HOUR
from comera.report.run import RunData
from comera.report.tables import SHARES, duration, label, metric, number, times
from comera.trainer.energy import is_estimated, total

# Metrics of which less is better, by the end of their name.
_FALLING = ("loss", "nats_per_byte", "nce", "perplexity", "relative_l2")
_TIE = 0.002  # of a value: less than this apart is neither ahead nor behind
_UNEQUAL = 1.1  # training times that differ by more than this factor are not the same: a budget ends with a whole step


def of_run(run: RunData) -> str:
    """One sentence: what the run has learned beside its references."""
    if not run.evals:
        known = f"only the train loss is known, {number(run.train[-1].loss)}" if run.train else "nothing is known"
        return f"There was no evaluation on held-out data yet: {known}."
    name, last = run.judged_by, run.evals[-1]
    value, references = last.value(name), run.references.get(name, {})
    text = f"Held-out {label(name)} is {metric(name, value, ' %')} after {last.step:,} steps"
    if not isfinite(value):
        return f"{text}: it cannot be measured on these held-out rows, which may have a single label."
    if not references:
        return f"{text}, with no simpler model to hold it against."
    better = {reference: is_better(name, value, reached) for reference, reached in references.items()}
    parts = []
    for won, words in ((True, "better than"), (False, "no better than")):
        found = [f"{each} ({metric(name, references[each], ' %')})" for each, wins in better.items() if wins == won]
        parts += [f"{words} {_joined(found)}"] if found else []
    return f"{text}: {', but '.join(parts)}."


def of_comparison(runs: Mapping[str, RunData]) -> list[str]:
    """Who is ahead at equal training time and by how much; then, a sentence each, what else the figures say, what ours
    costs, and what they do not say."""
    continued = [name for name, run in runs.items() if run.continues]
    ranked = {name: run for name, run in runs.items() if run.evals and name not in continued}
    sentences = []
    if len(ranked) > 1:
        sentences += _ranking(ranked)
        sentences += _costs(ranked)
    if continued:
        one = len(continued) == 1
        sentences.append(
            f"{_joined(continued)} {'goes' if one else 'go'} on from another run, so {'its' if one else 'their'} time "
            f"counts from there and {'it is' if one else 'they are'} not ranked."
        )
    if missing := [name for name, run in runs.items() if not run.evals]:
        sentences.append(f"{_joined(missing)}: not evaluated on held-out data.")
    if len(ranked) > 1:
        sentences.append("One run each: how much another seed would change is not in these figures.")
    return sentences


def _ranking(runs: Mapping[str, RunData]) -> list[str]:
    """The order of the runs at the end of the shortest one, and where ours stand; those that end soon after that are
    read at their own ends."""
    measured = ("loss", *next(iter(runs.values())).evals[-1].metrics)
    common = [name for name in measured if all(isfinite(run.evals[-1].value(name)) for run in runs.values())]
    judged = [run.judged_by for run in runs.values() if run.judged_by in common]
    name = judged[0] if judged else "loss"
    end = min(run.evals[-1].time for run in runs.values())
    values = {each: _at(run, name, end) for each, run in runs.items()}
    known = {each: value for each, value in values.items() if value is not None}
    order = sorted(known, key=lambda each: known[each], reverse=not _falls(name))
    leader, *others = order
    shown = {each: metric(name, value, " %") for each, value in known.items()}
    unit = label(name)
    reached = f"{shown[leader]} {unit} on held-out data" if " per " in unit else f"a held-out {unit} of {shown[leader]}"
    text = f"After {duration(end)} of training each, "
    best = known[leader]
    tied = [each for each in others if abs(best - known[each]) <= _TIE * max(abs(best), abs(known[each]))]
    if tied:
        text += f"{_joined([leader, *tied])} are level at {reached}"
    else:
        text += f"{leader} is ahead with {reached}"
    behind = [
        f"{each} has {shown[each]} ({_gap(name, known[leader], known[each])})" for each in others if each not in tied
    ]
    sentences = [text + (f"; {_joined(behind)}." if behind else ".")]
    longest = max(run.evals[-1].time for run in runs.values())
    if longest > _UNEQUAL * end:
        sentences.append(
            f"Some trained longer, up to {duration(longest)}: their values at that time are read off their curves."
        )
    if late := [each for each in runs if each not in known]:
        sentences.append(f"{_joined(late)}: not evaluated by then.")
    ours = [each for each in order if runs[each].method == "comera"]
    if ours and leader not in ours and ours[0] not in tied:
        beaten = [each for each in order[order.index(ours[0]) + 1 :] if each not in ours]
        ahead = f" and ahead of {_joined(beaten)}" if beaten else ""
        sentences.append(f"So the compressed model is behind {leader}{ahead}.")
    return sentences


def _costs(runs: Mapping[str, RunData]) -> list[str]:
    """What each of our runs costs beside the dense one, or beside the first of the others."""
    others = [each for each, run in runs.items() if run.method != "comera" and run.summary]
    base = "dense" if "dense" in others else next(iter(others), None)
    if base is None:
        return []
    before, sentences = runs[base].summary, []
    for each, run in runs.items():
        after = run.summary
        if run.method != "comera" or after is None or before is None:
            continue
        figures: dict[str, tuple[float, float, str, str]] = {
            "model": (before.size_bytes, after.size_bytes, "smaller", "larger"),
            "peak memory": (before.peak_memory, after.peak_memory, "smaller", "larger"),
            "step": (before.step_time, after.step_time, "faster", "slower"),
        }
        old_rate, new_rate = ((total(s.energy) or 0.0) / s.tokens if s.tokens else 0.0 for s in (before, after))
        guess = "estimated " if is_estimated(before.energy) or is_estimated(after.energy) else ""
        figures[f"{guess}energy per {run.unit.removesuffix('s')}"] = (old_rate, new_rate, "smaller", "larger")
        parts = [
            f"{what} {times(old / new)} {less}" if old >= new else f"{what} {times(new / old)} {more}"
            for what, (old, new, less, more) in figures.items()
            if old and new
        ]
        sentences += [f"{each} beside {base}: {_joined(parts)}."] if parts else []
    return sentences


def energy_text(joules: Mapping[str, float]) -> str:
    """Energy for people, in J, Wh or kWh; says when it is an estimate."""
    energy = total(joules)
    if energy is None:
        return "–"
    hours = energy / WATT_HOUR
    text = f"{number(hours / 1000)} kWh" if hours >= 1000 else f"{number(hours)} Wh"
    text = text if hours >= 0.1 else f"{energy:.3g} J"
    return f"{text} (estimated)" if is_estimated(joules) else text


def is_better(name: str, value: float, than: float) -> bool:
    """Whether a value of a metric is better than another one."""
    return value < than if _falls(name) else value > than


def _falls(name: str) -> bool:
    return name.endswith(_FALLING)


def _gap(name: str, leader: float, value: float) -> str:
    """How far a value is behind the leader's."""
    if name in SHARES:
        return f"{100 * abs(leader - value):.1f} points behind"
    return f"{100 * abs(value - leader) / abs(leader):.1f} % behind" if leader else "behind"


def _at(run: RunData, name: str, time: float) -> float | None:
    """A held-out value at a time: the last one, if that is of about the same time, else the value on the line between
    the evaluations around it; None before the first one."""
    times_of = [point.time for point in run.evals]
    if times_of[-1] <= _UNEQUAL * time:
        return run.evals[-1].value(name)
    if time < times_of[0]:
        return None
    return float(np.interp(time, times_of, [point.value(name) for point in run.evals]))


def _joined(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""
