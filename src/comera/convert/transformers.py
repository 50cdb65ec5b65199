"""Types of Hugging Face's library that `tensorize_` converts, by module and name: it imports nothing of theirs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from comera.convert.converter import EMBEDDING, LINEAR, Converter

_CONV1D = Converter(
    shape=lambda layer: (layer.nx, layer.nf),
    std=lambda layer: 0.02,
    build=lambda layer: layer.dense_type(layer.out_features, layer.in_features),
    in_first=True,
)
_FALCON = replace(LINEAR, build=lambda layer: layer.dense_type(layer.in_features, layer.out_features))


def _dense_scaled(layer: Any) -> Any:
    scale = float(layer.embed_scale)
    return layer.dense_type(layer.num_embeddings, layer.embedding_dim, layer.padding_idx, embed_scale=scale)


def _dense_rounded(layer: Any) -> Any:
    dense = _dense_scaled(layer)
    dense.embed_scale = layer.embed_scale.to(layer.tt.cores[0].device)
    return dense


def _rounded_scale(layer: Any) -> Tensor:
    """Gemma rounds its scale to the dtype of the rows; made from the number, since the buffer may be on meta."""
    return torch.tensor(layer.scalar_embed_scale, device="cpu")


_SCALED = replace(EMBEDDING, build=_dense_scaled, embed_scale=lambda layer: layer.embed_scale)
_ROUNDED = replace(EMBEDDING, build=_dense_rounded, embed_scale=_rounded_scale, holds=frozenset({"embed_scale"}))

# folder under transformers.models -> what its class ...ScaledWordEmbedding begins with
_SCALED_IN = {
    "bart": "Bart",
    "bigbird_pegasus": "BigBirdPegasus",
    "biogpt": "BioGpt",
    "blenderbot": "Blenderbot",
    "m2m_100": "M2M100",
    "mbart": "MBart",
    "nllb_moe": "NllbMoe",
    "pegasus_x": "PegasusX",
    "plbart": "PLBart",
    "pp_formulanet": "PPFormulaNet",
    "seamless_m4t": "SeamlessM4T",
    "seamless_m4t_v2": "SeamlessM4Tv2",
    "trocr": "TrOCR",
    "xglm": "XGLM",
}
_ROUNDED_IN = {
    "diffusion_gemma": "DiffusionGemmaText",
    "embedding_gemma2": "EmbeddingGemma2Text",
    "gemma": "GemmaText",
    "gemma2": "Gemma2Text",
    "gemma3": "Gemma3Text",
    "gemma3n": "Gemma3nText",
    "gemma4": "Gemma4Text",
    "gemma4_unified": "Gemma4UnifiedText",
    "minicpm3": "MiniCPM3",
    "vaultgemma": "VaultGemmaText",
}


def _in_models(prefixes: Mapping[str, str], converter: Converter) -> dict[tuple[str, str], Converter]:
    return {
        (f"transformers.models.{folder}.modeling_{folder}", f"{prefix}ScaledWordEmbedding"): converter
        for folder, prefix in prefixes.items()
    }


CONVERTERS: Mapping[tuple[str, str], Converter] = {
    ("transformers.pytorch_utils", "Conv1D"): _CONV1D,
    ("transformers.models.falcon.modeling_falcon", "FalconLinear"): _FALCON,
    **_in_models(_SCALED_IN, _SCALED),
    **_in_models(_ROUNDED_IN, _ROUNDED),
}
