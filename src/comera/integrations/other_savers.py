"""Libraries whose `from_pretrained` would read a compressed model back as a dense one without weights: they refuse to
save it, and say what saves it.

diffusers and huggingface_hub's mixin make the class anew and load what has a name in it: tensor trains are skipped,
and dense weights stay as they were made, without a word. `import comera` registers this; it takes effect once one of
these libraries is imported.
"""

import functools
import sys
from typing import Any

from torch import nn

from comera.errors import ConversionError
from comera.nn.tensor_train import CompressedLayer

# module -> its class with a `save_pretrained`
SAVERS = {"huggingface_hub.hub_mixin": "ModelHubMixin", "diffusers.models.modeling_utils": "ModelMixin"}


def refuse_compressed_(saver: type) -> None:
    """Let the `save_pretrained` of a class refuse models with compressed layers, before it writes anything."""
    own = saver.save_pretrained  # type: ignore[attr-defined]
    if hasattr(own, "_refuses_compressed"):
        return

    @functools.wraps(own)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, nn.Module) and any(isinstance(module, CompressedLayer) for module in self.modules()):
            raise ConversionError(
                f"expected a dense model, got a {type(self).__name__} with compressed layers: its own from_pretrained "
                "would give dense layers without their weights. comera.save_pretrained(model, folder) saves it, and "
                f"comera.load_pretrained({type(self).__name__}(...), folder) loads it into a new one; or make it dense "
                "first with comera.materialize_(model)"
            )
        return own(self, *args, **kwargs)

    save_pretrained._refuses_compressed = True  # type: ignore[attr-defined]
    saver.save_pretrained = save_pretrained  # type: ignore[attr-defined]


def refuse_compressed_everywhere_() -> None:
    """`refuse_compressed_` for the libraries that the program has imported."""
    for module, name in SAVERS.items():
        saver = getattr(sys.modules.get(module), name, None)
        if saver is not None:
            refuse_compressed_(saver)
