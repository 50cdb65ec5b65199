"""Parameters that modules read themselves, as tensor trains: values, gradients, memory, copies and writes."""

import copy
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import comera
from comera.errors import SpecError, WeightError
from comera.nn import CompressedParameter, TensorTrain
from comera.nn.packed import Layout, give_back_, hold_
from comera.rank import prune_
from comera.tt import tt_spec, ttm_spec
from comera.tt.shapes import btt_spec

F64 = torch.float64
STACKS = {
    "TT": lambda ins, outs: tt_spec(4 * ins, outs, order=4, rank=5, kernel_size=(4,)),
    "BTT": lambda ins, outs: btt_spec(ins, outs, rank=2, experts=4),
}
each = pytest.mark.parametrize("kind", list(STACKS))


class Experts(nn.Module):
    """Two layers for each of 4 experts, read as mixtures of experts do: (expert, out, in), or (expert, in, out)."""

    def __init__(self, in_first: bool = False) -> None:
        super().__init__()
        self.in_first = in_first
        shapes = ((4, 12, 20), (4, 20, 12)) if in_first else ((4, 20, 12), (4, 12, 20))
        self.up, self.down = (nn.Parameter(torch.randn(shape, dtype=F64) / 4) for shape in shapes)
        self.bias = nn.Parameter(torch.randn(4, 20, dtype=F64))

    def forward(self, x: Tensor, chosen: Tensor, how: str = "one") -> Tensor:
        if how == "one":
            return torch.stack([self.one(row, expert) for row, expert in zip(x, chosen, strict=True)])
        up, down = self.up, self.down
        if how == "rows":
            up, down = up[chosen], down[chosen]
            up, down = (up, down) if self.in_first else (up.mT, down.transpose(-2, -1))
            return torch.bmm(F.silu(torch.bmm(x[:, None], up) + self.bias[chosen, None]), down)[:, 0]
        spell = ("bi,eio->beo", "beo,eoi->bei") if self.in_first else ("bi,eoi->beo", "beo,eio->bei")
        every = torch.einsum(spell[1], F.silu(torch.einsum(spell[0], x, up) + self.bias), down)
        return every[torch.arange(len(x)), chosen]

    def one(self, row: Tensor, expert: Tensor | int) -> Tensor:
        if self.in_first:
            return F.silu(row @ self.up[expert] + self.bias[expert]) @ self.down[expert]
        return F.linear(F.silu(F.linear(row, self.up[expert], self.bias[expert])), self.down[expert])


def pair(kind: str, in_first: bool = False) -> tuple[Any, Any]:
    """A module with compressed parameters, and a dense one with their values."""
    torch.manual_seed(0)
    dense: Any = Experts(in_first)
    module = copy.deepcopy(dense)
    for leaf, ins, outs in (("up", 12, 20), ("down", 20, 12)):
        tt = TensorTrain(STACKS[kind](ins, outs), init_std=0.3, dtype=F64)
        with torch.no_grad():
            tt.rank_params[0][1] = 0.0  # pruned
            tt.rank_params[0][0] = 1.5
        hold_(module, leaf, tt, Layout(tuple(getattr(dense, leaf).shape), ins, outs, 4, in_first))
        with torch.no_grad():
            weight = tt.dense().reshape(ins, 4, outs).permute(1, 0, 2)  # written out: no code of the module
            getattr(dense, leaf).copy_(weight if in_first else weight.mT)
    return module, dense


def inputs() -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 12, dtype=F64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    return x, torch.tensor([0, 3, 1, 3, 0, 0])


@each
@pytest.mark.parametrize("in_first", [False, True])
@pytest.mark.parametrize("how", ["one", "rows", "whole"])
def test_it_computes_what_the_dense_module_does(kind: str, in_first: bool, how: str) -> None:
    module, dense = pair(kind, in_first)
    x, chosen = inputs()
    found, exact = (each(x, chosen, how) for each in (module, dense))
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    own, others = [x, module.bias], [x, dense.bias]
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), own, retain_graph=True),
        torch.autograd.grad(exact.square().sum(), others, retain_graph=True),
        rtol=1e-10,
        atol=1e-10,
    )
    found.square().sum().backward()
    exact.square().sum().backward()
    for leaf in ("up", "down"):  # what arrives at cores and gates is what the dense gradient makes of them
        held = module.compressed[leaf]
        train = list(held.tt.parameters())
        ins, outs = held.layout.in_features, held.layout.out_features
        grad = getattr(dense, leaf).grad
        grad_IEO = grad.permute(1, 0, 2) if in_first else grad.permute(2, 0, 1)
        wanted = torch.autograd.grad(held.tt.dense().reshape(ins, 4, outs), train, grad_IEO)
        torch.testing.assert_close([p.grad for p in train], list(wanted), rtol=1e-10, atol=1e-10)


@each
def test_an_index_makes_one_expert_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, dense = pair(kind)
    made: list[object] = []
    one, whole = CompressedParameter._one, CompressedParameter._dense
    monkeypatch.setattr(CompressedParameter, "_one", lambda self, at, t: (made.append(int(at)), one(self, at, t))[1])
    monkeypatch.setattr(CompressedParameter, "_dense", lambda self, t: (made.append("all"), whole(self, t))[1])
    for index in (2, -1, torch.tensor(2), torch.tensor(-1, dtype=torch.int32)):
        torch.testing.assert_close(module.up[index] + 0, dense.up[index] + 0, rtol=1e-12, atol=1e-12)
    assert module.up[1].shape == (20, 12)  # shapes cost nothing
    assert made == [2, -1, 2, -1]
    made.clear()
    torch.testing.assert_close(module.up[1:3] + 0, dense.up[1:3] + 0, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.up[:, 4] + 0, dense.up[:, 4] + 0, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.up[1, 2, 3] + 0, dense.up[1, 2, 3] + 0, rtol=1e-12, atol=1e-12)
    mask = torch.tensor([True, False, True, False])
    torch.testing.assert_close(module.up[mask], dense.up[mask], rtol=1e-12, atol=1e-12)
    assert made == ["all"] * 4
    with pytest.raises(IndexError, match="index 4 is out of bounds for 4 experts"):
        module.up[4]


@each
@pytest.mark.parametrize("how", ["one", "rows", "whole"])
def test_between_forward_and_backward_nothing_dense_is_kept(
    kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _ = pair(kind)
    made: list[weakref.ref[Tensor]] = []
    dense = TensorTrain.dense

    def noted(self: TensorTrain, *args: Any) -> Tensor:
        out = dense(self, *args)
        made.append(weakref.ref(out))
        return out

    monkeypatch.setattr(TensorTrain, "dense", noted)
    layout = Layout.parameter

    def noted_too(self: Layout, weight: Tensor) -> Tensor:
        out = layout(self, weight)
        made.append(weakref.ref(out))
        return out

    monkeypatch.setattr(Layout, "parameter", noted_too)
    loss = module(*inputs(), how).square().sum()
    assert made
    assert all(tensor() is None for tensor in made)
    loss.backward()
    assert all(tensor() is None for tensor in made)


@each
def test_copies_pickles_and_states(kind: str) -> None:
    module, dense = pair(kind)
    x, chosen = inputs()
    exact = dense(x, chosen)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        assert isinstance(other, Experts)
        assert type(other).__name__ == "Experts"
        torch.testing.assert_close(other(x, chosen), exact, rtol=1e-10, atol=1e-10)
        assert not {*other.parameters()} & {*module.parameters()}
    again, _ = pair(kind)
    prune_(module)
    again.load_state_dict(module.state_dict())
    torch.testing.assert_close(again(x, chosen), exact, rtol=1e-10, atol=1e-10)
    names = set(module.state_dict())
    assert {"bias", "compressed.up.tt.cores.0", "compressed.down.tt.rank_params.0"} <= names
    assert not {"up", "down"} & names


@each
def test_giving_back_makes_it_what_it_was(kind: str) -> None:
    module, dense = pair(kind)
    module.compressed.up.requires_grad_(False)
    assert give_back_(module) == 2
    assert type(module) is Experts
    assert set(module.state_dict()) == set(dense.state_dict())
    assert not module.up.requires_grad
    assert module.down.requires_grad
    x, chosen = inputs()
    torch.testing.assert_close(module(x, chosen), dense(x, chosen), rtol=1e-10, atol=1e-10)


def test_writes_raise() -> None:
    module, _ = pair("TT")
    module.up = module.up  # tied already
    for write in (
        lambda: setattr(module, "up", nn.Parameter(torch.zeros(4, 20, 12))),
        lambda: module.up.zero_(),
        lambda: module.up[1].zero_(),
        lambda: module.up.data.zero_(),
        lambda: nn.init.normal_(module.down),
    ):
        with pytest.raises(WeightError):
            write()
    module.bias = nn.Parameter(torch.zeros(4, 20))  # others can be replaced


def test_specs_that_do_not_fit() -> None:
    layout = Layout((4, 20, 12), 12, 20, 4)
    with pytest.raises(SpecError, match="needs a TTSpec or a BTTSpec"):
        CompressedParameter(TensorTrain(ttm_spec(48, 20, rank=2), init_std=1.0), layout)
    with pytest.raises(SpecError, match="expected 48 -> 20 for 4 experts 12 -> 20, got 12 -> 80"):
        CompressedParameter(TensorTrain(tt_spec(12, 80, rank=2), init_std=1.0), layout)
    active = comera.TT(order=4, rank=2, activation="silu").spec(48, 20, (4,))
    with pytest.raises(SpecError, match="no dense weight, which the module reads"):
        CompressedParameter(TensorTrain(active, init_std=1.0), layout)


@each
def test_compiled(kind: str) -> None:
    module, dense = pair(kind)
    x, chosen = inputs()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    found = compiled(x, chosen, "whole")
    torch.testing.assert_close(found, dense(x, chosen, "whole"), rtol=1e-10, atol=1e-10)
    tensors = list(module.parameters())
    grads = [torch.autograd.grad(f(x, chosen, "whole").sum(), tensors) for f in (compiled, module)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


class OthersMeanwhile(TorchFunctionMode):
    """Runs a whole other forward, in a thread of its own, before every call that this thread makes of torch."""

    def __init__(self, other: Callable[[], Any]) -> None:
        self.other = other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.other).result()
        return func(*args, **(kwargs or {}))


def experts() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    return pair("BTT")[0], lambda module: module(*inputs(), "whole")


def attention() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x = torch.randn(5, 2, 16)
    return nn.MultiheadAttention(16, 2), lambda module: module(x, x, x)[0]


def recurrent(kind: type[nn.RNNBase]) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x = torch.randn(5, 2, 16)
    return kind(16, 16, num_layers=2), lambda module: module(x)[0]


@pytest.mark.parametrize(
    "made",
    [experts, attention, *(partial(recurrent, kind) for kind in (nn.LSTM, nn.GRU, nn.RNN))],
    ids=["experts", "attention", "LSTM", "GRU", "RNN"],
)
def test_forwards_in_several_threads(made: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]) -> None:
    torch.manual_seed(0)
    module, run = made()
    if made is not experts:
        comera.tensorize_(module, comera.TensorizeConfig(comera.TT(order=4, rank=3)))
    exact = run(module)
    with OthersMeanwhile(lambda: run(module)):
        found = run(module)
    assert torch.equal(found, exact)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(each, exact) for each in pool.map(run, [module] * 40))
