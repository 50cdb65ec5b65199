"""Ties that a Hugging Face model declares by name (`_tied_weights_keys`, target: source), kept valid across a swap.

`tie_weights()` and `save_pretrained()` of such a model read the declaration and would fail if it named weights that
have become tensor trains. This module works on the attributes alone; it does not import transformers.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from comera.nn.tensor_train import CompressedLayer


class DeclaredTies(NamedTuple):
    """Declaration of one model or submodel: pairs target -> source of full parameter names, and the swapped layers."""

    model: Any
    pairs: Mapping[str, str]
    swapped: frozenset[str]

    def layer_of(self, parameter: str) -> str | None:
        """Path of the swapped layer that has this parameter as its weight, dense or in cores; None for any other."""
        for path in self.swapped:
            leaf = parameter.removeprefix(path + ".")
            if leaf != parameter and (leaf == "weight" or leaf.startswith("tt.")):
                return path
        return None


def read_ties(model: nn.Module, swapped: Mapping[nn.Module, nn.Module]) -> list[DeclaredTies]:
    """The declarations of a model and its submodels. Call it before the swap."""
    found = []
    for module in model.modules():
        expand = getattr(module, "get_expanded_tied_weights_keys", None)
        if expand is not None and isinstance(getattr(module, "_tied_weights_keys", None), Mapping):
            pairs = expand(all_submodels=False)
            paths = frozenset(path for path, m in module.named_modules(remove_duplicate=False) if m in swapped)
            if pairs and paths:
                found.append(DeclaredTies(module, pairs, paths))
    return found


def rewrite_ties(model: nn.Module, declared: list[DeclaredTies]) -> None:
    """Declare the ties again after the swap: shared tensor trains under their names, without ties that were cut. A
    model of which all ties are cut is none with tied tables any more: its config says so."""
    for ties in declared:
        pairs: dict[str, str] = {}
        trains: dict[str, str] = {}
        for target, source in ties.pairs.items():
            paths = ties.layer_of(target), ties.layer_of(source)
            if paths == (None, None):
                pairs[target] = source
            elif paths[0] is not None and paths[1] is not None:
                a, b = (_weight(ties.model.get_submodule(path)) for path in paths)
                if a[1] is b[1]:
                    kind = trains if a[0] == "tt" else pairs
                    kind[f"{paths[0]}.{a[0]}"] = f"{paths[1]}.{b[0]}"
        if trains or ties.pairs != ties.model._tied_weights_keys:  # it reads patterns, and from the start of a name
            pairs = {_exactly(target): _exactly(source) for target, source in pairs.items()}
            pairs |= {rf"{re.escape(target)}\.": rf"{re.escape(source)}\." for target, source in trains.items()}
        ties.model._tied_weights_keys = pairs
        if not pairs:
            ties.model.config.tie_word_embeddings = False
    if declared:
        for module in model.modules():
            if "all_tied_weights_keys" in vars(module):
                expand: Any = module.get_expanded_tied_weights_keys
                module.all_tied_weights_keys = expand(all_submodels=True)


def _exactly(name: str) -> str:
    return f"{re.escape(name)}$"


def _weight(layer: nn.Module) -> tuple[str, Any]:
    """Name and object that ties share: the tensor train of a compressed layer, the weight of a dense one."""
    return ("tt", layer.tt) if isinstance(layer, CompressedLayer) else ("weight", layer.weight)
