"""The loss of a causal language model in training, without its logits ever being held whole (ops/cross_entropy.py)."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.fusion.lazy import Lazy
from comera.fusion.merge_cache import MergeCache, cache_of
from comera.fusion.obstacles import call_obstacle, in_fp8, replaced_obstacle, submodule
from comera.fusion.registry import BlockPattern, Instead, StandIn, all_calls_are_seen
from comera.fusion.same_code import code_of
from comera.kernels import select
from comera.kernels.tracing import traced
from comera.nn.adapted import Adapted
from comera.nn.embedding import TTMProjection
from comera.nn.linear import BTTLinear, TTLinear
from comera.ops.block_product import btt_linear
from comera.ops.cross_entropy import Head, head_cross_entropy, linear_cross_entropy, low_rank_cross_entropy
from comera.ops.linear import tt_linear
from comera.ops.low_rank import LowRankFactors
from comera.ops.projection import LowRankTable, MergedTable, TwoSides, WholeTable, merge_table, ttm_linear

_LOSS = "ForCausalLMLoss"  # of transformers, which `_causal_lm_loss` computes


@dataclass(frozen=True)
class CausalLM(BlockPattern):
    """How a causal language model holds its head: `loss_function(logits=head(hidden), labels=labels, ...)`, as in
    transformers.

    head: name of the output layer. Whatever a forward computes between head and loss, it computes from the logits.
    """

    head: str = "lm_head"
    kind = "loss"
    method = "forward"

    def obstacle(self, module: nn.Module) -> str | None:
        if reason := _head_obstacle(submodule(module, self.head)):
            return f"{self.head} {reason}"
        return replaced_obstacle(module, self) or _loss_obstacle(module.loss_function)

    def run(self, module: nn.Module, cache: MergeCache, /, *args: Any, **kwargs: Any) -> Any:
        trained = kwargs.get("labels") is not None and module.training and torch.is_grad_enabled()
        usual = kwargs.get("return_dict") is not False and "logits_to_keep" not in kwargs
        if not (trained and usual) or traced() or self.obstacle(module):
            return self.run_plain(module, *args, **kwargs)
        layer = submodule(module, self.head)

        def loss(logits: Any, labels: Tensor, vocab_size: int, **others: Any) -> Any:
            if not isinstance(logits, _Logits):
                return module.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **others)  # type: ignore[operator]
            return _causal_lm_loss(logits.hidden, labels, layer, cache, **others)

        given = {self.head: Instead(layer, partial(_Logits, layer)), "loss_function": loss}
        output = self.run_plain(StandIn(module, given), *args, **kwargs)
        output.logits = None if isinstance(output.logits, _Logits) else output.logits
        return output


class _Logits(Lazy):
    """Logits that only the loss needs so far."""

    def __init__(self, layer: nn.Module, hidden: Tensor) -> None:
        super().__init__()
        self._layer, self.hidden = layer, hidden

    def compute(self) -> Tensor:
        logits: Tensor = self._layer(self.hidden)
        return logits

    def contiguous(self) -> "_Logits":
        """The same."""
        return self


def _loss_obstacle(loss: Any) -> str | None:
    file = sys.modules.get("transformers.loss.loss_utils")
    if file is None or loss is not getattr(file, _LOSS):
        return f"its loss is {getattr(loss, '__name__', 'an object of the user')}, not {_LOSS}"
    return code_of(file, _LOSS).changed_whole


def _causal_lm_loss(
    hidden: Tensor,
    labels: Tensor,
    layer: nn.Module,
    cache: MergeCache,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' ForCausalLMLoss, from the input of the head."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    labels_B, x_BI = shift_labels.flatten(), hidden.flatten(0, -2)
    total = _head_loss(layer, x_BI, labels_B, cache, ignore_index)
    count = (labels_B != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / count


def head_loss(model: nn.Module, head: nn.Module, x_BI: Tensor, labels_B: Tensor, ignored: int = -100) -> Tensor | None:
    """The sum over rows of the cross-entropy of an output layer, without its logits ever being held whole.

    Rows labelled `ignored` add nothing.

    Args:
        model: what `fuse_` was called for. head: its output layer.
        x_BI: the rows that the head reads. labels_B: int64, in [0, classes) or `ignored`.

    Returns:
        None outside of training, in a trace, for a model that is not fused, for a head that is not supported and while
        somebody looks at all calls: then the head makes its logits.
    """
    if not (model.training and torch.is_grad_enabled()) or traced() or _head_obstacle(head) or all_calls_are_seen():
        return None
    cache = cache_of(model)
    return None if cache is None else _head_loss(head, x_BI, labels_B, cache, ignored)


def _head_obstacle(head: nn.Module) -> str | None:
    """What keeps the loss from being computed with this output layer."""
    if isinstance(head, Adapted):
        return "has an adapter"
    if type(head) not in (nn.Linear, TTLinear, BTTLinear, TTMProjection):
        return f"is a {type(head).__name__}, not an nn.Linear, TTLinear, BTTLinear or TTMProjection"
    if isinstance(head, TTLinear) and head.spec.activation:
        return "has an activation between its factors"
    return call_obstacle(head) or ("computes in FP8" if in_fp8(head) else None)


def _head_loss(layer: nn.Module, x_BI: Tensor, labels_B: Tensor, cache: MergeCache, ignored: int) -> Tensor:
    weight = _merged(layer, x_BI, cache)
    if isinstance(weight, LowRankFactors):
        return low_rank_cross_entropy(F.linear(x_BI, weight.a), weight.b, labels_B, ignored)
    if isinstance(weight, LowRankTable):
        return linear_cross_entropy(F.linear(x_BI, weight.right), weight.left, weight.bias, labels_B, ignored)
    if isinstance(weight, WholeTable) and select.is_low_rank_head(weight.table, x_BI):
        return linear_cross_entropy(x_BI, *weight, labels_B, ignored)
    head, tensors = _head(layer, weight)
    return head_cross_entropy(x_BI, labels_B, layer.out_features, head, tensors, ignored)  # type: ignore[arg-type]


def _merged(layer: nn.Module, x_BI: Tensor, cache: MergeCache) -> MergedTable | LowRankFactors | None:
    """The layer's weight and bias as all chunks of rows read them; None where each must merge the cores."""
    if isinstance(layer, nn.Linear):
        return WholeTable(layer.weight, layer.bias)
    if isinstance(layer, TTMProjection):
        (cores, _), gates = layer.tt.tensors, layer.tt.gates()
        return merge_table(x_BI, layer.spec, cores, layer.bias, gates=gates, padding_idx=layer.zero_row)
    found = cache.factors([layer], x_BI) if isinstance(layer, TTLinear) else None
    return None if found is None else found[0]


def _head(layer: nn.Module, weight: WholeTable | TwoSides | None) -> tuple[Head, list[Tensor]]:
    """The head as a function of rows and of the tensors that its gradients go to."""
    if isinstance(weight, WholeTable):
        return F.linear, [each for each in weight if each is not None]
    if isinstance(layer, TTMProjection):
        assert isinstance(weight, TwoSides)
        (cores, _), padding = layer.tt.tensors, layer.zero_row

        def table_head(x_CI: Tensor, *tensors: Tensor) -> Tensor:
            return ttm_linear(x_CI, layer.spec, cores, padding_idx=padding, table=TwoSides(*tensors))

        return table_head, [each for each in weight if each is not None]
    assert isinstance(layer, TTLinear | BTTLinear)
    cores, gates = layer.tt.tensors
    threshold, bias = layer.tt.threshold, [] if layer.bias is None else [layer.bias]
    linear: Callable[..., Tensor] = tt_linear if isinstance(layer, TTLinear) else btt_linear
    first_gate, first_bias = len(cores), len(cores) + len(gates)

    def head(x_CI: Tensor, *tensors: Tensor) -> Tensor:
        own = tensors[first_gate:first_bias]
        bias_V = tensors[first_bias] if bias else None
        return linear(x_CI, layer.spec, tensors[:first_gate], bias_V, gates=own, threshold=threshold)

    return head, [*cores, *gates, *bias]
