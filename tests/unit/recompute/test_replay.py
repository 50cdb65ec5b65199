"""The replay of a block: everything is drawn once, whatever draws it, and a block that changes raises an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.errors import TrainingError
from comera.nn.linear import TTLinear
from comera.ops.once import made_once
from comera.recompute.blocks import recompute_
from comera.tt.spec import TTSpec

from ...helpers.live import Live, assert_same


class Draws(nn.Module):
    """A block with one operation that draws, between two compressed layers."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        spec = TTSpec(16, 16, (4, 4), (4, 4), (1, 2, 2, 2, 1))
        self.first, self.last, self.draw = TTLinear(spec), TTLinear(spec), draw

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.draw(self.first(x)))
        return out


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.native_dropout(x, 0.4, True)[0],
        lambda x: torch.native_dropout(x, 1.0, True)[0],
        lambda x: torch.native_dropout(x, 0.4, False)[0],
        lambda x: F.dropout(x, 0.4),
        lambda x: F.dropout(x, 0.4, inplace=True) * x.cos(),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)),
        lambda x: x * torch.bernoulli(x.detach(), 0.3),
        lambda x: x * torch.empty_like(x).uniform_(),
        lambda x: x * torch.randn(x.shape),
        lambda x: x * torch.rand(x.shape, out=torch.empty_like(x)),
        lambda x: x[torch.randperm(len(x))],
        lambda x: torch.rrelu(x, training=True),
        lambda x: F.gumbel_softmax(x),
        lambda x: x * torch.rand(x.shape).add_(0.5).floor_(),
        lambda x: (x @ x.new_ones(16, 2) @ x.new_ones(2, 16)) * (x @ x.new_ones(16, 2)).mul_(2).sum(),
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True)[0, 0] * x,
    ],
)
def test_whatever_is_drawn_is_drawn_once(draw: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Draws(draw), Draws(draw))
    x = torch.randn(40, 16)
    results = []
    for enabled in (False, True):
        recompute_(model, enabled=enabled)
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        results[-1]["random"] = torch.rand(3)
    assert len(results[0]) == 1 + 4 * (4 + 3 + 1)
    assert_same(*results)


class Piecewise(torch.autograd.Function):
    """x times the sum of a hundred draws, which it marks as made once."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        def draw() -> tuple[Tensor, float]:
            Piecewise.calls += 1
            return torch.randn(100, *x.shape).sum(0), 0.5

        factor, scale = made_once(draw)
        ctx.save_for_backward(factor)
        return x * factor * scale

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return dy * factor * 0.5


@pytest.mark.parametrize("under", [None, Live])
def test_what_says_so_is_made_once(under: type[Live] | None) -> None:
    def draw(x: Tensor) -> Any:
        if under is None:
            return Piecewise.apply(x)
        with under(nn.Identity()):  # a mode of someone else, above that of the block
            return Piecewise.apply(x)

    model = nn.Sequential(Draws(draw), Draws(draw))
    x = torch.linspace(-1, 1, 40 * 16).view(40, 16)
    before = Piecewise.calls
    results = []
    for enabled in (False, True):
        recompute_(model, enabled=enabled)
        torch.manual_seed(1)
        model.zero_grad()
        with Live(model) as live:
            loss = model(x).square().sum()
            results.append({"bytes": torch.tensor(live.nbytes)})
            loss.backward()
        results[-1] |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert Piecewise.calls == before + 4
    assert results[1].pop("bytes") < results[0].pop("bytes")
    assert_same(*results)


class Moody(nn.Module):
    """A block that does something else the second time."""

    def __init__(self, *moods: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.moods = Draws(torch.tanh), iter(moods)

    def forward(self, x: Tensor) -> Tensor:
        return next(self.moods)(self.inner(x)).exp()


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        (
            lambda x: x * torch.rand(x.shape),
            lambda x: x * torch.randn(x.shape),
            "here aten.rand.default, got aten.randn",
        ),
        (lambda x: x * x, lambda x: x * torch.rand(x.shape), "here its end, got aten.rand.default"),
    ],
)
def test_a_block_that_does_something_else_in_the_backward_is_told(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], match: str
) -> None:
    model = nn.Sequential(Moody(first, second))
    recompute_(model)
    loss = model(torch.randn(3, 16)).sum()
    with pytest.raises(TrainingError, match=match):
        loss.backward()
