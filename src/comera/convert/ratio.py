"""The ranks at which a whole model becomes a given number of times smaller.

Every layer gets the same share of its own full rank, the largest at which the model fits, and a small one beside large
tables more: at least a tenth of an equal part of the budget. What is left goes to the layers with the smallest share,
rank by rank, then to single inner ranks.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Any

from torch import nn

from comera.convert.config import BTT, TT, TTM, TensorizeConfig
from comera.convert.select import Group, closed_hint, find_groups, find_sites
from comera.errors import ConversionError
from comera.nn.size import model_size
from comera.tt.format import spec_size
from comera.tt.spec import Spec

LEAST_ROW = 16
"""Parameters of each row, from which on a table of plain low rank takes the place of a TT-matrix; not measured."""
_FLOOR = 10
"""How many times less than an equal part of the budget a layer may get: a small layer's ranks cost next to nothing."""
_BISECTIONS = 60


def check_size(config: TensorizeConfig | None, ratio: float | None) -> None:
    """Raise ConversionError unless the size is given once: by a ratio above 1, or by the ranks of a configuration."""
    if config is not None and not isinstance(config, TensorizeConfig):
        raise ConversionError(
            "tensorize_: expected a TensorizeConfig with the formats of layers, as in TensorizeConfig(linear="
            f"comera.BTT(rank=2)), or ratio=10 for a model ten times smaller, got {config!r}"
        )
    if ratio is None:
        if config is None:
            raise ConversionError(
                "tensorize_: expected a size, got neither a ratio nor ranks: give ratio=10 for a model ten times "
                "smaller, or ranks, as in TensorizeConfig(linear=comera.BTT(rank=2), embedding=comera.TTM(rank=32))"
            )
        return
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 1 < ratio < float("inf"):
        raise ConversionError(
            f"ratio: expected a number above 1, such as 10 for a tenth of the parameters, got {ratio!r}"
        )
    for name, chosen in config.formats.items() if config else ():
        if chosen is not None and chosen.rank is not None:
            raise ConversionError(
                f"ratio={ratio:g} chooses all ranks, but {name!r} has rank {chosen.rank}: leave out the ratio, or the "
                f"rank, as in {type(chosen).__name__}() with its other settings"
            )


def fit_groups(
    model: nn.Module, names: dict[nn.Module, list[str]], groups: list[Group], config: TensorizeConfig, ratio: float
) -> list[Group]:
    """The groups, which have the smallest ranks, with those at which the model is `ratio` times smaller, or just more.

    Tables that make logits, too, and whose order is not given, are of plain low rank if that leaves each row
    `LEAST_ROW` parameters: a TT-matrix makes logits no faster than a dense weight.
    Raises ConversionError if the model cannot become so small.
    """
    plain = [_plain(group) for group in groups]
    changed = [k for k, (new, old) in enumerate(zip(plain, groups, strict=True)) if new is not old]
    if changed:
        with suppress(ConversionError):  # TT-matrices get smaller
            fitted = _fit(model, names, plain, config, ratio)
            if all(fitted[k].spec.ranks[1] >= LEAST_ROW for k in changed):
                return fitted
    return _fit(model, names, groups, config, ratio)


def _plain(group: Group) -> Group:
    """The group as a table of plain low rank, if it is a table of no given order that an output layer is tied to."""
    choice, kinds = group.leader.choice, {site.converter.table is None for site in group.sites}
    if kinds != {True, False} or choice != TTM():
        return group
    return replace(group, spec=TTM.low_rank(1).spec(*group.spec.shape))


def _fit(
    model: nn.Module, names: dict[nn.Module, list[str]], groups: list[Group], config: TensorizeConfig, ratio: float
) -> list[Group]:
    dense_total, kept = model_size(model).dense_total, _kept(names, groups)
    budget, least = int(dense_total / ratio) - kept, _total(groups)
    if least > budget:
        raise ConversionError(_too_small(model, names, groups, config, ratio))
    specs = fit_ranks([group.spec for group in groups], budget, config.min_ratio)
    return [replace(group, spec=spec) for group, spec in zip(groups, specs, strict=True)]


def fit_ranks(specs: Sequence[Spec], budget: int, min_ratio: float) -> list[Spec]:
    """The specs at ranks that together store at most `budget` parameters, each less than 1/min_ratio of dense.

    At their smallest ranks they must fit.
    """
    tops = [_top(spec, min_ratio) for spec in specs]

    def size(levels: Iterable[int]) -> int:
        return sum(spec_size(spec, spec.ranks_at(level)) for spec, level in zip(specs, levels, strict=True))

    part = budget // (_FLOOR * max(1, len(specs)))
    floors = [_level_within(spec, top, part) for spec, top in zip(specs, tops, strict=True)]
    if size(floors) > budget:
        floors = [spec.levels[0] for spec in specs]

    def at(share: float) -> list[int]:
        return [
            max(floor, min(top, int(share * spec.levels[-1])))
            for spec, floor, top in zip(specs, floors, tops, strict=True)
        ]

    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if size(at(middle)) <= budget else (low, middle)
    levels = at(high) if size(at(high)) <= budget else at(low)
    left = budget - size(levels)

    # Whole ranks, of the layer with the smallest share first. What does not fit now never will.
    queue = [(level / spec.levels[-1], c) for c, (spec, level) in enumerate(zip(specs, levels, strict=True))]
    heapify(queue)
    while queue:
        _, c = heappop(queue)
        spec, level = specs[c], levels[c]
        cost = (
            spec_size(spec, spec.ranks_at(level + 1)) - spec_size(spec, spec.ranks_at(level)) if level < tops[c] else 0
        )
        if 0 < cost <= left:
            levels[c], left = level + 1, left - cost
            heappush(queue, ((level + 1) / spec.levels[-1], c))
    ranks = [list(spec.ranks_at(level)) for spec, level in zip(specs, levels, strict=True)]
    _fill(specs, levels, tops, ranks, left)
    return [spec.with_ranks((1, *inner, 1)) for spec, inner in zip(specs, ranks, strict=True)]


def _fill(specs: Sequence[Spec], levels: Sequence[int], tops: Sequence[int], ranks: list[list[int]], left: int) -> None:
    """Raise single inner ranks by one, in place, while the `left` parameters allow; the most expensive first."""
    above = [spec.ranks_at(min(level + 1, top)) for spec, level, top in zip(specs, levels, tops, strict=True)]
    places = [(c, k) for c, inner in enumerate(above) for k, rank in enumerate(inner) if rank > ranks[c][k]]
    while places:
        raised = {(c, k): [rank + (j == k) for j, rank in enumerate(ranks[c])] for c, k in places}
        costs = {(c, k): spec_size(specs[c], inner) - spec_size(specs[c], ranks[c]) for (c, k), inner in raised.items()}
        places = [place for place in places if costs[place] <= left]
        if places:
            best = max(places, key=costs.__getitem__)
            ranks[best[0]], left = raised[best], left - costs[best]
            places.remove(best)


def _top(spec: Spec, min_ratio: float) -> int:
    """The largest level at which the dense weight has more than `min_ratio` times the parameters."""
    low, high = spec.levels[0], spec.levels[-1]
    while low < high:
        middle = (low + high + 1) // 2
        smaller = spec_size(spec, spec.ranks_at(middle)) * min_ratio < spec.dense_numel
        low, high = (middle, high) if smaller else (low, middle - 1)
    return low


def _level_within(spec: Spec, top: int, part: int) -> int:
    """The largest level up to `top` that stores at most `part` parameters; the smallest one if none does."""
    above = range(spec.levels[0] + 1, top + 1)
    return spec.levels[0] + bisect_right(above, part, key=lambda level: spec_size(spec, spec.ranks_at(level)))


def _total(groups: Iterable[Group]) -> int:
    return sum(spec_size(group.spec) for group in groups)


def _kept(names: Mapping[nn.Module, list[str]], groups: Iterable[Group]) -> int:
    """Parameters of the model that its conversion leaves."""
    swapped = {site.place for group in groups for site in group.sites}
    kept = {
        parameter: parameter.numel()
        for module in names
        for leaf, parameter in module._parameters.items()
        if parameter is not None and (module, leaf) not in swapped
    }
    return sum(kept.values())


def _too_small(
    model: nn.Module, names: dict[nn.Module, list[str]], groups: list[Group], config: TensorizeConfig, ratio: float
) -> str:
    """The error message for a ratio that the formats cannot reach."""
    dense_total, kept = model_size(model).dense_total, _kept(names, groups)
    least = kept + _total(groups)
    message = (
        f"ratio={ratio:g}: {type(model).__name__} can become {_down(dense_total / least)} times smaller at most, to "
        f"{least:,} parameters from {dense_total:,}: {kept:,} are in parts that stay as they are"
    )
    blocks = [kind for kind in ("linear", "experts") if isinstance(getattr(config, kind), BTT)]
    if blocks:
        formats: dict[str, Any] = dict.fromkeys(blocks, TT())
        other = replace(config, **formats)
        found = find_groups(names, find_sites(names, other), other, smallest=True)
        largest = dense_total / (_kept(names, found) + _total(found))
        if largest >= ratio:
            chosen = ", ".join(f"{kind}=comera.TT()" for kind in blocks)
            return f"{message}. Tensor trains reach {_down(largest)}: TensorizeConfig({chosen})"
    return f"{message}. Ask for less, or let more layers be compressed{closed_hint(names, config)}"


def _down(ratio: float) -> str:
    """Two decimals, rounded down, so that the ratio can be asked for."""
    return f"{int(ratio * 100) / 100:g}"
