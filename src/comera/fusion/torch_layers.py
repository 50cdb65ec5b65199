"""What `fuse_` knows of PyTorch's own transformer layers.

Their attention stays torch's. So does the fast path that an encoder layer takes without gradients in evaluation: its
forward runs as it is, on a stand-in that shows it the weights of the layer.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from comera.fusion.mlp import MLP
from comera.fusion.pre_norm import PreNorm
from comera.fusion.registry import register_block


def _encoder_end(layer: Any, input: Tensor, output: Tensor) -> Tensor:
    return layer.dropout2(output)  # type: ignore[no-any-return]


def _decoder_end(layer: Any, input: Tensor, output: Tensor) -> Tensor:
    return layer.dropout3(output)  # type: ignore[no-any-return]


_ENCODER_MLP = MLP(
    method="_ff_block",
    ups=("linear1",),
    activation="activation",
    down="linear2",
    finish=_encoder_end,
    dropout="dropout",
)
_DECODER_MLP = replace(_ENCODER_MLP, finish=_decoder_end)
# The same names whether norms come first or not; in the latter case every norm follows a sum.
_ENCODER_SUMS = PreNorm("norm1", ("_sa_block.dropout1", "_ff_block.dropout2"), "norm2", switch="norm_first")
_DECODER_SUMS = PreNorm(
    "norm1",
    ("_sa_block.dropout1", "_mha_block.dropout2", "_ff_block.dropout3"),
    "norm2",
    switch="norm_first",
    others=("norm3",),
)
register_block(nn.TransformerEncoderLayer, _ENCODER_MLP, _ENCODER_SUMS)
register_block(nn.TransformerDecoderLayer, _DECODER_MLP, _DECODER_SUMS)
