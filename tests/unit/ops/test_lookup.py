"""ttm_lookup against nn.Embedding over the float64 dense oracle: every option, gradients, padding, wrong ids."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from comera.errors import IdError, SpecError
from comera.ops import chunking
from comera.ops.lookup import rows, ttm_bag, ttm_lookup
from comera.ops.lookup.rows import separate_rows
from comera.ops.planner.plan import plan_lookup
from comera.tt.dense import absorb, materialize, zero_row
from comera.tt.spec import TTMSpec

from ...helpers.lookups import SPECS, cores_of, each_option, some_ids
from ...helpers.oracle import second_derivatives, signal_to_noise
from ...helpers.oracle import values_and_gradients as of_tensors
from ...helpers.specs import ttm

TABLES = [
    *SPECS,
    ttm((2, 2, 2, 2, 2, 2), (1, 2, 1, 2, 1, 2), 4),
    ttm((7, 1), (1, 6), 4),  # plain low rank
    ttm((3, 2, 1), (2, 1, 3), 2, pad_rows=1),
]


def force(spec, option, padding_idx=None):
    plan = plan_lookup(spec, 8).using(option.ends)
    return lambda ids, *cores: ttm_lookup(ids, spec, cores, padding_idx=padding_idx, plan=plan)


def values_and_gradients(function, ids, cores):
    return of_tensors(lambda *cores: function(ids, *cores), cores)


@each_option(TABLES)
@pytest.mark.parametrize("shape", [(), (1,), (40,), (0,), (3, 5), (2, 0, 3)], ids=str)
def test_agrees_with_the_dense_table(spec, option, shape):
    ids, cores = some_ids(spec, *shape), cores_of(spec)
    found = values_and_gradients(force(spec, option), ids, cores)
    exact = values_and_gradients(lambda ids, *cores: materialize(spec, cores)[ids], ids, cores)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


@each_option(TABLES)
def test_second_derivatives_are_those_of_the_dense_table(spec, option):
    ids, cores = some_ids(spec, 2, 3), cores_of(spec)
    found = second_derivatives(lambda *c: force(spec, option, 0)(ids, *c), cores)
    exact = second_derivatives(lambda *c: F.embedding(ids, zero_row(materialize(spec, c), 0)), cores)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


def test_full_gradcheck_of_two_parts():
    spec = SPECS[1]
    ids, cores, option = some_ids(spec, 6), cores_of(spec), plan_lookup(spec, 8).options[0]
    assert torch.autograd.gradcheck(lambda *c: force(spec, option, 3)(ids, *c), cores)


@each_option(TABLES)
def test_chunks_of_one_id_give_the_same(spec, option, monkeypatch):
    ids, cores = some_ids(spec, 9), cores_of(spec)
    whole = values_and_gradients(force(spec, option), ids, cores)
    monkeypatch.setattr(chunking, "CHUNK_CPU", 1)
    torch.testing.assert_close(values_and_gradients(force(spec, option), ids, cores), whole, rtol=1e-12, atol=1e-12)


@each_option(TABLES)
@pytest.mark.parametrize("padding_idx", [0, -1, 1])
def test_padding_row_is_zero_and_passes_no_gradient(spec, option, padding_idx):
    row = padding_idx % spec.num_embeddings
    ids, cores = torch.tensor([[row, 0, 2], [row, 1, row]]), cores_of(spec)
    found = values_and_gradients(force(spec, option, padding_idx), ids, cores)

    def table_without_row(ids, *cores):
        keep = (torch.arange(spec.num_embeddings) != row).double()
        return (materialize(spec, cores) * keep[:, None])[ids]

    torch.testing.assert_close(found, values_and_gradients(table_without_row, ids, cores), rtol=1e-10, atol=1e-10)
    assert torch.equal(found[0][ids == row], torch.zeros(int((ids == row).sum()), spec.embedding_dim).double())


def test_padding_is_that_of_nn_embedding():
    spec = SPECS[1]
    ids, cores = some_ids(spec, 4, 6), cores_of(spec)
    table = materialize(spec, cores).detach()
    dense = torch.nn.Embedding(*spec.shape, padding_idx=-2, _weight=table.clone())
    with torch.no_grad():
        dense.weight[-2] = 0
    assert torch.allclose(ttm_lookup(ids, spec, cores, padding_idx=-2), dense(ids), rtol=0, atol=1e-12)


def test_only_padding_gives_zero_gradients():
    spec = SPECS[2]
    ids, cores = torch.full((3,), 2), cores_of(spec)
    ttm_lookup(ids, spec, cores, padding_idx=2).sum().backward()
    assert all(torch.count_nonzero(core.grad) == 0 for core in cores)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_ids_in_any_layout(dtype):
    spec = SPECS[2]
    ids, cores = some_ids(spec, 4, 6, dtype=dtype).t(), cores_of(spec)
    for option in plan_lookup(spec, 8).options:
        y = force(spec, option)(ids, *cores)
        torch.testing.assert_close(y, materialize(spec, cores)[ids.long()], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int8])
def test_ids_that_are_no_indices_are_refused(dtype):
    spec = SPECS[1]
    with pytest.raises(TypeError, match=f"int32 or int64, got {dtype}"):
        ttm_lookup(torch.zeros(3).to(dtype), spec, cores_of(spec))


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([[0, 1], [16, 17]], r"got 17 at position \[1, 1\] of ids of shape \[2, 2\]"),
        ([3, -1, 99], r"got -1 at position \[1\]"),
        (20, r"got 20 at position \[\]"),
    ],
)
def test_id_outside_the_table_is_named_and_never_a_padded_row(ids, found):
    spec = SPECS[1]  # 17 rows, padded to 20
    with pytest.raises(IdError, match=r"expected every id in 0 ... 16 for a table of 17 rows, " + found) as caught:
        ttm_lookup(torch.tensor(ids), spec, cores_of(spec))
    assert isinstance(caught.value, IndexError)


def test_other_devices_look_up_without_synchronizing():
    spec = SPECS[2]
    cores = [core.to("meta") for core in cores_of(spec)]
    for option in plan_lookup(spec, 8).options:
        y = force(spec, option, 1)(torch.empty(3, 5, dtype=torch.int64, device="meta"), *cores)
        assert y.shape == (3, 5, spec.embedding_dim)


@pytest.mark.parametrize("padding_idx", [17, -18])
def test_padding_outside_the_table_is_refused(padding_idx):
    spec = SPECS[1]
    with pytest.raises(SpecError, match=rf"padding_idx in -17 ... 16 for 17 rows, got {padding_idx}"):
        ttm_lookup(torch.tensor([1]), spec, cores_of(spec), padding_idx=padding_idx)


def test_wrong_cores_are_named():
    spec = SPECS[1]
    with pytest.raises(SpecError, match=r"expected 2 cores of shapes \(\(1, 4, 3, 4\), \(4, 5, 2, 1\)\)"):
        ttm_lookup(torch.tensor([1]), spec, cores_of(spec)[:1])


def test_keeps_only_the_parts_and_the_ids():
    spec = ttm((16, 16), (8, 8), 8)
    ids, cores = some_ids(spec, 4096), cores_of(spec)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ttm_lookup(ids, spec, cores, plan=plan_lookup(spec, 4096).using("two_parts"))
    numbers = [t.numel() for t in kept if t.is_floating_point()]
    assert max(numbers) <= max(core.numel() for core in cores)


def test_repeated_ids_are_multiplied_once(monkeypatch):
    spec = SPECS[1]
    sizes = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b, **out: sizes.append(a.shape[0]) or bmm(a, b, **out))
    ttm_lookup(torch.tensor([3, 5, 3, 3, 5]), spec, cores_of(spec), plan=plan_lookup(spec, 5).using("two_parts"))
    assert sizes == [2]


def test_only_rows_of_parts_that_occur_are_made(monkeypatch):
    spec = ttm((9, 9, 9, 9), (2, 2, 2, 2), 5)
    ids = torch.tensor([0, 1, 82, 6560])  # left parts (0, 0), (0, 1), (8, 8); right parts (0, 0), (0, 1), (8, 8)
    sizes = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b, **out: sizes.append(a.shape[0]) or bmm(a, b, **out))
    found = ttm_lookup(ids, spec, cores_of(spec), plan=plan_lookup(spec, 4).using("sequential"))
    assert sizes == [3, 3, 4]
    torch.testing.assert_close(found, materialize(spec, cores_of(spec))[ids], rtol=1e-10, atol=1e-10)


def test_pairs_that_share_a_part_are_multiplied_together(monkeypatch):
    spec = ttm((16, 2), (2, 2), 4)
    monkeypatch.setattr(rows, "BLOCKS_FROM", 0)
    sizes = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b, **out: sizes.append(a.shape[0]) or bmm(a, b, **out))
    ids = torch.arange(29)  # 15 with the first right row, 14 with the second: blocks of 7
    found = ttm_lookup(ids, spec, cores_of(spec), plan=plan_lookup(spec, 29).using("two_parts"))
    assert sizes == [3 + 2]
    torch.testing.assert_close(found, materialize(spec, cores_of(spec))[ids], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "decibels"), [(torch.bfloat16, 54), (torch.float16, 72)])
def test_low_precision_rounds_once(dtype, decibels):
    spec = ttm((5, 4, 10, 10), (4, 2, 3, 4), 32, pad_rows=7)
    low, ids = cores_of(spec, dtype), some_ids(spec, 500)
    double = [core.detach().double().requires_grad_() for core in low]
    found = values_and_gradients(lambda ids, *cores: ttm_lookup(ids, spec, cores), ids, low)
    exact = values_and_gradients(lambda ids, *cores: F.embedding(ids, materialize(spec, cores)), ids, double)
    assert all(t.dtype == dtype for t in found)
    assert signal_to_noise(found[0], exact[0]) > decibels
    assert min(signal_to_noise(a, b) for a, b in zip(found[1:], exact[1:], strict=True)) > decibels - 4


def test_autocast_leaves_the_lookup_alone():
    spec = SPECS[2]
    ids, cores = some_ids(spec, 40), cores_of(spec, torch.float32)
    for option in plan_lookup(spec, 8).options:
        outside = values_and_gradients(force(spec, option), ids, cores)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = force(spec, option)(ids, *cores)
        assert inside.dtype == torch.float32
        assert torch.equal(inside, outside[0])


def test_gradients_reach_parts_whose_strides_are_not_contiguous() -> None:
    spec = TTMSpec(2, 4, (1, 2, 1, 1, 1, 1), (2, 1, 1, 1, 1, 2), (1, 1, 2, 1, 1, 1, 1))
    torch.manual_seed(0)
    cores = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in spec.core_shapes]
    for option in plan_lookup(spec, 1).options:
        plan = plan_lookup(spec, 1).using(option.ends)
        found = torch.autograd.grad(ttm_lookup(torch.tensor([0]), spec, cores, plan=plan).sum(), cores)
        exact = torch.autograd.grad(materialize(spec, cores)[0].sum(), cores)
        torch.testing.assert_close(found, exact)


class LargestProduct(TorchDispatchMode):
    """Elements of the largest result of an elementwise product."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mul:
            self.elements = max(self.elements, result.numel())
        return result


def test_gates_never_meet_the_rows_of_a_table_of_plain_low_rank():
    spec = ttm((97, 1), (1, 6), 4)
    cores, gates = cores_of(spec), torch.rand(4, dtype=torch.float64, requires_grad=True)
    with LargestProduct() as products:
        rows = ttm_lookup(some_ids(spec, 20), spec, cores, gates=[gates])
        rows.sum().backward()
    assert 0 < products.elements <= cores[1].numel()
    exact = materialize(spec, [cores[0].detach() * gates.detach(), cores[1].detach()])
    torch.testing.assert_close(rows.detach(), exact[some_ids(spec, 20)])


# --- rows of pairs that all differ, and gates apart from the cores ----------------------------------------------------


PAIRED = [
    ttm((7,), (5,), 1),
    ttm((4, 5), (3, 2), 4, pad_rows=3, pad_cols=1),
    ttm((4, 5), (3, 2), 0),
    ttm((3, 4, 2), (2, 3, 2), 3, pad_rows=5),
    ttm((3, 2, 2, 3), (1, 2, 2, 1), 4),
]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def train_of(spec):
    """Cores and gates; one gate between each two cores is zero, as pruned ones are."""
    cores = [normal(*shape, seed=k) for k, shape in enumerate(spec.core_shapes)]
    gates = [normal(rank, seed=k) for k, rank in enumerate(spec.inner_ranks)]
    for gates_R in gates:
        gates_R.data[1:2] = 0
    return cores, gates


def any_ids(spec, *shape):
    return torch.randint(0, spec.num_embeddings, shape, generator=torch.Generator().manual_seed(1))


def with_gradients(y, leaves):
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [y, *torch.autograd.grad(y, leaves, dy)]


def assert_equal(found, exact, leaves):
    assert found.shape == exact.shape
    torch.testing.assert_close(with_gradients(found, leaves), with_gradients(exact, leaves), rtol=1e-10, atol=1e-10)


@each_option(PAIRED)
@pytest.mark.parametrize("blocks_from", [0, 10**9])
def test_gates_may_stay_apart_from_the_cores(spec, option, blocks_from, monkeypatch):
    monkeypatch.setattr(rows, "BLOCKS_FROM", blocks_from)
    (cores, gates), plan, ids = train_of(spec), plan_lookup(spec, 8).using(option.ends), any_ids(spec, 50)
    leaves = [*cores, *gates]
    exact = materialize(spec, absorb(cores, gates))[ids]
    assert_equal(ttm_lookup(ids, spec, cores, gates=gates, plan=plan), exact, leaves)
    offsets = torch.tensor([0, 0, 3, 40])
    found = ttm_bag(ids, offsets, spec, cores, mode="sum", gates=gates, plan=plan)
    exact = F.embedding_bag(ids, materialize(spec, absorb(cores, gates)), offsets, mode="sum")
    assert_equal(found, exact, leaves)


@each_option(PAIRED)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 1, -1])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_bags_of_one_id(spec, option, mode, padding_idx, count):
    (cores, gates), plan, ids = train_of(spec), plan_lookup(spec, 8).using(option.ends), any_ids(spec, count, 1)
    settings = {"mode": mode, "padding_idx": padding_idx}
    if count:
        ids[0] = spec.num_embeddings - 1
    weights = normal(count, 1, seed=7) if mode == "sum" else None
    leaves = [*cores, *gates, *([] if weights is None else [weights])]
    found = ttm_bag(ids, None, spec, cores, gates=gates, plan=plan, per_sample_weights=weights, **settings)
    table = materialize(spec, absorb(cores, gates))
    assert_equal(found, F.embedding_bag(ids, table, per_sample_weights=weights, **settings), leaves)


@pytest.mark.parametrize("kernels", ["all", "none"])
@pytest.mark.parametrize("spec", [*PAIRED, ttm((3, 4, 2), (1, 3, 1), 3), ttm((3, 1, 2), (2, 3, 1), 1)], ids=str)
def test_gradients_have_the_strides_of_their_cores(spec, kernels, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", kernels)
    for option in plan_lookup(spec, 8).options:
        for count in (3, 60):
            cores = [torch.randn(shape, requires_grad=True) for shape in spec.core_shapes]
            rows = ttm_lookup(any_ids(spec, count), spec, cores, plan=plan_lookup(spec, 8).using(option.ends))
            rows.square().sum().backward()
            assert [core.grad.stride() for core in cores] == [core.stride() for core in cores]


@each_option(PAIRED)
def test_first_and_second_derivatives_of_pairs_are_those_of_the_dense_table(spec, option):
    (cores, gates), plan, ids = train_of(spec), plan_lookup(spec, 8).using(option.ends), any_ids(spec, 6)

    def look_up(*leaves):
        return ttm_lookup(ids, spec, leaves[: spec.order], gates=leaves[spec.order :], padding_idx=0, plan=plan)

    def dense(*leaves):
        table = materialize(spec, absorb(leaves[: spec.order], leaves[spec.order :]))
        return F.embedding(ids, zero_row(table, 0))

    for derivatives in (of_tensors, second_derivatives):
        found, exact = derivatives(look_up, (*cores, *gates)), derivatives(dense, (*cores, *gates))
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("small", [0, rows.SMALL])
@pytest.mark.parametrize("chunk", [1, chunking.CHUNK_CPU])
@pytest.mark.parametrize(("x", "y", "rank"), [(3, 2, 4), (1, 5, 1), (2, 3, 0)])
def test_rows_of_pairs_in_chunks_and_by_both_kinds_of_product(small, chunk, x, y, rank, monkeypatch):
    monkeypatch.setattr(rows, "SMALL", small)
    monkeypatch.setattr(chunking, "CHUNK_CPU", chunk)
    left, right = normal(6, x, rank), normal(rank, 4, y, seed=1)  # a table may be a view with its rank first
    i, k = torch.tensor([0, 2, 2, 5]), torch.tensor([3, 0, 1, 3])
    right_MYR = right.permute(1, 2, 0)
    exact = (left[i] @ right_MYR[k].mT).reshape(4, x * y)
    assert_equal(separate_rows(i, k, left, right_MYR), exact, [left, right])
    assert separate_rows(i[:0], k[:0], left, right_MYR).shape == (0, x * y)
    assert torch.autograd.gradgradcheck(lambda a, b: separate_rows(i, k, a, b.permute(1, 2, 0)), (left, right))
