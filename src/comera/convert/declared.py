"""What a Hugging Face model declares of its tables and does with them, kept valid across a swap of layers: ties by name
(`_tied_weights_keys`, target: source), and `resize_token_embeddings`.

`tie_weights()` and `save_pretrained()` of such a model read the declaration and would fail if it named weights that
have become tensor trains. Their own resizing swaps the table before it finds that it cannot swap the head. This module
works on the attributes alone; it does not import transformers.
"""

import re
from collections.abc import Mapping
from itertools import cycle
from typing import Any, NamedTuple

from torch import nn

from comera.errors import ConversionError
from comera.nn.adapted import Adapted
from comera.nn.ngram import NGramEmbedding
from comera.nn.tensor_train import CompressedLayer, TensorTrain


class DeclaredTies(NamedTuple):
    """Declaration of one model or submodel: pairs target -> source of full parameter names, and the swapped layers.

    hidden: declared pairs that name no parameters, as those of layers that PEFT has put a wrapper around.
    """

    model: Any
    pairs: Mapping[str, str]
    hidden: Mapping[str, str]
    swapped: frozenset[str]

    def layers_of(self, parameter: str) -> tuple[str, list[str]]:
        """Path of the layer that has this parameter as its weight, dense or in cores, and those of the swapped layers
        there: itself, or what its wrapper holds."""
        layer = re.sub(r"\.(weight|tt\..*)$", "", parameter)
        if layer == parameter:
            return layer, []
        return layer, [p for p in self.swapped if p == layer] or [p for p in self.swapped if p.startswith(f"{layer}.")]


def read_ties(model: nn.Module, swapped: Mapping[nn.Module, nn.Module]) -> list[DeclaredTies]:
    """The declarations of a model and its submodels. Call it before the swap."""
    found = []
    for module in model.modules():
        pairs, hidden = _expanded(module)
        if pairs or hidden:
            paths = frozenset(path for path, m in module.named_modules(remove_duplicate=False) if m in swapped)
            if paths:
                found.append(DeclaredTies(module, pairs, hidden, paths))
    return found


def _expanded(module: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Pairs of parameter names that a model declares as tied, and as declared those that name none.

    As `get_expanded_tied_weights_keys` of transformers, which raises if there is one of the latter.
    """
    pairs: dict[str, str] = {}
    hidden: dict[str, str] = {}
    declared = getattr(module, "_tied_weights_keys", None)
    if not hasattr(module, "get_expanded_tied_weights_keys") or not isinstance(declared, Mapping):
        return pairs, hidden
    if not getattr(module.config, "tie_word_embeddings", False):
        return pairs, hidden
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    names = sorted({name for name, _ in tensors})
    plain = _are_plain(declared)
    for target, source in declared.items():
        targets, sources = (
            [name for name in names if (name == key if plain else re.search(f"^{key}", name))]
            for key in (target, source)
        )
        if not targets or not sources or len(targets) % len(sources):
            hidden[target] = source
        else:
            pairs |= {one: pairs.get(other, other) for one, other in zip(targets, cycle(sources), strict=False)}
    return pairs, hidden


def rewrite_ties(model: nn.Module, declared: list[DeclaredTies]) -> None:
    """Declare the ties again after the swap: shared tensor trains under their names, without ties that were cut. A
    model of which all ties are cut is none with tied tables any more: its config says so."""
    for ties in declared:
        pairs: dict[str, str] = {}
        trains: dict[str, str] = {}
        kept: dict[str, str] = {}
        hidden = {_plain(target): (target, source) for target, source in ties.hidden.items()}
        for target, source in (*ties.pairs.items(), *((name, _plain(source)) for name, (_, source) in hidden.items())):
            (at, here), (by, there) = ties.layers_of(target), ties.layers_of(source)
            if not here and not there:
                if target in hidden:
                    kept |= [hidden[target]]
                else:
                    pairs[target] = source
                continue
            held = [{_held(ties.model.get_submodule(path)) for path in paths} for paths in (here, there)]
            for shared in held[0] & held[1]:
                if isinstance(shared, TensorTrain):
                    trains[f"{at}.tt"] = f"{by}.tt"
                else:
                    pairs[f"{at}.weight"] = f"{by}.weight"
        same = not trains and pairs | kept == ties.model._tied_weights_keys
        if not same and (trains or not _are_plain(pairs | kept)):  # it reads patterns, and from the start of a name
            pairs = {_exactly(target): _exactly(source) for target, source in pairs.items()}
            pairs |= {rf"{re.escape(target)}\.": rf"{re.escape(source)}\." for target, source in trains.items()}
        ties.model._tied_weights_keys = pairs | kept
        if not pairs and not kept:
            ties.model.config.tie_word_embeddings = False
    if declared:
        for module in model.modules():
            if "all_tied_weights_keys" in vars(module):
                module.all_tied_weights_keys = {  # type: ignore[assignment]
                    f"{path}.{target}".removeprefix("."): f"{path}.{source}".removeprefix(".")
                    for path, part in module.named_modules(remove_duplicate=False)
                    for target, source in _expanded(part)[0].items()
                }


def _held(layer: Any) -> TensorTrain | nn.Parameter:
    """What ties share: the tensor train of a compressed layer, the weight of a dense one."""
    held: TensorTrain | nn.Parameter = layer.tt if isinstance(layer, CompressedLayer) else layer.weight
    return held


def _are_plain(declared: Mapping[str, str]) -> bool:
    """Whether transformers takes all of these for names, and none for a pattern."""
    return all(re.match(r"^[A-Za-z0-9_\.]+(weight)|(bias)$", name) for pair in declared.items() for name in pair)


def _exactly(name: str) -> str:
    return f"{re.escape(name)}$"


def _plain(pattern: str) -> str:
    """The name, or the start of names, that `rewrite_ties` has made a pattern of; names stay the same."""
    return re.sub(r"\\(.)", r"\1", pattern.removesuffix("$"))


_CHANGED = CompressedLayer | NGramEmbedding | Adapted  # layers that their models cannot resize


class Resize:
    """An instance's `resize_token_embeddings`. It holds the model, so that a copy or pickle refers to its own."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **options: Any) -> Any:
        """As that of the model's class, which does it if table and head are dense.

        Raises ConversionError if either would have to change while it is compressed; the model is unchanged.
        """
        model, table = self.model, self.model.get_input_embeddings()
        layers = {"table": table, "head": model.get_output_embeddings()}
        compressed = [name for name, layer in layers.items() if isinstance(layer, _CHANGED)]
        rows = table.num_embeddings
        wanted = rows if new_num_tokens is None else new_num_tokens
        wanted += -wanted % (pad_to_multiple_of or 1)
        if not compressed:
            return type(model).resize_token_embeddings(model, new_num_tokens, pad_to_multiple_of, **options)
        if wanted != rows:
            raise ConversionError(
                f"resize_token_embeddings: expected {rows} tokens, got {wanted}: the {' and '.join(compressed)} of "
                f"{type(model).__name__} cannot be resized while compressed, adapted or with n-grams. Resize before "
                "tensorize_, ngrams_ and adapt_, or merge_adapters_ and materialize_ the model, resize it, and "
                "tensorize_ it again with init='decompose'"
            )
        return table


def guard_resizing_(model: nn.Module) -> None:
    """Let models and submodels with compressed or adapted layers refuse what they cannot do, others be as they were."""
    for module in model.modules():
        if hasattr(type(module), "resize_token_embeddings"):
            if any(isinstance(part, _CHANGED) for part in module.modules()):
                module.resize_token_embeddings = Resize(module)  # type: ignore[assignment]
            else:
                vars(module).pop("resize_token_embeddings", None)
