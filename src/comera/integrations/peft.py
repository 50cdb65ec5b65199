"""PEFT: LoRA adapters on compressed layers.

An adapter adds its product to what the tensor train computes. It cannot be merged into a tensor train, whose ranks
would have to grow for it: keep the adapter beside the model, or `materialize_` the model and then merge.
"""

from comera.extras import require

require("comera.integrations.peft", "peft", "peft")

from typing import Any

from peft import LoraConfig
from peft.tuners.lora import layer as lora
from torch import Tensor, nn

from comera.convert.registry import converters
from comera.errors import ConversionError
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.tensor_train import CompressedLayer

__all__ = ["with_compressed"]


def with_compressed(config: LoraConfig) -> LoraConfig:
    """Let a LoRA configuration target compressed layers too, which PEFT does not know; returns it.

    A configuration that is read from a folder needs the same, since PEFT does not save this:
    `PeftModel.from_pretrained(model, folder, config=with_compressed(LoraConfig.from_pretrained(folder)))`.

    Args:
        config: its `target_modules` may name layers that `tensorize_` has compressed.

    Returns:
        The same configuration.

    Example:
        >>> import torch, comera
        >>> from peft import LoraConfig, get_peft_model
        >>> from comera.integrations.peft import with_compressed
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=8)))
        >>> tuned = get_peft_model(model, with_compressed(LoraConfig(r=4, target_modules=["0", "2"])))
        >>> tuned.get_nb_trainable_parameters()[0]
        2560
    """
    config._register_custom_module(
        {TTLinear: _Linear, BTTLinear: _Linear, TTMProjection: _Linear, TTMEmbedding: _Embedding}
    )
    return config


class _Beside:
    """An adapter beside a compressed layer."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        layer: Any = module
        if isinstance(layer, TTMEmbedding | nn.Embedding):
            return layer.num_embeddings, layer.embedding_dim
        return layer.in_features, layer.out_features

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge into the dense weight of a materialized layer; raises ConversionError while it is compressed."""
        layer: Any = self
        if isinstance(layer.get_base_layer(), CompressedLayer):
            raise ConversionError(
                "an adapter cannot be merged into a tensor train: save it beside the model (save_pretrained), or call "
                "comera.materialize_(model) first"
            )
        super().merge(safe_merge, adapter_names)  # type: ignore[misc]


class _Linear(_Beside, lora.Linear):
    @property
    def fan_in_fan_out(self) -> bool:
        """Whether the base layer stores its weight transposed, as a materialized Conv1D of GPT-2 does."""
        layer: Any = self
        converter = converters().get(type(layer.get_base_layer()))
        return converter is not None and converter.in_first

    @fan_in_fan_out.setter
    def fan_in_fan_out(self, value: bool) -> None:
        """PEFT sets it, for dense layers of the type that it was given."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output and that of its adapters."""
        self._tell_magnitudes()
        output: Tensor = super().forward(x, *args, **kwargs)
        return output

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As that of `_Beside`."""
        self._tell_magnitudes()
        super().merge(safe_merge, adapter_names)

    def _tell_magnitudes(self) -> None:
        """DoRA's norms of the weight hold `fan_in_fan_out` of when they were made."""
        layer: Any = self
        for magnitude in layer.lora_magnitude_vector.values():
            magnitude.fan_in_fan_out = self.fan_in_fan_out


class _Embedding(_Beside, lora.Embedding):
    def _embed(self, input: Tensor, weight: Tensor, input_fn: Any = None, output_fn: Any = None) -> Tensor:
        """Rows of an adapter's table; PEFT looks them up with options of the base layer that only dense tables have."""
        layer: Any = self
        base = layer.get_base_layer()
        if not isinstance(base, TTMEmbedding):
            dense: Tensor = super()._embed(input, weight, input_fn, output_fn)
            return dense
        ids = input if input_fn is None else input_fn((input,))
        rows: Tensor = nn.functional.embedding(ids, weight, padding_idx=base.padding_idx)
        return rows if output_fn is None else output_fn(rows)
