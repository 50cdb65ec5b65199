"""A pre-norm block, x + attention(norm(x)) and then x + mlp(norm(x)), with its sums and norms in fewer passes."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from comera.fusion.merge_cache import MergeCache
from comera.fusion.mlp import MLP
from comera.fusion.norm import RMSNorm, is_rms_norm, rms_norm_obstacle
from comera.fusion.registry import BlockPattern, checkpoints, known, replaced_obstacle, submodule
from comera.fusion.residual import modules_obstacle
from comera.fusion.sums import Sum, dropout_of, run_with_sums
from comera.kernels.tracing import traced


@dataclass(frozen=True)
class PreNorm(BlockPattern):
    """How a module holds a pre-norm block, whose forward computes y = x + attention(first(x)), y + mlp(second(y)).

    first, second: names of its norms, of a type registered as `RMSNorm`, or `nn.LayerNorm`. Only an RMSNorm gains from
        being the first.
    parts: names of what the forward adds to x, such as attention. It does nothing with what a part returns (of several
        results, with the first) but to drop some of it out, to reshape it and to add it to a tensor. A part may be a
        method, or the dropout itself, which with a dotted name ("attention.dropout") ends the forward of the module, or
        the method, before the dot.
    mlp: an MLP in the middle of the forward (`within`), which then contains it.
    switch: name of an attribute that is false in blocks whose norms follow their sums.
    others: names of more norms of sums, as of a decoder that attends to an encoder between the two. A module may lack
        them, and parts.

    Example:
        >>> from comera.fusion import PreNorm, fuse_, register_block
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaDecoderLayer
        >>> class Block(LlamaDecoderLayer):  # of your own model, with the same forward
        ...     pass
        >>> register_block(Block, PreNorm(parts=("self_attn",)))
        >>> config = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4)
        >>> fuse_(Block(config, layer_idx=0)).fused("pre-norm")
        ('',)
    """

    first: str = "input_layernorm"
    parts: tuple[str, ...] = ("self_attn",)
    second: str = "post_attention_layernorm"
    mlp: MLP | None = None
    switch: str | None = None
    others: tuple[str, ...] = ()
    kind = "pre-norm"
    method = "forward"

    def obstacle(self, module: nn.Module) -> str | None:
        norms = (self.second, *(name for name in self.others if hasattr(module, name)))
        reasons = (self._norm_obstacle(module, name) for name in norms)
        return next(filter(None, reasons), None) or replaced_obstacle(module, self)

    def _norm_obstacle(self, module: nn.Module, name: str) -> str | None:
        norm = submodule(module, name)
        if any(isinstance(each.pattern, RMSNorm) for each in known(type(norm))):
            reason = rms_norm_obstacle(norm)
            return f"{name}: {reason}" if reason else None
        parts = (part for part in self.parts if hasattr(module, part.partition(".")[0]))
        reasons = (modules_obstacle(dropout_of(module, part), norm) for part in parts)
        return next(filter(None, reasons), None)

    def fused_kind(self, module: nn.Module) -> str:
        post_norm = self.switch is not None and not getattr(module, self.switch)
        return "residual norm" if post_norm else self.kind

    def run(self, module: nn.Module, cache: MergeCache, /, *args: Any, **kwargs: Any) -> Any:
        if traced() or checkpoints(module):
            return self.run_plain(module, *args, **kwargs)
        if args and isinstance(args[0], Tensor) and is_rms_norm(submodule(module, self.first)):
            args = Sum(None, args[0]), *args[1:]  # x and its norm too: the gradients of both meet in one pass
        given = {} if self.mlp is None else self.mlp.stand_ins(module, cache)
        norms = (self.first, self.second, *self.others)
        return run_with_sums(module, self.method, self.parts, norms, given, *args, **kwargs)
