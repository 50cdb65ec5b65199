"""The replay of a block: everything is drawn once, whatever draws it, and a block that changes raises an error."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from comera.convert import TT, TensorizeConfig, tensorize_
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
        return self.last(self.draw(self.first(x)))


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


# --- what a block writes is written once ------------------------------------------------------------------------------


WIDTH = 16


class Written(nn.Module):
    """Base of the modules between the two compressed layers of a block; `seen` is what they wrote, by name."""

    def seen(self) -> dict[str, Any]:
        return dict(self.named_buffers())


class Normed(Written):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (
            self.norm(x.T.unsqueeze(0)).squeeze(0).T if isinstance(self.norm, nn.InstanceNorm1d) else self.norm(x)
        )
        return out


class InPlace(Written):
    """A running mean, read after it is written; through `.data` the version of the tensor does not tell."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, WIDTH))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        mean: Any = self.mean
        new = x.detach().mean(0)
        if self.name == "data":
            mean.data.mul_(0.5).add_(new)
        elif self.name == "view":
            mean[1].lerp_(new, 0.5)
            mean[:, 3:].mul_(0.7)
        elif self.name == "numpy":
            mean.numpy()[...] += new.numpy()
        elif self.name == "foreach":
            torch._foreach_add_([mean[0], mean[1]], [new, 2 * new])
        else:
            self.mean = 0.5 * mean + new
        return x * (1 + self.mean[1].clone())


class Counted(Written):
    """Counts in Python, and decides by the count; keeps a list, a dict and a loss beside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log, self.last = 0, [0.0], {}
        self.beside: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(self.log[-1] + 1)
        self.last["x"] = self.last.get("x", 0) + self.calls
        self.beside = x.square().mean()
        return torch.tanh(x) if self.calls % 2 else x * len(self.log) + x.sin()

    def seen(self) -> dict[str, Any]:
        values = [self.calls, *self.log, *self.last.values(), float(self.beside.requires_grad)]
        return {"counts": torch.tensor(values)}


class Recurrent(Written):
    """Keeps a state that the next forward begins from."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.state is None else x + self.state
        self.state = torch.tanh(x.mean(0)).detach()
        return x * self.state

    def seen(self) -> dict[str, Any]:
        return {"state": self.state}


class Elsewhere(Written):
    """Writes to tensors that are no buffers of the block: one of its own, one in a closure, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.held = torch.zeros(WIDTH), [torch.ones(3, WIDTH)]
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.own.add_(x.mean(0))
            self.held[0][1:].mul_(0.9)
            self.gain.div_(self.gain.norm())
        return x * self.own.clone() * self.held[0].sum(0) * self.gain.clone()

    def seen(self) -> dict[str, Any]:
        return {"own": self.own, "held": self.held[0], "gain": self.gain.detach()}


class Rows(Written):
    """Rows of a table that torch scales down to a norm when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(len(x)) % 5)

    def seen(self) -> dict[str, Any]:
        return {"table": self.table.weight.detach()}


def layer() -> TTLinear:
    return TTLinear(TTSpec(WIDTH, WIDTH, (4, 4), (4, 4), (1, 2, 3, 2, 1)))


def blocks(make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(layer(), make(), nn.Tanh(), layer()) for _ in range(2)))


def spectral(old: bool) -> nn.Module:
    norm = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    return norm(nn.Linear(WIDTH, WIDTH))


WRITERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Normed(nn.BatchNorm1d(WIDTH)),
    "batch norm of all": lambda: Normed(nn.BatchNorm1d(WIDTH, momentum=None)),
    "instance norm": lambda: Normed(nn.InstanceNorm1d(WIDTH, track_running_stats=True)),
    "spectral norm": lambda: Normed(spectral(old=False)),
    "old spectral norm": lambda: Normed(spectral(old=True)),
    **{name: lambda name=name: InPlace(name) for name in ("data", "view", "numpy", "foreach", "replaced")},  # type: ignore[misc]
    "counted": Counted,
    "recurrent": Recurrent,
    "elsewhere": Elsewhere,
    "rows": Rows,
}  # fmt: skip


def steps(model: nn.Module, times: int = 3) -> list[dict[str, Tensor]]:
    """Losses, gradients and what is written, after steps of two forwards, each walked twice, and of evaluation."""
    results = []
    for step in range(times):
        torch.manual_seed(step)
        model.zero_grad()
        losses = [model(torch.randn(8, WIDTH)).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward(retain_graph=True)
        model.eval()  # between a forward and its replay
        losses[1].backward()
        model.train()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        written = [module.seen() for module in model.modules() if isinstance(module, Written)]
        found |= {f"{k} {name}": value.clone() for k, each in enumerate(written) for name, value in each.items()}
        results.append({**found, "loss": torch.stack(losses).detach(), "random": torch.rand(3)})
    results.append({"evaluated": model.eval()(torch.ones(8, WIDTH)).detach()})
    model.train()
    return results


@pytest.mark.parametrize("kernels", ["all", "none"])
@pytest.mark.parametrize("name", WRITERS)
def test_what_a_block_writes_is_written_once(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMERA_KERNELS", kernels)
    model = blocks(WRITERS[name])
    other = copy.deepcopy(model)
    recompute_(other)
    for plain, again in zip(steps(model), steps(other), strict=True):
        assert len(plain) in (1, len(again))
        assert_same(plain, again)


def test_a_block_on_another_device_goes_by_operations_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values cannot be compared, as on a GPU; torch counts no version of running statistics."""
    monkeypatch.setattr("comera.memory.replay.fixed", lambda: True)
    for name in ("batch norm", "data", "view", "foreach", "spectral norm", "elsewhere"):
        model = blocks(WRITERS[name])
        other = copy.deepcopy(model)
        recompute_(other)
        for plain, again in zip(steps(model), steps(other), strict=True):
            assert_same(plain, again)


class Late(Written):
    """Writes when it is told to, by what no attribute of an instance shows."""

    writes = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if Late.writes:
            self.get_buffer("mean").data.add_(1)
        return self.norm(x) + self.get_buffer("mean").clone()


@pytest.mark.skipif(select.unavailable_reason() is not None, reason="no C++ kernels")
def test_a_block_that_begins_to_write_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that wrote nothing is replayed without a look at its operations, until a mode changes."""
    entered: list[object] = []
    enter = replay._KeepMarked.__enter__

    def entering(self: Any) -> Any:
        entered.append(self)
        return enter(self)

    monkeypatch.setattr(replay._KeepMarked, "__enter__", entering)
    model = blocks(Late)
    other = copy.deepcopy(model)
    recompute_(other)
    x = torch.randn(8, WIDTH)

    def trained(each: nn.Module) -> dict[str, Tensor]:
        each.zero_grad()
        each(x).square().mean().backward()
        return {n: p.grad for n, p in each.named_parameters() if p.grad is not None} | dict(each.named_buffers())

    norms = [module for module in (*model.modules(), *other.modules()) if isinstance(module, nn.BatchNorm1d)]
    for step, without_a_look in enumerate([0, 2, 4, 4, 4]):
        for norm in norms:
            norm.train(step >= 3)
        monkeypatch.setattr(Late, "writes", step == 2)
        assert_same(trained(model), trained(other))
        assert len(entered) == without_a_look
    assert {int(norm.get_buffer("num_batches_tracked")) for norm in norms} == {2}


def test_only_what_is_written_is_kept_and_nothing_after_the_backward() -> None:
    class Masked(Written):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(1000, WIDTH))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            count: Any = self.count
            count.add_(1)
            return x * self.get_buffer("mask")[0]

    model = blocks(Masked)
    kept = []
    for enabled in (False, True):
        recompute_(model, enabled=enabled)
        with Live(model) as live:
            loss = model(torch.randn(8, WIDTH)).square().mean()
            kept.append(live.nbytes)
            loss.backward()
            model.zero_grad()
            assert live.nbytes == loss.nbytes
    assert kept[1] < kept[0] < 1000 * WIDTH


def test_a_block_that_writes_to_its_input_is_told_before_it_does() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = layer(), layer()

        def forward(self, x: Tensor) -> Tensor:
            x[:, :3] += 1
            return self.last(self.first(x))  # type: ignore[no-any-return]

    model = nn.Sequential(Adds())
    recompute_(model)
    x = torch.zeros(2, WIDTH)
    with pytest.raises(TrainingError, match=r"leave its inputs as they are, got aten.add_.*write to a copy"):
        model(x)
    assert not x.any()
    recompute_(model, enabled=False)
    assert bool(model(x).isfinite().all())
    assert x.any()


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_recurrent_state_begins_where_it_began(use_cache: bool) -> None:
    """RecurrentGemma makes a state of zeros in a forward, which a second one would begin from."""
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, lru_width=32,
        block_types=("recurrent", "attention"), attention_window_size=8,
    )  # fmt: skip
    model = RecurrentGemmaForCausalLM(config).train()
    tensorize_(model, TensorizeConfig(TT(order=4, rank=4), None))
    other = copy.deepcopy(model)
    assert len(recompute_(other).blocks) == 2
    ids = torch.arange(24).view(2, 12)

    def trained(each: nn.Module) -> dict[str, Tensor]:
        each.zero_grad()
        loss = each(ids, labels=ids, use_cache=use_cache).loss
        loss.backward()
        return {n: p.grad for n, p in each.named_parameters() if p.grad is not None} | {"loss": loss.detach()}

    for _ in range(2):
        assert_same(trained(model), trained(other))


def test_what_draws_into_a_buffer_draws_once() -> None:
    class Noise(Written):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("noise", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            noise: Any = self.noise
            return F.silu(x) * noise.uniform_().clone()

    model = blocks(Noise)
    other = copy.deepcopy(model)
    recompute_(other)
    for plain, again in zip(steps(model), steps(other), strict=True):
        assert_same(plain, again)
