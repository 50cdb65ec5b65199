"""Which layers are compressed, which of them share a tensor train, and with what modes and ranks; changes nothing.

A weight that several layers hold (a tied weight) is one decision: its users share a tensor train, all stay dense, or
are untied on request.
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from comera.convert.config import BTT, TT, TTM, TensorizeConfig
from comera.convert.converter import Converter
from comera.convert.packed import dense_names, packed_converter, packed_leaves
from comera.convert.registry import converters, refusal
from comera.convert.swap import beside, held_besides
from comera.errors import ConversionError, SpecError
from comera.nn.embedding import TTMEmbedding
from comera.nn.ngram import plain_type
from comera.nn.packed import HELD, CompressedParameter
from comera.nn.tensor_train import CompressedLayer
from comera.tt.spec import Spec


@dataclass
class Site:
    """A layer of a registered type that may be converted, or a parameter of a module that reads it itself."""

    names: list[str]  # all that it is registered under; those of a parameter first, then those of its module
    layer: nn.Module
    converter: Converter
    weight: nn.Parameter | None  # the dense weight; a refused layer may have none
    choice: TT | TTM | BTT | None  # the format chosen for it; None leaves it dense
    explicit: bool  # whether an override chose the format
    refused: str | None  # why the layer itself cannot be converted
    note: str = ""  # for the report
    leaf: str = "weight"  # name of the dense weight in the layer

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def dense(self) -> nn.Parameter:
        """The dense weight of a layer that is not refused."""
        assert self.weight is not None
        return self.weight

    @property
    def place(self) -> tuple[nn.Module, str]:
        """The layer and the name of the weight in it."""
        return self.layer, self.leaf

    def __str__(self) -> str:
        rows, cols = self.converter.shape(self.layer)
        each = f"{self.converter.experts} experts " if self.converter.experts > 1 else ""
        return f"{self.name} ({type(self.layer).__name__} {each}{rows} -> {cols})"


@dataclass(frozen=True)
class Group:
    """Sites that share one tensor train of this spec; the format is that of `leader`."""

    sites: tuple[Site, ...]
    leader: Site
    spec: Spec


def all_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module once, in the model's order, with all names that it is registered under."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def open_to(config: TensorizeConfig) -> dict[type[nn.Module], Converter]:
    """The types that a configuration can convert: convolutions only where it has a format for them."""
    return {kind: one for kind, one in converters().items() if one.convolution is None or config.conv is not None}


def open_leaves(module: nn.Module, config: TensorizeConfig) -> dict[str, Converter]:
    """The parameters, of those that a module reads itself, that a configuration can convert: see `open_to`."""
    kind = packed_converter(module)
    if kind is None or (kind.experts and config.experts is None):
        return {}
    return packed_leaves(module)


def closed_hint(modules: Iterable[nn.Module], config: TensorizeConfig) -> str:
    """For errors: that a configuration leaves convolutions or experts dense, if any of these modules is one."""
    hint, closed, modules = "", converters().keys() - open_to(config).keys(), list(modules)
    if any(type(module) in closed for module in modules):
        hint = ". Convolutions stay dense unless they have a format: TensorizeConfig(conv=comera.TT())"
    if any(packed_leaves(module) and not open_leaves(module, config) for module in modules):
        hint += ". Experts stay dense unless they have a format: TensorizeConfig(experts=comera.TT(order=3))"
    return hint


def _candidates(
    names: dict[nn.Module, list[str]], config: TensorizeConfig
) -> Iterator[tuple[nn.Module, str, Converter, list[str]]]:
    """What may be converted: a layer, the name of its weight, how, and all names, as a `Site` has them."""
    known = open_to(config)
    for layer, own in names.items():
        if plain_type(layer) in known:
            yield layer, "weight", known[plain_type(layer)], own
        for leaf, converter in open_leaves(layer, config).items():
            yield layer, leaf, converter, dense_names([f"{name}.{HELD}.{leaf}" for name in own])


def find_sites(names: dict[nn.Module, list[str]], config: TensorizeConfig) -> list[Site]:
    """The layers of registered types with their formats. Raises ConversionError for overrides that do not fit."""
    sites = []
    held = held_besides((own[0], module) for module, own in names.items())
    for layer, leaf, converter, own in _candidates(names, config):
        default, needed, named = _formats(converter, layer, config)
        matches = [p for p in config.overrides if _matches(p, own)]
        refused = refusal(layer, converter, leaf)
        if layer in held and converter.layout is None:  # else it stays the same object
            refused = refused or beside(held[layer])
        weight = layer._parameters.get(leaf)
        site = Site(own, layer, converter, weight, default, bool(matches), refused, note=refused or "", leaf=leaf)
        if matches:
            site.choice = config.overrides[matches[-1]]
            if not isinstance(site.choice, needed | None):
                raise ConversionError(
                    f"the override {matches[-1]!r} gives a {type(site.choice).__name__} to {site}, "
                    f"which needs a {named} or None: narrow the pattern or write a later one for this layer"
                )
        reads = type(layer).__name__ if converter.layout is not None else ""
        reads = "nn.MultiheadAttention" if type(layer) is NonDynamicallyQuantizableLinear else reads
        if isinstance(site.choice, TT) and site.choice.activation and reads and not site.refused:
            site.refused = f"{reads} multiplies by its weight, and with an activation it would have none"
            site.note = site.refused
        if site.choice is None and not refused:
            site.note = "left dense as configured"
        sites.append(site)
    _check_patterns(names, sites, config)
    return sites


def _formats(converter: Converter, layer: nn.Module, config: TensorizeConfig) -> tuple[TT | TTM | BTT | None, Any, str]:
    """What layers of a kind become by default, what they can become, and the names of that."""
    if converter.table is not None:
        return config.embedding, TTM, "TTM"
    kind = packed_converter(layer)
    if converter.layout is not None and kind is not None and kind.experts:
        return config.experts, TT | BTT, "TT, a BTT"
    return (config.linear, TT | BTT, "TT, a BTT") if converter.convolution is None else (config.conv, TT, "TT")


def _matches(pattern: str, names: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _check_patterns(names: dict[nn.Module, list[str]], sites: list[Site], config: TensorizeConfig) -> None:
    """Raise ConversionError for a pattern that matches neither a convertible layer nor a converted one."""
    known = [site.names for site in sites]
    known += [own for module, own in names.items() if isinstance(module, CompressedLayer)]
    known += [dense_names(own) for module, own in names.items() if isinstance(module, CompressedParameter)]
    for pattern in config.overrides:
        if any(_matches(pattern, own) for own in known):
            continue
        flat = [name for own in known for name in own]
        near = difflib.get_close_matches(pattern.strip("*."), flat, n=5, cutoff=0.5) or flat[:5]
        others = [f"{own[0]} ({type(module).__name__})" for module, own in names.items() if _matches(pattern, own)]
        parts = {m: [f"{at}.{HELD}.{leaf}" for leaf in packed_leaves(m) for at in own] for m, own in names.items()}
        closed = [module for module, own in names.items() if _matches(pattern, own + dense_names(parts[module]))]
        matched = f"it matches only {', '.join(others[:3])}, of other types" if others else "it matches no module"
        raise ConversionError(
            f"the override {pattern!r} matches no layer that can be converted: {matched}. "
            f"Near matches: {', '.join(near) or 'none, the model has no such layer'}" + closed_hint(closed, config)
        )


def find_groups(
    names: dict[nn.Module, list[str]], sites: list[Site], config: TensorizeConfig, *, smallest: bool = False
) -> list[Group]:
    """The tensor trains to make; sites that stay dense get the reason as their note.

    smallest: with ranks of 1, for formats whose ranks are not chosen yet.
    Raises SpecError for a format that does not fit its layer.
    """
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in names:
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, leaf))
    by_weight: dict[nn.Parameter, list[Site]] = {}
    if config.tied == "share":
        _follow_tables(sites)
    for site in sites:
        if site.choice is not None and not site.refused:
            by_weight.setdefault(site.dense, []).append(site)

    groups = []
    for weight, chosen in by_weight.items():
        users = {module: (names[module][0], leaf) for module, leaf in holders[weight]}
        for members in _partners(chosen, users, sites, config):
            group = _group(members, smallest)
            if group.spec.ratio > config.min_ratio:
                groups.append(group)
                continue
            for site in members:
                stored = group.spec.numel + group.spec.rank_numel
                site.note = f"would store {stored:,} parameters (min_ratio {config.min_ratio:g}) in {group.spec}"
    return groups


def keeps_padding(sites: Iterable[Site], weight: Tensor) -> bool:
    """Whether the row of padding of a table with this weight stays one like the others.

    It does where it holds values or is an output of a head, too; a row of zeros that only lookups read stays zero. No
    bag reads its own.
    """
    tables = [site.layer for site in sites if site.converter.table is TTMEmbedding]
    row = next((layer.padding_idx for layer in tables if layer.padding_idx is not None), None)
    return row is not None and (_has_head(sites) or (not weight.is_meta and bool(weight[row].any())))  # type: ignore[index]


def note_padding(sites: Iterable[Site], kept: bool) -> None:
    """Note what becomes of the row of padding of a table. kept: see `keeps_padding`."""
    for site in sites:
        if site.converter.table and site.layer.padding_idx is not None and (kept or _has_head(sites)):
            row = site.layer.padding_idx
            what = f"row {row}, of padding, is one like the others" if kept else f"row {row}, of padding, has logit 0"
            site.note = "; ".join(filter(None, [site.note, what]))


def _has_head(sites: Iterable[Site]) -> bool:
    return any(site.converter.table is None for site in sites)


def _follow_tables(sites: list[Site]) -> None:
    """Give layers that are dense by default, and not by an override, the format of a table that holds their weight."""
    open_sites = [site for site in sites if not site.refused]
    formats = {site.dense: site.choice for site in open_sites if site.converter.table and site.choice}
    for site in open_sites:
        if site.choice is None and not site.explicit and site.dense in formats:
            site.choice, site.note = formats[site.dense], ""


def _partners(
    chosen: list[Site], users: dict[nn.Module, tuple[str, str]], sites: list[Site], config: TensorizeConfig
) -> Iterator[list[Site]]:
    """Split the sites chosen among the `users` of one weight into those that share a tensor train; note their ties."""
    dense = [site.name for site in sites if site.leaf == users.get(site.layer, ("", ""))[1] and site not in chosen]
    kept = f"untied from {', '.join(dense)} (left dense)" if dense else ""
    if config.tied == "untie":
        for site in chosen:
            others = [name for name, _ in users.values() if name != site.name and name not in dense]
            site.note = "; ".join(filter(None, [f"untied from {', '.join(others)}" if others else "", kept]))
            yield [site]
        return
    obstacle = _obstacle(chosen, users, sites)
    for site in chosen:
        if obstacle:
            site.note = f"its weight is tied: {obstacle}; tied='untie' would convert it alone"
        else:
            site.note = "; ".join(filter(None, [f"tied to {chosen[0].name}" if site is not chosen[0] else "", kept]))
    if not obstacle:
        yield chosen


def _obstacle(chosen: list[Site], users: dict[nn.Module, tuple[str, str]], sites: list[Site]) -> str | None:
    """Why the users of one weight cannot share a tensor train, or None."""
    fit = {site.place for site in sites if not site.refused}
    for module, (name, leaf) in users.items():
        if (module, leaf) not in fit:
            return f"{name or 'the model itself'} ({type(module).__name__}.{leaf}) uses it and cannot be converted"
    if len(chosen) > 1 and any(site.converter.layout for site in chosen):
        return f"{' and '.join(site.name for site in chosen)} use it, which multiply by it themselves"
    tables = [site for site in chosen if site.converter.table]
    # A table and nn.Linear both store (out, in); a layer that stores (in, out) would need the cores in reverse.
    if len({site.converter.in_first for site in chosen}) > 1:
        return f"{chosen[0].name} and others store it transposed to each other"
    if len({site.layer.padding_idx for site in tables}) > 1:
        return "the tables that use it have different padding_idx"
    return None


def _group(members: list[Site], smallest: bool) -> Group:
    """The tensor train for sites that share a weight: a table's TTM if there is one; overrides take precedence."""
    deciders = [site for site in members if site.converter.table] or members
    leader = next((site for site in deciders if site.explicit), deciders[0])
    for site in deciders:
        if site.explicit and site.choice != leader.choice:
            raise ConversionError(
                f"{leader} and {site} share a weight, but the overrides give them {leader.choice} and {site.choice}: "
                "give both the same, or set tied='untie'"
            )
    assert leader.choice is not None
    choice = replace(leader.choice, rank=1) if smallest else leader.choice
    try:
        return Group(tuple(members), leader, _spec(leader, choice))
    except SpecError as error:
        raise SpecError(f"{leader}: {error}") from error


def _spec(site: Site, choice: Any) -> Spec:
    """Modes and ranks that a format has for a site."""
    rows, cols = site.converter.shape(site.layer)
    layout, spec = site.converter.layout, None
    if site.converter.convolution is not None:
        spec = choice.spec(rows, cols, site.layer.kernel_size)
    elif layout is None or layout.experts == 1:
        spec = choice.spec(rows, cols)
    elif isinstance(choice, BTT):
        spec = choice.spec(rows, cols, layout.experts)
    else:
        spec = choice.spec(layout.experts * rows, cols, (layout.experts,))
    if layout is not None:
        layout.check(spec)
    found: Spec = spec
    return found


def why_nothing(model: nn.Module, sites: list[Site], config: TensorizeConfig) -> str:
    """The error message for a model in which no layer is compressed."""
    kind, hint = type(model).__name__, closed_hint(model.modules(), config)
    if not sites:
        types = ", ".join(layer_type.__name__ for layer_type in open_to(config))
        return (
            f"nothing to convert in {kind}: expected layers whose type is exactly one of {types}, got none; "
            f"register_converter adds others{hint}"
        )
    reasons = "; ".join(f"{site}: {site.note}" for site in sites[:5])
    more = f" (and {len(sites) - 5} more)" if len(sites) > 5 else ""
    return (
        f"nothing to convert in {kind}: all of its {len(sites)} layers stay dense. {reasons}{more}. "
        f"Lower the rank or min_ratio, or change the overrides{hint}"
    )
