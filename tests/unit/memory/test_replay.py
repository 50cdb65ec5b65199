"""The replay of a block: everything is drawn once, whatever draws it, and a block that changes raises an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.errors import TrainingError
from comera.kernels import select
from comera.memory import replay
from comera.memory.recompute import recompute_
from comera.nn.linear import TTLinear
from comera.ops.once import keep_for_recompute
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

        factor, scale = keep_for_recompute(draw)
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


def fused_block(p: float = 0.0) -> nn.Sequential:
    """Blocks whose layers mark all that a forward should keep; with a dropout of torch's, which does not say so."""
    draw = nn.Dropout(p)
    return nn.Sequential(Draws(draw), Draws(draw))


def trained(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients of two backwards, and the next random number."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {**found, "random": torch.rand(3)}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of operations that a dispatch mode of ours sees."""
    names: list[str] = []
    for kind in (replay._Keep, replay._Replay):
        dispatch = kind.__torch_dispatch__

        def see(self: Any, func: Any, *rest: Any, dispatch: Any = dispatch) -> Any:
            names.append(str(func))
            return dispatch(self, func, *rest)

        monkeypatch.setattr(kind, "__torch_dispatch__", see)
    return names


@pytest.mark.skipif(select.unavailable_reason() is not None, reason="no C++ kernels")
def test_no_operation_is_seen_where_the_code_marks_what_is_kept(seen: list[str]) -> None:
    torch.manual_seed(0)
    model, x = fused_block(), torch.randn(40, 16)
    exact = trained(model, x)
    recompute_(model)
    assert_same(trained(model, x), exact)
    assert seen
    seen.clear()
    assert_same(trained(model, x), exact)
    assert not seen
    trained(model, x[:30])  # another shape may compute in another way
    assert seen


@pytest.mark.skipif(select.unavailable_reason() is not None, reason="no C++ kernels")
def test_what_begins_to_draw_draws_the_same_again(seen: list[str]) -> None:
    torch.manual_seed(0)
    model, x = fused_block(), torch.randn(40, 16)
    recompute_(model)
    trained(model, x)
    seen.clear()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    found = trained(model, x)
    assert not seen
    recompute_(model, enabled=False)
    assert_same(found, trained(model, x))


def test_what_draws_from_the_start_is_kept(seen: list[str]) -> None:
    torch.manual_seed(0)
    model, x = fused_block(0.5), torch.randn(40, 16)
    exact = trained(model, x)
    recompute_(model)
    for _ in range(2):
        seen.clear()
        assert_same(trained(model, x), exact)
        assert any("bernoulli" in name or "dropout" in name for name in seen)


class Marks(nn.Module):
    """A block that marks as many results as it is told, and draws in between."""

    def __init__(self, *counts: int) -> None:
        super().__init__()
        self.inner, self.counts = Draws(torch.tanh), iter(counts)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for _ in range(next(self.counts)):
            x = x * Piecewise.apply(x)
        return x.exp()


@pytest.mark.skipif(select.unavailable_reason() is not None, reason="no C++ kernels")
def test_a_block_that_marks_more_in_the_backward_is_told() -> None:
    model, x = nn.Sequential(Marks(1, 1, 1, 2)), torch.randn(3, 16)
    recompute_(model)
    model(x).sum().backward()
    loss = model(x).sum()
    with pytest.raises(TrainingError, match=r"here its end, got .*keep_for_recompute"):
        loss.backward()


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
