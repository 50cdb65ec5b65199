"""What `fuse_` knows of PyTorch's own transformer layers.

Their attention stays torch's. So does the fast path that an encoder layer takes without gradients in evaluation: its
forward runs as it is, on a stand-in that shows it the weights of the layer.
"""

from comera.fusion.mlp import MLP
from comera.fusion.registry import register_block
from comera.fusion.residual_blocks import PreNorm

_MLP = MLP("_ff_block", ups=("linear1",), activation="activation", down="linear2", dropout="dropout")
# The same names whether norms come first or not; in the latter case every norm follows a sum.
_ENCODER_SUMS = PreNorm("norm1", ("_sa_block.dropout1", "_ff_block.dropout2"), "norm2", switch="norm_first")
_DECODER_SUMS = PreNorm(
    "norm1",
    ("_sa_block.dropout1", "_mha_block.dropout2", "_ff_block.dropout3"),
    "norm2",
    switch="norm_first",
    others=("norm3",),
)
register_block("torch.nn.modules.transformer.TransformerEncoderLayer", _MLP, _ENCODER_SUMS)
register_block("torch.nn.modules.transformer.TransformerDecoderLayer", _MLP, _DECODER_SUMS)
