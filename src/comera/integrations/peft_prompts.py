"""PEFT's prompts before a compressed token embedding: `import comera` sees to it once PEFT has been imported."""

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

from peft import PeftModel
from torch import Tensor, nn

from comera.nn.tensor_train import CompressedLayer


def find_compressed_tables_() -> None:
    """Let PEFT find a compressed token embedding, where it looks for a parameter with a row for each token."""
    own = PeftModel._setup_prompt_encoder
    if hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def setup(self: Any, adapter_name: str) -> None:
        find = getattr(self.base_model, "get_input_embeddings", None)
        table: Any = None if find is None else find()
        parts = [self.base_model, *self.base_model.children()] if isinstance(table, CompressedLayer) else []
        for part in parts:  # where PEFT looks: among the parameters of a part by name
            name = next((name for name, module in part.named_modules() if module is table), None)
            if name is not None:
                part.named_parameters = partial(_and_the_table, part.named_parameters, f"{name}.weight", table)
        try:
            own(self, adapter_name)
        finally:
            for part in parts:
                vars(part).pop("named_parameters", None)

    PeftModel._setup_prompt_encoder = setup  # type: ignore[method-assign]


def _and_the_table(
    named: Callable[..., Iterator[tuple[str, Tensor]]], name: str, table: nn.Module, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, Any]]:
    yield from named(*args, **kwargs)
    yield name, table.weight
