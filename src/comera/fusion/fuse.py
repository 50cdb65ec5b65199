"""fuse_: what surrounds the compressed layers of a model, made as cheap as they are.

Once products are ten times smaller, the masks of dropout, the scores of attention and the hidden activations decide the
time and the memory of a step. `fuse_` replaces them in place; parameters, their names and the results stay.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

import comera.fusion.torch_layers  # noqa: F401  which registers them
from comera.errors import check_module
from comera.fusion.causal_lm import CausalLM
from comera.fusion.dropout import Dropout
from comera.fusion.merge_cache import MergeCache, caches
from comera.fusion.registry import BlockPattern, Fused, Inner, known, read_anew
from comera.fusion.same_code import code_of
from comera.fusion.transformers import fuse_attention_
from comera.kernels import select
from comera.nn.linear import BTTLinear, TTLinear


@dataclass(frozen=True)
class FuseRow:
    """One block that `fuse_` knows: its name, what kind of part it holds, and why that was left alone ("": it was
    fused).

    See `fuse_`.
    """

    name: str
    kind: str
    reason: str = ""


@dataclass(frozen=True)
class FuseReport:
    """What `fuse_` fused and what it left alone.

    rows: every block of a registered type, or of the same code. merged: how many tensor trains are in batched merges.
    dropout: how many dropouts draw cheaper masks. no_kernels: why there are no C++ kernels for the CPU; None where
    there are. unknown: how many other modules of a class hold two compressed layers or more, where there are several.

    See `fuse_`.
    """

    rows: tuple[FuseRow, ...]
    merged: int
    dropout: int
    no_kernels: str | None = None
    enabled: bool = True
    unknown: Mapping[str, int] = field(default_factory=dict)

    def fused(self, kind: str) -> tuple[str, ...]:
        """Names of the modules whose part of this kind was fused: "mlp", "gated activation" or "activation" (of an MLP
        whose layers are called one by one), "qkv", "rotary attention", "residual norm", "embedding norm", "norm",
        "pre-norm", "attention", "loss"."""
        return tuple(row.name for row in self.rows if row.kind == kind and not row.reason)

    @property
    def left_alone(self) -> tuple[FuseRow, ...]:
        """The blocks that were not fused."""
        return tuple(row for row in self.rows if row.reason)

    def __str__(self) -> str:
        counts = Counter(row.kind for row in self.rows if not row.reason)
        parts = [f"{count} {kind}" for kind, count in counts.items()]
        parts += [f"{self.merged} tensor trains in batched merges", f"{self.dropout} dropouts"]
        lines = [("fused: " if self.enabled else "taken back: ") + ", ".join(parts)]
        lines += [f"left alone: {row.name or 'the model'} ({row.kind}): {row.reason}" for row in self.left_alone]
        if self.unknown:
            modules = ", ".join(f"{count} {name}" for name, count in self.unknown.items())
            lines.append(f"not known: {modules}: their layers are called one by one (register_block changes that)")
        if self.no_kernels:
            lines.append(f"no C++ kernels for the CPU: {self.no_kernels}")
        return "\n".join(lines)


def fuse_(model: nn.Module, *, enabled: bool = True, keep_logits: bool = True) -> FuseReport:
    """Make what surrounds the compressed layers of a model cheap, in place.

    - MLPs (of known types or code, see `register_block`) never hold their hidden activation. Those of other layers,
      dense ones too, have their activation in one operation, with its gate if it has one (SwiGLU, GeGLU).
    - Queries, keys and values, and of block tensor trains gate and up, come from one product with their input.
    - Rotary embedding takes one pass over memory each way on a CPU.
    - Dropout, residual sum and layer norm take one pass over memory each way on a CPU, in post-norm blocks and where
      both are in one pre-norm block. So do RMSNorm, with such a sum and without, and the sum of BERT's embeddings
      with its norm.
    - Tensor trains with the same signature are in one batched merge, once in a forward of `model`.
    - `nn.Dropout` draws cheaper masks on a CPU: other random numbers than before from the same seed.
    - Models of transformers that use torch's fused attention use ours, which has dropout on a CPU and is faster in
      training.
    - With `keep_logits=False`, causal language models that are given labels in training return their loss alone,
      `logits=None`: a chunk of tokens goes through the head, the loss and back before the next one, so the logits,
      often the largest tensors of a step, are never held whole. Evaluation and generation are as before.

    Results are the same to rounding, but for dropout's masks. Under `torch.compile` the model runs as it did before.
    A second call replaces the first.

    Args:
        model: any module, compressed by `tensorize_` or dense.
        enabled: False takes everything back.
        keep_logits: whether the outputs of causal language models have logits in training, too.

    Returns:
        A `FuseReport`, which prints what was fused, and for each known block that was not the reason.

    Example:
        >>> import comera
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=4), None))
        >>> comera.fuse_(model).fused("qkv")
        ('encoder.layer.0.attention.self',)

    Source: docs/method.md §7.
    """
    check_module(model)
    for module in model.modules():
        for name in [name for name, value in vars(module).items() if isinstance(value, Fused)]:
            delattr(module, name)
    for cache in caches(model):
        cache.detach()
    cache = MergeCache(model)
    if not enabled:
        cache.detach()
    read_anew()
    rows = []
    for name, module in model.named_modules():
        for pattern, _, _, changed in known(type(module)):
            if isinstance(pattern, Inner) or (keep_logits and isinstance(pattern, CausalLM)):
                continue
            reason = changed or _obstacle(pattern, module)
            rows.append(FuseRow(name, pattern.kind if reason else pattern.fused_kind(module), reason or ""))
            if enabled and reason is None:  # of two for one method the later runs: it contains the earlier
                setattr(module, pattern.method, Fused(module, pattern, cache))
    dropouts = _swap_dropouts_(model, enabled=enabled)
    fused, left = fuse_attention_(model, enabled=enabled)
    rows += [FuseRow(name, "attention") for name in fused]
    rows += [FuseRow(name, "attention", reason) for name, reason in left.items()]
    unknown = _unknown(model)
    return FuseReport(tuple(rows), cache.batched, dropouts, select.unavailable_reason(), enabled, unknown)


def _obstacle(pattern: BlockPattern, module: nn.Module) -> str | None:
    try:
        return pattern.obstacle(module)
    except AttributeError as error:  # the same code, but other parts
        return f"it has not all parts of such a block ({error})"


def _unknown(model: nn.Module) -> dict[str, int]:
    """The modules with two compressed layers or more of their own that no pattern is for, by class; without classes of
    which there is one, which are no blocks."""
    found: Counter[str] = Counter()
    for module in model.modules():
        if sum(isinstance(child, TTLinear | BTTLinear) for child in module.children()) >= 2 and not known(type(module)):
            found[type(module).__name__] += 1
    return {name: count for name, count in found.items() if count > 1}


def is_fused(model: nn.Module) -> bool:
    """Whether `fuse_` has replaced a part of a model."""
    return any(isinstance(value, Fused) for module in model.modules() for value in vars(module).values())


def _swap_dropouts_(model: nn.Module, *, enabled: bool) -> int:
    """Let dropouts draw as wanted, under another class but as the same objects; returns how many there are."""
    found = [module for module in model.modules() if type(module) in (nn.Dropout, Dropout)]
    changed = code_of(nn.Dropout, "forward").changed_whole
    for module in found:
        module.__class__ = Dropout if enabled and not changed else nn.Dropout
    return 0 if changed else len(found)
