"""A pre-norm block, x + attention(norm(x)) and then x + mlp(norm(x)), with its sums and norms in fewer passes."""

from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Tensor, nn

from comera.fusion.merge_cache import MergeCache
from comera.fusion.norm import add_and_rms_norm, rms_norm_obstacle
from comera.fusion.registry import BlockPattern, checkpoints, replaced_obstacle, submodule
from comera.kernels.tracing import traced


@dataclass(frozen=True)
class PreNorm(BlockPattern):
    """How a module holds a pre-norm block.

    forward(x, **options) = y + mlp(second(y)),  y = x + attention(hidden_states=first(x), **options)

    first, attention, second, mlp: names of its modules. Norms are of a type registered as `RMSNorm`; of what attention
    returns, the first counts.

    Example:
        >>> from comera.fusion import PreNorm, fuse_, register_block
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaDecoderLayer
        >>> class Block(LlamaDecoderLayer):  # of your own model, with the same forward
        ...     pass
        >>> register_block(Block, PreNorm(attention="self_attn"))
        >>> config = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4)
        >>> fuse_(Block(config, layer_idx=0)).fused("pre-norm")
        ('',)
    """

    first: str = "input_layernorm"
    attention: str = "self_attn"
    second: str = "post_attention_layernorm"
    mlp: str = "mlp"
    kind = "pre-norm"
    method = "forward"

    def obstacle(self, module: nn.Module) -> str | None:
        for name in (self.first, self.second):
            reason = rms_norm_obstacle(submodule(module, name))
            if reason is not None:
                return f"{name}: {reason}"
        if signature(type(module).forward).return_annotation not in (Tensor, "torch.Tensor"):
            return "its forward does not return one tensor"
        return replaced_obstacle(module, self)

    def run(self, module: nn.Module, cache: MergeCache, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or traced() or checkpoints(module):
            return self.run_plain(module, *args, **kwargs)
        names = (self.first, self.attention, self.second, self.mlp)
        first, attention, second, mlp = (submodule(module, name) for name in names)
        x, normed = add_and_rms_norm(None, args[0], first)
        outputs = attention(hidden_states=normed, **kwargs)
        x, normed = add_and_rms_norm(outputs[0] if isinstance(outputs, tuple) else outputs, x, second)
        return x + mlp(normed)
