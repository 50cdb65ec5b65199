"""S, its surrogate and its gradient against a loop over cores and autograd; what a model stores."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comera.errors import RankError
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import TTLinear
from comera.nn.size import ModelSize, model_size
from comera.nn.tensor_train import TensorTrain
from comera.rank.size import SizeTable, size_tables, unpruned_ranks, unpruned_size
from comera.rank.target import check_multiple, resolve_target, smallest_size
from comera.rank.trains import adaptable_trains
from comera.tt.format import spec_size
from comera.tt.spec import Spec, TTMSpec, TTSpec

TT = TTSpec(12, 20, (3, 4), (2, 2, 5), (1, 3, 6, 5, 4, 1))
TTM = TTMSpec(23, 12, (2, 3, 4), (3, 2, 2), (1, 4, 5, 1))
ORDER_1 = TTMSpec(5, 3, (5,), (3,), (1, 1))
SPECS = [TT, TTM, ORDER_1, TTSpec(6, 6, (6,), (6,), (1, 1, 1)), TTSpec(6, 6, (2, 3), (3, 2), (1, 0, 0, 0, 1))]


def gated(spec: Spec, dtype: torch.dtype = torch.float64, threshold: float = 1e-2) -> TensorTrain:
    """Gates from -1 to 2: at every inner rank an unpruned one, some pruned, some exactly at the threshold."""
    train = TensorTrain(spec, init_std=1.0, dtype=dtype, threshold=threshold)
    with torch.no_grad():
        for d in train.rank_params:
            d.copy_(torch.rand(d.shape, generator=torch.Generator().manual_seed(d.numel())) * 3 - 1)
            d[:1] = 0.7
            d[1::3] = threshold
    return train


def looped_surrogate(train: TensorTrain) -> Tensor:
    """docs/method.md §2, word by word."""
    one = torch.ones((), dtype=torch.float64)
    norms = [one, *(d[d > train.threshold].double().abs().sum() for d in train.rank_params), one]
    terms = [norms[k] * size * norms[k + 1] for k, size in enumerate(train.spec.sizes)]
    return torch.stack(terms).sum()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_surrogate_and_its_closed_form_gradient_agree_with_the_formula(spec: Spec) -> None:
    train = gated(spec)
    expected = looped_surrogate(train)
    torch.testing.assert_close(SizeTable([train]).surrogate(), expected, rtol=1e-12, atol=0)
    params = list(train.rank_params)
    if not params:
        assert SizeTable([train]).surrogate_grads() == []
        return
    closed = SizeTable([train]).surrogate_grads()
    for value in (expected, SizeTable([train]).surrogate()):
        for grad, auto in zip(closed, torch.autograd.grad(value, params), strict=True):
            torch.testing.assert_close(grad, auto, rtol=1e-12, atol=0)


def test_pruned_gates_get_exactly_zero_gradient_and_others_never() -> None:
    train = gated(TT)
    for grad, unpruned in zip(SizeTable([train]).surrogate_grads(), train.unpruned(), strict=True):
        assert torch.equal(grad != 0, unpruned)


def test_a_nan_gate_is_not_pruned_and_shows() -> None:
    train = gated(TT)
    before = int(SizeTable([train]).unpruned_gates())
    with torch.no_grad():
        train.rank_params[1][1] = torch.nan  # one at the threshold before
    assert int(SizeTable([train]).unpruned_gates()) == before + 1 == sum(int(kept.sum()) for kept in train.unpruned())
    assert SizeTable([train]).surrogate().isnan()


def test_sign_matters_below_a_negative_threshold() -> None:
    train = gated(TT, threshold=-2.0)
    torch.testing.assert_close(SizeTable([train]).surrogate(), looped_surrogate(train))
    for grad, d in zip(SizeTable([train]).surrogate_grads(), train.rank_params, strict=True):
        assert torch.equal(grad.sign(), torch.where(d > -2.0, d.sign(), 0.0))


def test_pruning_all_gates_of_a_rank_leaves_the_formula_as_it_is() -> None:
    train = gated(TT)
    with torch.no_grad():
        train.rank_params[1].zero_()
    r1, _, r3, r4 = unpruned_ranks(train)
    assert unpruned_size(train) == 3 * r1 + 2 * 0 + r3 * 2 * r4 + r4 * 5
    torch.testing.assert_close(SizeTable([train]).surrogate(), looped_surrogate(train))
    assert all(grad.any() for k, grad in enumerate(SizeTable([train]).surrogate_grads()) if k != 1)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_unpruned_size_is_that_of_the_cores_when_no_gate_is_pruned(spec: Spec) -> None:
    train = TensorTrain(spec, init_std=1.0)
    assert unpruned_size(train) == spec.numel == sum(core.numel() for core in train.cores)
    assert unpruned_ranks(train) == spec.inner_ranks
    assert SizeTable([train]).surrogate().item() == spec.numel


def test_unpruned_size_counts_gates_above_the_threshold() -> None:
    train = TensorTrain(TTM, init_std=1.0)
    with torch.no_grad():
        train.rank_params[0][1:] = 1e-2
        train.rank_params[1][:2] = -3.0
    assert unpruned_ranks(train) == (1, 3)
    assert unpruned_size(train) == 6 * 1 + 1 * 6 * 3 + 3 * 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_gates_are_summed_in_float32(dtype: torch.dtype) -> None:
    train = gated(TT, dtype)
    value = SizeTable([train]).surrogate()
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), looped_surrogate(train), rtol=1e-6, atol=0)
    assert all(grad.dtype == torch.float32 for grad in SizeTable([train]).surrogate_grads())


def test_a_table_over_many_trains_adds_them_up() -> None:
    trains = [gated(spec) for spec in SPECS]
    table = SizeTable(trains)
    torch.testing.assert_close(table.surrogate(), torch.stack([looped_surrogate(t) for t in trains]).sum())
    alone = [grad for train in trains for grad in SizeTable([train]).surrogate_grads()]
    for grad, expected in zip(table.surrogate_grads(0.5), alone, strict=True):
        torch.testing.assert_close(grad, 0.5 * expected, rtol=1e-12, atol=0)


def test_tables_group_by_dtype_and_threshold_and_notice_changes() -> None:
    trains = [gated(TT), gated(TTM), gated(TT, torch.float32), gated(TT, threshold=0.5)]
    tables = size_tables(trains)
    assert [len(table.trains) for table in tables] == [2, 1, 1]
    assert all(table.fits() for table in tables)
    trains[2].double()
    trains[3].set_(TT.with_ranks(2), [torch.ones(s) for s in TT.with_ranks(2).core_shapes])
    assert [table.fits() for table in tables] == [True, False, False]


def test_model_size_counts_tied_parameters_once_and_biases_under_total_only() -> None:
    embedding = TTMEmbedding(TTM)
    model = nn.Sequential(embedding, TTLinear(TT), nn.LayerNorm(20), nn.Linear(20, 12), TTMProjection(embedding.tt))
    size = model_size(model)
    tensorized = TTM.numel + TTM.rank_numel + TT.numel + TT.rank_numel
    others = 20 + 40 + (20 * 12 + 12) + 23  # biases of the compressed layers and of the head, the norm, the linear
    assert size == ModelSize(
        total=tensorized + others,
        tensorized=tensorized,
        dense_total=23 * 12 + 12 * 20 + others,
        dense_tensorized=23 * 12 + 12 * 20,
        bytes=4 * (tensorized + others),
    )
    assert size.ratio == size.dense_total / size.total
    assert size.tensorized_ratio == size.dense_tensorized / tensorized
    gates = TTM.rank_numel + TT.rank_numel  # which stay in float32
    assert model_size(model.half()).bytes == 2 * (size.total - gates) + 4 * gates
    assert f"{size.total:,} parameters" in str(size)


def test_a_known_dense_original_replaces_the_weights_of_the_trains() -> None:
    model = nn.Sequential(TTLinear(TT), nn.Linear(20, 12))
    alone = model_size(model)
    size = model_size(model, dense_total=alone.dense_total - 100)
    assert (size.dense_total, size.dense_tensorized) == (alone.dense_total - 100, alone.dense_tensorized - 100)
    assert (size.total, size.tensorized) == (alone.total, alone.tensorized)


def test_model_size_of_dense_empty_and_meta_models() -> None:
    dense = model_size(nn.Linear(3, 4))
    assert (dense.total, dense.tensorized, dense.ratio, dense.tensorized_ratio) == (16, 0, 1.0, 1.0)
    emptied = model_size(TTLinear(TT.with_ranks(0), bias=False))
    assert (emptied.total, emptied.dense_total, emptied.ratio) == (0, 240, float("inf"))
    assert model_size(TTLinear(TT, device="meta")).tensorized == TT.numel + TT.rank_numel


# --- sizes as users give them -----------------------------------------------------------------------------------------


SPEC = TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1))


def resolve(target: Any) -> int:
    return resolve_target(target, size=1_000_000, smallest=1000, bytes_per_element=4.0, where="target")


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        *[(0.25, 250_000), (1.0, 1_000_000), (1000, 1000), (1_000_000, 1_000_000)],
        *[("1MB", 2**18), ("1.5 MiB", 3 * 2**17), ("700kB", 700 * 256), ("8000 B", 2000), (" 0.001gb ", 268_435)],
    ],
)
def test_fractions_parameters_and_bytes(target: Any, parameters: int) -> None:
    assert resolve(target) == parameters


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (1_000_001, r"at most the present 1,000,000 parameters of the tensorized layers \(3.81 MB\), got 1000001"),
        ("4MB", "at most the present"),
        (999, r"999 = 999 parameters is below the smallest possible, 1,000 \(0.004 MB\)"),
        (0.0001, "below the smallest possible"),
        ("1 kB", "below the smallest possible"),
        (1.5, r"a float is a fraction of the size, in \(0, 1\], got 1.5"),
        ("half", "expected bytes such as '1.5MB'"),
        ("-3MB", "expected bytes such as"),
        ("3 parsecs", "expected bytes such as"),
        ("350000", "expected bytes such as"),
        ("9" * 400 + " MB", "expected bytes such as"),
        (10**400, "at most the present"),
        (float("inf"), r"a fraction of the size, in \(0, 1\], got inf"),
        (True, "expected a fraction such as 0.2"),
        (0, "expected a fraction such as 0.2"),
        (-0.5, "expected a fraction such as 0.2"),
        (float("nan"), "expected a fraction such as 0.2"),
        (None, "expected a fraction such as 0.2"),
    ],
)
def test_what_cannot_be_is_refused(target: Any, message: str) -> None:
    with pytest.raises(RankError, match=message):
        resolve(target)


def test_the_smallest_size_counts_tied_trains_once_and_keeps_multiples_and_empty_trains() -> None:
    first = TTLinear(SPEC)
    model = nn.ModuleList([first, TTLinear(first.tt), TTLinear(SPEC.with_ranks((1, 0, 0, 0, 1)))])
    assert smallest_size(adaptable_trains(model).values()) == 3 + 4 + 4 + 3 + 3
    assert smallest_size(adaptable_trains(model).values(), multiple=4) == spec_size(SPEC.with_ranks((1, 3, 4, 3, 1)))
    assert smallest_size(adaptable_trains(nn.Linear(2, 2)).values()) == 0


def test_a_train_with_a_rank_of_0_takes_nothing_in_the_end_and_one_of_order_1_all_it_has() -> None:
    table = TTMEmbedding(TTMSpec(5, 3, (5,), (3,), (1, 1)))
    empty = TTLinear(SPEC.with_ranks((1, 3, 0, 3, 1)))
    assert smallest_size(adaptable_trains(nn.ModuleList([table, empty])).values()) == 15


def test_where_nothing_is_stored_a_fraction_is_nothing_and_bytes_are_too_many() -> None:
    nothing = {"size": 0, "smallest": 0, "bytes_per_element": 0.0, "where": "target"}
    assert resolve_target(0.5, **nothing) == 0
    with pytest.raises(RankError, match="at most the present 0 parameters"):
        resolve_target("1 kB", **nothing)


def test_multiples_are_one_or_more() -> None:
    check_multiple(1)
    for multiple in (0, -8):
        with pytest.raises(RankError, match=f"multiples of 1 or more, got {multiple}"):
            check_multiple(multiple)
