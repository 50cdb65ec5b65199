"""Residual sums that wait for their norm: in blocks of transformers, and in blocks that use them otherwise."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from comera.fusion import PreNorm, fuse_, register_block, sums
from comera.fusion import norm as norms

from ...helpers.families import inputs, model, trained
from ...helpers.near import assert_near

# name -> dropout of the sums of a block that are computed with their norms; ModernBERT's is drawn in its attention
SUMS = {"modernbert": [0.0], "vit": [0.3], "gpt2": [0.3], "opt": [0.3], "opt, post-norm": [0.3, 0.3]}


@pytest.mark.parametrize("name", SUMS)
def test_dropout_of_a_sum_is_drawn_with_its_norm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    run = sums.residual_layer_norm

    def spied(*given: Any) -> Any:
        drawn.append(given[-1])
        return run(*given)

    monkeypatch.setattr(sums, "residual_layer_norm", spied)
    made = model(name, drop=0.3)
    fuse_(made)
    trained(made, name)
    assert drawn == SUMS[name] * 2
    drawn.clear()
    trained(made.eval(), name)
    assert drawn == [0.0] * len(SUMS[name]) * 2


def test_blocks_with_more_than_two_norms_and_recorded_attention_stay() -> None:
    made = model("gpt2", add_cross_attention=True, attn_implementation="eager")
    plain = copy.deepcopy(made)
    assert len(fuse_(made).fused("pre-norm")) == 2
    given = inputs("gpt2") | {"encoder_hidden_states": torch.randn(4, 9, 48), "output_attentions": True}
    results = []
    for each in (made, plain):
        out = each(**given)
        out.loss.backward()
        tensors = [t.detach() for t in tree_leaves([out.loss, out.logits, out.attentions])]
        grads = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
        results.append(dict(zip("01234567", tensors, strict=False)) | grads)
    assert_near(*results)
    assert len(results[0]) > len(list(made.parameters())) + 2


class Block(nn.Module):
    """A block of an own type, with what its forward does to the first sum."""

    def __init__(self, norm: nn.Module, between: Callable[[Any], Any] = lambda total: total) -> None:
        super().__init__()
        self.first, self.second, self.between = LlamaRMSNorm(8), norm, between
        self.mix, self.mlp, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.between(self.drop(self.mix(self.first(x))) + x)
        return y + self.mlp(self.second(y)), y


register_block(Block, PreNorm("first", ("drop",), "second"))


@pytest.mark.parametrize("norm", [LlamaRMSNorm, nn.LayerNorm])
def test_own_blocks_return_what_they_did(norm: Callable[[int], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[bool] = []
    run = norms.residual_rms_norm
    monkeypatch.setattr(norms, "residual_rms_norm", lambda z, *given: summed.append(z is not None) or run(z, *given))
    made, x = Block(norm(8)).eval(), torch.randn(3, 8)
    expected = made(x)
    assert fuse_(made).fused("pre-norm") == ("",)
    for found in (made(x), made(x=x)):
        assert type(found) is tuple
        torch.testing.assert_close(found, expected)
    assert summed == [False, True, False, True] if norm is LlamaRMSNorm else [False, False]
    made.train()
    _, y = made(x)
    kept = y != x
    assert 0 < kept.sum() < kept.numel()  # dropout leaves some of x as it is
    torch.testing.assert_close(y[kept], (2 * expected[1] - x)[kept])
    with pytest.raises(TypeError):
        made()


@pytest.mark.parametrize(
    "between",
    [
        lambda total: total.tanh(),
        torch.sigmoid,
        lambda total: nn.functional.dropout(total, 0.0),
        lambda total: total + total,
        lambda total: torch.ones(8) + total,
        lambda total: 1.0 + total,
        lambda total: 2.0 * total - total / 3 + (1.0 - total) * total - 1.0 / (2.0 + total**2),
        lambda total: torch.cat([-total[:1], total[1:] @ torch.eye(8)])[: len(total)],
        lambda total: total.view(1, 3, 8).reshape(-1, total.size(-1)).view(total.shape),
        lambda total: total.new_zeros(total.shape) + total.to(total.dtype),
    ],
)
@pytest.mark.parametrize("norm", [LlamaRMSNorm, nn.LayerNorm])
def test_a_sum_that_is_used_otherwise_is_a_tensor(norm: Callable[[int], nn.Module], between: Any) -> None:
    made, x = Block(norm(8), between).eval(), torch.randn(3, 8, requires_grad=True)
    results = []
    for enabled in (False, True):
        fuse_(made, enabled=enabled)
        out, y = made(x)
        results.append([out, y, *torch.autograd.grad(out.square().sum() + y.sin().sum(), [x, *made.parameters()])])
    torch.testing.assert_close(*results)
