"""What stands in for methods of other libraries' models that would go wrong while layers are compressed.

`resize_token_embeddings` of transformers swaps the table before it finds that it cannot swap the head. `save_pretrained`
of diffusers and of huggingface_hub's mixin writes what their `from_pretrained` reads as a dense model without weights,
and says so in a log at most. This module works on attributes alone; it imports none of them.
"""

from typing import Any

from torch import nn

from comera.errors import CheckpointError, ConversionError
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
        compressed = [name for name, layer in layers.items() if isinstance(layer, CompressedLayer)]
        rows = table.num_embeddings
        wanted = rows if new_num_tokens is None else new_num_tokens
        wanted += -wanted % (pad_to_multiple_of or 1)
        if not compressed:
            return type(model).resize_token_embeddings(model, new_num_tokens, pad_to_multiple_of, **options)
        if wanted != rows:
            raise ConversionError(
                f"resize_token_embeddings: expected {rows} tokens, got {wanted}: the {' and '.join(compressed)} of "
                f"{type(model).__name__} cannot be resized while compressed. Resize before tensorize_, or materialize_ "
                "the model, resize it, and tensorize_ it again with init='decompose'"
            )
        return table


class Save:
    """An instance's `save_pretrained`, where what it writes could not be read."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Raises CheckpointError."""
        kind = type(self.model).__name__
        raise CheckpointError(
            f"expected a dense model to save, got a {kind} with compressed layers, which {kind}.from_pretrained would "
            "read as a dense model without weights: write it with comera.save_pretrained(model, folder), and read it "
            f"into a new {kind} with comera.load_pretrained(model, folder)"
        )


_UNREADABLE = {("diffusers", "ModelMixin"), ("huggingface_hub", "ModelHubMixin")}  # package and name of a base class


def guard_methods_(model: nn.Module) -> None:
    """Let models and submodels with compressed layers refuse what they cannot do, and others be as they were."""
    for module in model.modules():
        bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(module).__mro__}
        guards = {"save_pretrained": Save} if bases & _UNREADABLE else {}
        guards |= {"resize_token_embeddings": Resize} if hasattr(type(module), "resize_token_embeddings") else {}
        compressed = bool(guards) and any(isinstance(part, CompressedLayer) for part in module.modules())
        for name, guard in guards.items():
            if compressed:
                setattr(module, name, guard(module))
            else:
                vars(module).pop(name, None)
