"""Fused blocks: the operations around compressed layers, made as cheap as the layers."""

from comera.fusion.decoder_attention import RotaryAttention
from comera.fusion.embedding_norm import EmbeddingNorm
from comera.fusion.fuse import FuseReport, FuseRow, fuse_
from comera.fusion.merge_cache import MergeCache, accumulating
from comera.fusion.mlp import MLP
from comera.fusion.norm import RMSNorm
from comera.fusion.qkv import QKV
from comera.fusion.registry import BlockPattern, register_block
from comera.fusion.residual_blocks import PostNorm, PreNorm, ResidualNorm

__all__ = [
    "MLP",
    "QKV",
    "BlockPattern",
    "EmbeddingNorm",
    "FuseReport",
    "FuseRow",
    "MergeCache",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "ResidualNorm",
    "RotaryAttention",
    "accumulating",
    "fuse_",
    "register_block",
]
