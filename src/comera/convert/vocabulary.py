"""What stands in for `resize_token_embeddings` of a Hugging Face model with compressed layers.

Their own method swaps the table before it finds that it cannot swap the head. This module works on attributes alone; it
does not import transformers.
"""

from typing import Any

from torch import nn

from comera.errors import ConversionError
from comera.nn.ngram import NGramEmbedding
from comera.nn.tensor_train import CompressedLayer


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
