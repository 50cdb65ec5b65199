"""TensorTrain: parameters, pure masking, replacing its numbers, the meta device."""

import copy
import pickle
from collections.abc import Callable
from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from comera.errors import SpecError
from comera.nn.conv import TTConv
from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMProjection
from comera.nn.linear import BTTLinear, CompressedLinear, TTLinear
from comera.nn.packed import CompressedParameter, Layout
from comera.nn.tables import lookup_tables
from comera.nn.tensor_train import CompressedLayer, TensorTrain, named_trains
from comera.tt.dense import absorb, materialize
from comera.tt.shapes import tt_spec
from comera.tt.spec import BTTSpec, Spec, TTMSpec, TTSpec

TT_SPEC = TTSpec(12, 10, (4, 3), (2, 5), (1, 3, 4, 2, 1))
TTM_SPEC = TTMSpec(11, 6, (4, 3), (2, 3), (1, 4, 1))
BTT_SPEC = BTTSpec(12, 10, (3, 4), (2, 5), ((2, 0), (1, 4), (0, 1)))
ALL = pytest.mark.parametrize("spec", [TT_SPEC, TTM_SPEC, BTT_SPEC], ids=str)


def train(spec: Spec = TT_SPEC, **options: object) -> TensorTrain:
    return TensorTrain(spec, init_std=0.5, dtype=torch.float64, **options)


@ALL
def test_parameters_are_cores_and_rank_parameters_of_the_spec(spec: Spec) -> None:
    tt = train(spec)
    assert [tuple(core.shape) for core in tt.cores] == list(spec.core_shapes)
    assert [d.tolist() for d in tt.rank_params] == [[1.0] * r for r in spec.inner_ranks]
    assert [*dict(tt.named_buffers())] == ["block_ranks"] * isinstance(spec, BTTSpec)
    assert all(p.dtype == torch.float64 and p.requires_grad for p in tt.parameters())


def test_the_same_generator_draws_the_same_cores() -> None:
    a, b = (train(generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.cores, b.cores, strict=True))


@ALL
def test_inactive_slices_are_exactly_zero_and_nothing_is_written(spec: Spec) -> None:
    tt, k = train(spec), spec.order // 2 - 1
    with torch.no_grad():
        tt.rank_params[k][:4].copy_(torch.tensor([0.5, 1e-2, -3.0, 2.0]))  # the threshold itself is inactive
    before = copy.deepcopy(tt.state_dict())
    kept = [d.clone() for d in tt.rank_params]
    kept[k][1:3] = 0
    assert tt.unpruned()[k].tolist()[:4] == [True, False, False, True]
    assert torch.equal(tt.dense(), materialize(spec, absorb(list(tt.cores), kept)))
    assert all(torch.equal(value, tt.state_dict()[key]) for key, value in before.items())


def test_inactive_rank_parameters_get_no_gradient() -> None:
    tt = train()
    with torch.no_grad():
        tt.rank_params[0][1] = 0.0
    tt.dense().square().sum().backward()
    grad = tt.rank_params[0].grad
    assert grad is not None
    assert (grad != 0).tolist() == [True, False, True]


@ALL
def test_set_keeps_parameter_objects_and_copies(spec: Spec) -> None:
    tt = train(spec)
    objects = list(tt.parameters())
    smaller = spec.with_ranks(1)
    cores = [torch.randn(shape) for shape in smaller.core_shapes]
    tt.dense().sum().backward()
    tt.set_(smaller, cores, [torch.full((r,), 2.0) for r in smaller.inner_ranks])
    assert all(a is b for a, b in zip(objects, tt.parameters(), strict=True))
    assert all(p.grad is None and p.dtype == torch.float64 for p in tt.parameters())
    cores[0].zero_()
    assert tt.cores[0].abs().min() > 0
    torch.testing.assert_close(tt.dense().abs().max() > 0, torch.tensor(True))


def test_set_refuses_other_shapes_and_orders() -> None:
    tt = train()
    with pytest.raises(SpecError, match="expected cores and gates of shapes"):
        tt.set_(TT_SPEC, [torch.zeros(1)] * 4)
    other = TTSpec(12, 10, (12,), (10,), (1, 3, 1))
    with pytest.raises(SpecError, match="expected cores and gates"):
        tt.set_(other, [torch.zeros(s) for s in other.core_shapes])
    assert tt.spec == TT_SPEC


@ALL
def test_from_numbers_draws_nothing(spec: Spec) -> None:
    cores = [torch.randn(shape, dtype=torch.float64) for shape in spec.core_shapes]
    state = torch.get_rng_state()
    tt = TensorTrain.from_tensors(spec, cores, init_std=0.1, threshold=0.2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(tt.dense(), materialize(spec, cores), rtol=1e-12, atol=0)
    assert (tt.init_std, tt.threshold, tt.cores[0].device.type) == (0.1, 0.2, "cpu")
    assert tt.cores[0].data_ptr() != cores[0].data_ptr()


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (TTLinear, TTSpec(64, 64, (8, 8), (8, 8), (1, 8, 16, 8, 1))),
        (BTTLinear, BTTSpec(64, 64, (2, 32), (2, 32), ((3, 9), (0, 5)))),
    ],
    ids=str,
)
def test_meta_then_to_empty_then_reset_gives_the_wanted_std(kind: type[CompressedLinear], spec: Spec) -> None:
    layer = kind(TensorTrain(spec, init_std=0.3, device="meta"))
    assert all(p.is_meta for p in [*layer.parameters(), *layer.buffers()])
    for _ in range(2):
        layer.to_empty(device="cpu")
        for buffer in layer.buffers():
            buffer.fill_(77)
        layer.reset_parameters()
    if isinstance(spec, BTTSpec):
        assert layer.tt.block_ranks.tolist() == [list(row) for row in spec.rows_of_ranks]
    assert layer.bias is not None
    assert layer.bias.abs().max() == 0
    assert layer.weight.std().item() == pytest.approx(0.3, rel=0.02)


def test_named_trains_gives_a_shared_chain_once() -> None:
    embedding = TTMEmbedding(TTM_SPEC)
    model = nn.ModuleDict({"embed": embedding, "lin": TTLinear(TT_SPEC), "head": TTMProjection(embedding.tt)})
    assert [name for name, _ in named_trains(model)] == ["embed.tt", "lin.tt"]


def test_copies_and_pickles_hold_the_ranks_of_their_blocks() -> None:
    layer, x = BTTLinear(BTT_SPEC), torch.randn(3, 12)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
        other.tt.set_(BTT_SPEC.with_ranks(1), [torch.zeros(s) for s in BTT_SPEC.with_ranks(1).core_shapes])
        assert other.tt.block_ranks.unique().tolist() == [1]
    assert layer.tt.block_ranks.tolist() == [[2, 0], [1, 4], [0, 1]]
    assert layer.to(torch.bfloat16).tt.block_ranks.dtype == torch.int32
    assert layer.to("meta").tt.block_ranks.is_meta


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    "ranks", [[0, 0, 1, 0, 0, 0], [1, 1, 2, 2, 1, 1], [4, 4, 0, 0, 0, 0], [0] * 6, [4] * 6], ids=str
)
def test_the_ranks_of_blocks_are_state(ranks: list[int], assign: bool) -> None:
    source, layer = BTTLinear(BTT_SPEC.with_block_ranks(ranks)), BTTLinear(BTT_SPEC)
    layer.load_state_dict(source.state_dict(), assign=assign)
    assert layer.spec == source.spec
    x = torch.randn(3, 12)
    assert torch.equal(layer(x), source(x))
    assert torch.equal(layer.tt.block_ranks, source.tt.block_ranks)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_made_of_the_layers_own_tensors_loads(assign: bool) -> None:
    """As a distributed checkpoint fills it: in place, before `load_state_dict`."""
    source, layer = BTTLinear(BTT_SPEC.with_block_ranks([1, 1, 2, 2, 1, 1])), BTTLinear(BTT_SPEC)
    state = layer.state_dict()
    for key, value in source.state_dict().items():
        state[key].copy_(value)
    layer.load_state_dict(state, assign=assign)
    assert layer.spec == source.spec
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in layer.state_dict().items())
    assert layer.weight.abs().max() > 0


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("damage", [[3, 0, 1, 4, 0, 1], [-1, 3, 1, 4, 0, 1], [0, 2, 0, 5, 0, 1]], ids=str)
def test_damaged_ranks_of_blocks_are_refused(damage: list[int], assign: bool) -> None:
    layer = BTTLinear(BTT_SPEC)
    state = {**layer.state_dict(), "tt.block_ranks": torch.tensor(damage, dtype=torch.int32).view(3, 2)}
    with pytest.raises(RuntimeError, match=r"tt.block_ranks: expected 3 x 2 ranks from 0 to 4 whose sum is that"):
        layer.load_state_dict(state, assign=assign)
    assert layer.spec == BTT_SPEC
    assert layer.tt.block_ranks.tolist() == [[2, 0], [1, 4], [0, 1]]
    assert state["tt.block_ranks"].flatten().tolist() == damage


def test_a_state_without_the_ranks_of_blocks_is_refused() -> None:
    layer = BTTLinear(BTT_SPEC)
    state = layer.state_dict()
    del state["tt.block_ranks"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "tt.block_ranks"'):
        layer.load_state_dict(state)
    assert layer.spec == BTT_SPEC


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # torch's own, in jvp
def test_functional_calls_and_transforms_of_blocks() -> None:
    layer, x = BTTLinear(BTT_SPEC, dtype=torch.float64), torch.randn(4, 12, dtype=torch.float64)
    parameters = {name: torch.randn_like(p) for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, parameters, (x,)).square().sum()

    per_sample = vmap(grad(loss), (None, 0))(parameters, x)
    for k in range(4):
        torch.testing.assert_close({n: g[k] for n, g in per_sample.items()}, grad(loss)(parameters, x[k]))
    models = {name: torch.stack([p, 2 * p]) for name, p in parameters.items()}
    both = vmap(loss, (0, None))(models, x)
    torch.testing.assert_close(both[0], loss(parameters, x))
    assert jvp(layer, (x,), (x,))[1].shape == (4, 10)


# --- gates that are NaN -----------------------------------------------------------------------------------------------


TT = TTSpec(12, 10, (4, 3), (2, 5), (1, 3, 4, 2, 1))


BTT = BTTSpec(12, 10, in_modes=(3, 4), out_modes=(2, 5), block_ranks=2)


TTM = TTMSpec(40, 6, (8, 5), (3, 2), (1, 4, 1))


DEEP = TTMSpec(300, 12, (8, 7, 6), (3, 2, 2), (1, 4, 3, 1))


CONV = tt_spec(4 * 9, 10, order=4, rank=3, kernel_size=(3, 3))


Read = Callable[[CompressedLayer], Tensor]


By = Callable[[Tensor], Tensor]


def linear(rows: int) -> tuple[Read, By]:
    x = torch.linspace(-1, 1, rows * 12).view(rows, 12).sin()
    return lambda layer: layer(x), lambda weight: F.linear(x.double(), weight)


def lookup(ids: int, rows: int) -> tuple[Read, By]:
    chosen = torch.arange(ids) * 7 % rows
    return lambda layer: layer(chosen), lambda weight: weight[chosen]


def bag(ids: int, rows: int) -> tuple[Read, By]:
    chosen = (torch.arange(ids) * 7 % rows).view(-1, 2)
    return lambda layer: layer(chosen), lambda weight: weight[chosen].sum(1)


def together(ids: int, rows: int) -> tuple[Read, By]:
    chosen = torch.arange(ids) * 7 % rows
    return lambda layer: lookup_tables([layer], [chosen])[0], lambda weight: weight[chosen]


def convolution() -> tuple[Read, By]:
    x = torch.linspace(-1, 1, 3 * 4 * 25).view(3, 4, 5, 5).sin()
    return lambda layer: layer(x), lambda weight: F.conv2d(x.double(), weight)


def head(rows: int) -> tuple[Read, By]:
    x = torch.linspace(-1, 1, rows * 6).view(rows, 6).sin()
    return lambda layer: layer(x), lambda weight: F.linear(x.double(), weight)


def by_factors(spec: TTSpec) -> TTLinear:
    layer = TTLinear(spec, bias=False)
    layer.contraction = "low_rank"
    return layer


def parameter(spec: TTSpec) -> CompressedParameter:
    return CompressedParameter(TensorTrain(spec, init_std=0.1), Layout((10, 12), 12, 10))


READS: dict[str, tuple[CompressedLayer, tuple[Read, By]]] = {
    **{f"TTLinear, {rows} rows": (TTLinear(TT, bias=False), linear(rows)) for rows in (1, 2, 64)},
    "factors": (by_factors(TT), linear(4)),
    "BTTLinear": (BTTLinear(BTT, bias=False), linear(5)),
    "TTConv": (TTConv(CONV, (3, 3), bias=False), convolution()),
    **{f"lookup of {n}": (TTMEmbedding(TTM), lookup(n, 40)) for n in (3, 400)},
    **{f"deep lookup of {n}": (TTMEmbedding(DEEP), lookup(n, 300)) for n in (3, 9000)},
    "bags": (TTMEmbeddingBag(TTM), bag(12, 40)),
    "deep bags": (TTMEmbeddingBag(DEEP), bag(12, 300)),
    "tables": (TTMEmbedding(TTM), together(6, 40)),
    "deep tables": (TTMEmbedding(DEEP), together(6, 300)),
    "head": (TTMProjection(TTM, bias=False), head(4)),
    "deep head": (TTMProjection(TTMSpec(60, 6, (5, 4, 3), (3, 2, 1), (1, 4, 3, 1)), bias=False), head(40)),
    "weight": (TTLinear(TT, bias=False), (lambda layer: layer.weight * 1.0, lambda weight: weight * 1.0)),
    "parameter": (parameter(TT), (lambda layer: layer.weight * 1.0, lambda weight: weight * 1.0)),
}


@pytest.mark.parametrize("kernels", ["all", "none"])
@pytest.mark.parametrize("name", READS)
def test_a_nan_gate_reaches_what_it_is_in(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMERA_KERNELS", kernels)
    layer, (read, by) = READS[name]
    train = layer.tt
    torch.manual_seed(0)
    train.reset_parameters()
    with torch.no_grad():
        train.rank_params[0][0], train.rank_params[0][1] = nan, -inf
    found = read(layer)
    leaves = [p.detach().double().requires_grad_() for p in train.parameters()]
    cores, gates = leaves[: train.spec.order], leaves[train.spec.order :]
    kept = [torch.where(d <= train.threshold, 0.0, d) for d in gates]
    dense = materialize(train.spec, absorb(cores, kept))
    if not isinstance(train.spec, TTMSpec):
        dense = dense.t().reshape(layer.weight.shape)
    expected = by(dense)
    assert found.isnan().any()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    dy = torch.linspace(-1, 1, expected.numel()).cos().view(expected.shape)
    grads = torch.autograd.grad(found, list(train.rank_params), dy)
    exact = torch.autograd.grad(expected, gates, dy.double())
    for one, want in zip(grads, exact, strict=True):
        torch.testing.assert_close(one.double(), want, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert grads[0][0] != 0
    assert grads[0][1] == 0
    assert [bool(kept) for kept in train.unpruned()[0][:2]] == [True, False]
