"""Which layers of a model get an adapter, and which modules are trained besides; changes nothing."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import sqrt

import torch
from torch import Tensor, nn

from comera.convert.registry import converters, refusal
from comera.errors import ConversionError
from comera.nn.embedding import TTMProjection
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.tensor_train import TensorTrain
from comera.tt.spec import TTSpec

_COMPRESSED = (TTLinear, BTTLinear, TTMProjection)
Names = str | Sequence[str]


@dataclass(frozen=True, eq=False)
class Site:
    """A linear layer that may get an adapter, by all of its names; or why it cannot."""

    names: Sequence[str]
    layer: nn.Module
    refused: str | None

    @property
    def shape(self) -> tuple[int, int]:
        """(in_features, out_features)."""
        layer = self.layer
        if isinstance(layer, _COMPRESSED):
            return layer.in_features, layer.out_features
        return converters()[type(layer)].shape(layer)

    @property
    def in_first(self) -> bool:
        """Whether its dense weight is stored as (in, out)."""
        return not isinstance(self.layer, _COMPRESSED) and converters()[type(self.layer)].in_first

    def train(self, spec: TTSpec, threshold: float = 1e-2, generator: torch.Generator | None = None) -> TensorTrain:
        """An adapter that starts at zero, in the dtype of the layer and on its device."""
        like = next(self.layer.parameters())
        std = 1 / sqrt(3 * spec.in_features)  # as nn.Linear draws its weight
        return TensorTrain(
            spec,
            init_std=std,
            threshold=threshold,
            dtype=like.dtype,
            device=like.device,
            generator=generator,
            starts_at_zero=True,
        )


def check_apart(
    names: Mapping[nn.Module, Sequence[str]], layers: Sequence[nn.Module], heads: Mapping[str, nn.Module]
) -> None:
    """Raise ConversionError for a layer that is adapted and trained itself."""
    for head, module in heads.items():
        both = next((layer for layer in layers if layer in set(module.modules())), None)
        if both is not None:
            raise ConversionError(
                f"expected layers that are adapted or trained whole, got {names[both][0]} in targets and in {head} of "
                "also_train: take it out of one of them"
            )


def find_sites(names: Mapping[nn.Module, Sequence[str]]) -> Iterator[Site]:
    """Every linear layer of a model that has no adapters, in its order."""
    for layer, own in names.items():
        if isinstance(layer, _COMPRESSED) and type(layer) in _COMPRESSED:
            yield Site(own, layer, "its forward was replaced" if "forward" in vars(layer) else None)
        elif type(layer) in converters():
            converter = converters()[type(layer)]
            if converter.table is None and converter.convolution is None:
                yield Site(own, layer, refusal(layer, converter))
        elif isinstance(layer, nn.Linear):
            yield Site(own, layer, "a subclass of a known layer; register_converter adds it")


def patterns_of(what: str, given: Names) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ConversionError(f"{what}: expected a glob pattern of names such as '*.q_proj', or several, got {given!r}")
    return patterns


def _matches(pattern: str, own: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in own)


def matching_sites(names: Mapping[nn.Module, Sequence[str]], patterns: Sequence[str]) -> list[Site]:
    """The linear layers that the patterns match. Raises ConversionError for one without a layer that can be adapted."""
    sites = list(find_sites(names))
    for pattern in patterns:
        found = [site for site in sites if _matches(pattern, site.names)]
        if any(not site.refused for site in found):
            continue
        if found:
            why = "; ".join(f"{site.names[0]} ({type(site.layer).__name__}): {site.refused}" for site in found[:5])
            raise ConversionError(f"targets: {pattern!r} matches no layer that can be adapted: {why}")
        others = [f"{own[0]} ({type(m).__name__})" for m, own in names.items() if _matches(pattern, own)]
        flat = [name for site in sites for name in site.names]
        ends = [name for name in flat if name.endswith(f".{pattern}")]
        near = ends or difflib.get_close_matches(pattern.strip("*."), flat, n=5, cutoff=0.5) or flat
        raise ConversionError(
            f"targets: expected a pattern that matches linear layers, got {pattern!r}, which matches "
            f"{f'only {others[0]}' if others else 'nothing'}: patterns match whole names, "
            f"{f'as {chr(39)}*.{pattern}{chr(39)} would. ' if ends else ''}"
            f"Linear layers: {', '.join(near[:5]) or 'none, the model has no such layer'}"
        )
    return [site for site in sites if any(_matches(pattern, site.names) for pattern in patterns)]


def find_heads(names: Mapping[nn.Module, Sequence[str]], patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The outermost modules with parameters that the patterns of `also_train` match, by name."""
    heads: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for pattern in patterns:
        found = [m for m, own in names.items() if _matches(pattern, own) and any(True for _ in m.parameters())]
        if not found:
            flat = [own[0] for own in names.values()]
            near = difflib.get_close_matches(pattern.strip("*."), flat, n=5, cutoff=0.5) or flat[1:6]
            raise ConversionError(
                f"also_train: expected a pattern that matches modules with parameters, got {pattern!r}, which matches "
                f"none: names are such as {', '.join(near)}"
            )
    for module, own in names.items():  # parents come before their children
        named = any(_matches(pattern, own) for pattern in patterns) and any(True for _ in module.parameters())
        if named and module not in inside:
            heads[own[0]] = module
            inside.update(module.modules())
    for name, module in heads.items():
        odd = no_tensors(name, module)
        if odd:
            raise ConversionError(
                f"also_train: {odd[0]}, which no file of adapters can hold: let its get_extra_state give a tensor, or "
                "train a module inside it"
            )
    return heads


def no_tensors(name: str, module: nn.Module) -> list[str]:
    """What the state of a module has besides tensors (by `get_extra_state`), each as an error begins."""
    state = module.state_dict(prefix=f"{name}." if name else "", keep_vars=True)
    return [
        f"expected a state of tensors, got {key}, a {type(value).__name__}"
        for key, value in state.items()
        if not isinstance(value, Tensor)
    ]
