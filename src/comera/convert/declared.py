"""What a Hugging Face model declares of its tables and does with them, kept valid across a swap of layers: ties by name
(`_tied_weights_keys`, target: source), and `resize_token_embeddings`.

`tie_weights()` and `save_pretrained()` of such a model read the declaration and would fail if it named weights that
have become tensor trains. Their own resizing swaps the table before it finds that it cannot swap the head. This module
works on the attributes alone; it does not import transformers.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from comera.errors import ConversionError
from comera.nn.ngram import NGramEmbedding
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
                layers = [ties.model.get_submodule(path) for path in paths]
                # what ties share: the tensor train of a compressed layer, the weight of a dense one
                names = ["tt" if isinstance(layer, CompressedLayer) else "weight" for layer in layers]
                a, b = map(getattr, layers, names)
                if a is b:
                    kind = trains if names[0] == "tt" else pairs
                    kind[f"{paths[0]}.{names[0]}"] = f"{paths[1]}.{names[1]}"
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
        compressed = [name for name, layer in layers.items() if isinstance(layer, CompressedLayer | NGramEmbedding)]
        rows = table.num_embeddings
        wanted = rows if new_num_tokens is None else new_num_tokens
        wanted += -wanted % (pad_to_multiple_of or 1)
        if not compressed:
            return type(model).resize_token_embeddings(model, new_num_tokens, pad_to_multiple_of, **options)
        if wanted != rows:
            raise ConversionError(
                f"resize_token_embeddings: expected {rows} tokens, got {wanted}: the {' and '.join(compressed)} of "
                f"{type(model).__name__} cannot be resized while compressed or with n-grams. Resize before tensorize_ "
                "and ngrams_, or materialize_ the model, resize it, and tensorize_ it again with init='decompose'"
            )
        return table


def guard_resizing_(model: nn.Module) -> None:
    """Let models and submodels with compressed layers refuse what they cannot do, and others be as they were."""
    for module in model.modules():
        if hasattr(type(module), "resize_token_embeddings"):
            if any(isinstance(part, CompressedLayer | NGramEmbedding) for part in module.modules()):
                module.resize_token_embeddings = Resize(module)  # type: ignore[assignment]
            else:
                vars(module).pop("resize_token_embeddings", None)
