"""Cutting pruned slices: what goes, what stays the same object, what is refused before anything changes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Adafactor

from comera.errors import RankError
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import TTLinear
from comera.nn.size import model_size
from comera.nn.tensor_train import TensorTrain
from comera.rank.budget import canonicalize_, round_
from comera.rank.importance import update_importance_, zero_gates_
from comera.rank.prune import prune_
from comera.rank.report import RankReport, RankRow
from comera.rank.size import SizeTable, unpruned_size
from comera.rank.step_rule import gradients_of
from comera.tt.spec import TTMSpec, TTSpec

TT = TTSpec(6, 10, (3, 2), (5, 2), (1, 3, 5, 2, 1))
OPTIMIZERS: dict[str, Any] = {
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def layer(threshold: float = 1e-2, dtype: torch.dtype = torch.float32) -> TTLinear:
    torch.manual_seed(0)
    return TTLinear(TensorTrain(TT, init_std=0.5, threshold=threshold, dtype=dtype))


def set_gates(train: TensorTrain, k: int, entries: Any, value: float = 0.0) -> None:
    with torch.no_grad():
        train.rank_params[k][entries] = value


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_pruned_slices_go_and_the_rest_is_copied_to_the_bit() -> None:
    model = layer()
    set_gates(model.tt, 0, 1)
    set_gates(model.tt, 1, [0, 3], -2.0)
    cores = [core.detach().clone() for core in model.tt.cores]
    before, size, surrogate_before = model.weight.detach(), unpruned_size(model.tt), SizeTable([model.tt]).surrogate()
    report = prune_(model)
    left, middle = [0, 2], [1, 2, 4]
    assert model.spec.ranks == (1, 2, 3, 2, 1)
    assert torch.equal(model.tt.cores[0], cores[0][:, :, left])
    assert torch.equal(model.tt.cores[1], cores[1][left][:, :, middle])
    assert torch.equal(model.tt.cores[2], cores[2][middle])
    assert torch.equal(model.tt.cores[3], cores[3])
    torch.testing.assert_close(model.weight, before, rtol=1e-6, atol=1e-6)
    assert unpruned_size(model.tt) == size == model.spec.numel
    torch.testing.assert_close(SizeTable([model.tt]).surrogate(), surrogate_before)
    assert report == RankReport("pruned", TT.numel + 10, size + 7, (RankRow("tt", (3, 5, 2), (2, 3, 2)),))
    assert report.changed
    assert model_size(model).tensorized == report.after


def test_the_report_reads_as_a_table() -> None:
    model = nn.ModuleDict({"first": layer(), "other": layer()})
    assert not prune_(model).changed
    assert str(prune_(model)) == "pruned nothing: 2 tensor trains, 206 parameters"
    set_gates(model["first"].tt, 0, 1)
    assert str(prune_(model)).splitlines()[2:] == [
        "| first.tt     | 3-5-2        | 2-5-2 |",
        "",
        "1 of 2 tensor trains pruned: 206 -> 192 parameters (93.2%)",
    ]


def test_parameters_stay_the_same_objects_and_keep_what_is_theirs() -> None:
    model = layer()
    model.tt.cores[1].requires_grad_(False)
    set_gates(model.tt, 2, 0)
    model(torch.ones(2, 6)).sum().backward()
    calls: list[Tensor] = []
    model.tt.cores[3].register_hook(calls.append)
    objects = list(model.parameters())
    grad = model.tt.cores[3].grad
    assert grad is not None
    prune_(model)
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert torch.equal(model.tt.cores[3].grad, grad[1:])
    assert model.tt.cores[1].grad is None
    assert [p.requires_grad for p in model.tt.cores] == [True, False, True, True]
    model(torch.ones(2, 6)).sum().backward()
    assert [tuple(g.shape) for g in calls] == [(1, 2, 1)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_cut_with_their_parameters_and_scalars_stay(name: str) -> None:
    model, x = layer(), torch.randn(4, 6)
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer, x)
    step(model, optimizer, x)
    core = model.tt.cores[1]
    before = copy.deepcopy(optimizer.state[core])
    set_gates(model.tt, 0, 0)
    set_gates(model.tt, 1, [1, 2])
    prune_(model, [optimizer])
    state = optimizer.state[core]
    assert set(state) == set(before)
    for key, value in before.items():
        if isinstance(value, Tensor) and value.ndim:
            assert torch.equal(state[key], value[1:][:, :, [0, 3, 4]]), key
        else:
            assert state[key] == value, key
    step(model, optimizer, x)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_zero_layer_is_its_bias_and_goes_on_training(name: str) -> None:
    model, x = layer(), torch.randn(4, 6)
    with torch.no_grad():
        model.bias.normal_()
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer, x)
    set_gates(model.tt, 1, slice(None))
    report = prune_(model, [optimizer])
    assert report.after == 0
    assert model.spec.ranks == (1, 0, 0, 0, 1)
    assert all(p.numel() == 0 for p in model.tt.parameters())
    assert torch.equal(model(x), model.bias.expand(4, 10))
    assert torch.equal(model.weight, torch.zeros(10, 6))
    bias = model.bias.detach().clone()
    step(model, optimizer, x)
    step(model, optimizer, x)
    assert not torch.equal(model.bias, bias)
    fresh = TTLinear(model.spec)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), model(x))
    assert not prune_(model, [optimizer]).changed


def test_tied_layers_are_cut_once_and_a_zero_table_gives_zeros() -> None:
    embedding = TTMEmbedding(TTMSpec(11, 6, (3, 4), (2, 3), (1, 5, 1)))
    model = nn.ModuleDict({"embedding": embedding, "head": TTMProjection(embedding.tt)})
    set_gates(embedding.tt, 0, [0, 4])
    rows = embedding.weight.detach()
    report = prune_(model)
    assert [row.name for row in report.rows] == ["embedding.tt"]
    assert model["head"].tt is embedding.tt
    assert embedding.spec.ranks == (1, 3, 1)
    torch.testing.assert_close(embedding(torch.arange(11)), rows, rtol=1e-5, atol=1e-6)
    set_gates(embedding.tt, 0, slice(None))
    prune_(model)
    assert torch.equal(embedding(torch.arange(11)), torch.zeros(11, 6))
    assert torch.equal(model["head"](torch.ones(2, 6)), torch.zeros(2, 11))


def test_a_train_of_order_1_has_nothing_to_cut() -> None:
    model = TTMEmbedding(TTMSpec(5, 3, (5,), (3,), (1, 1)))
    assert prune_(model).rows == (RankRow("tt", (), ()),)
    assert model.tt.cores[0].shape == (1, 5, 3, 1)


def test_one_rank_of_0_empties_the_whole_train() -> None:
    model = TTLinear(TTSpec(6, 6, (2, 3), (3, 2), (1, 2, 0, 2, 1)))
    assert prune_(model).changed
    assert model.spec.inner_ranks == (0, 0, 0)


def test_optimizers_state_of_another_shape_is_refused_with_nothing_changed() -> None:
    model, x = nn.Sequential(layer()), torch.randn(4, 6)
    adafactor = torch.optim.Adafactor(model.parameters())
    adamw = torch.optim.AdamW(model.parameters())
    for optimizer in (adamw, adafactor):
        step(model, optimizer, x)
    adafactor.state[model[0].tt.cores[0]]["sketch"] = torch.zeros(1, 2)
    set_gates(model[0].tt, 1, 2)
    before = copy.deepcopy((model.state_dict(), adamw.state_dict(), adafactor.state_dict()))
    with pytest.raises(RankError, match=r"Adafactor keeps 'sketch' of shape .*'0\.tt\.cores\.0'.*nothing was pruned"):
        prune_(model, [adamw, adafactor])
    after = (model.state_dict(), adamw.state_dict(), adafactor.state_dict())
    assert repr(after) == repr(before)
    assert model[0].spec == TT


@pytest.mark.parametrize(
    ("optimizer", "row", "col"),
    [
        (lambda p: torch.optim.Adafactor(p), "row_var", "col_var"),
        (lambda p: Adafactor(p, lr=1e-3, relative_step=False), "exp_avg_sq_row", "exp_avg_sq_col"),
    ],
)
def test_means_over_rows_and_columns_are_cut_with_their_cores(optimizer: Any, row: str, col: str) -> None:
    model, x = nn.Sequential(layer()), torch.randn(4, 6)
    adafactor = optimizer(model.parameters())
    step(model, adafactor, x)
    before = [copy.deepcopy(adafactor.state[core]) for core in model[0].tt.cores[1:3]]
    set_gates(model[0].tt, 1, 2)
    prune_(model, [adafactor])
    kept = torch.tensor([0, 1, 3, 4])  # of the rank between the two
    after = [adafactor.state[core] for core in model[0].tt.cores[1:3]]
    assert torch.equal(after[0][row], before[0][row])
    assert torch.equal(after[0][col], before[0][col].index_select(-1, kept))
    assert torch.equal(after[1][row], before[1][row].index_select(0, kept))
    assert torch.equal(after[1][col], before[1][col].index_select(0, kept))
    step(model, adafactor, x)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_gates_that_are_not_finite_are_refused_with_nothing_changed(value: float) -> None:
    model = nn.ModuleDict({"good": layer(), "bad": layer()})
    set_gates(model["good"].tt, 0, 0)
    set_gates(model["bad"].tt, 2, 1, value)
    with pytest.raises(RankError, match=r"rank parameters 3 of 'bad\.tt' hold NaN or infinite"):
        prune_(model)
    assert model["good"].spec == TT


def test_pruned_parameters_share_no_storage_with_the_old_ones() -> None:
    model = layer(dtype=torch.bfloat16)
    set_gates(model.tt, 0, 2)
    old = [p.data for p in model.tt.parameters()]
    prune_(model)
    for p, before in zip(model.tt.parameters(), old, strict=True):
        assert (p.data_ptr() == before.data_ptr()) == (p.shape == before.shape)
        assert p.untyped_storage().nbytes() == p.element_size() * p.numel()
    assert {p.dtype for p in model.tt.cores} == {torch.bfloat16}
    assert {p.dtype for p in model.tt.rank_params} == {torch.float32}


@pytest.mark.parametrize(
    ("multiple", "kept"), [(1, [1, 4]), (2, [1, 4]), (3, [1, 2, 4]), (4, [0, 1, 2, 4]), (8, list(range(5)))]
)
def test_ranks_stay_at_multiples_by_keeping_the_largest_pruned_gates(multiple: int, kept: list[int]) -> None:
    model, x = layer(), torch.randn(4, 6)
    values = torch.tensor([-0.5, 0.4, 0.009, -0.7, 1.0])
    with torch.no_grad():
        model.tt.rank_params[1].copy_(values)
    optimizer = OPTIMIZERS["sgd-momentum"](model.parameters())
    y, surrogate_before = model(x).detach(), SizeTable([model.tt]).surrogate()
    report = prune_(model, [optimizer], multiple=multiple)
    assert model.spec.inner_ranks == (3, len(kept), 2)
    assert torch.equal(model.tt.rank_params[1], values[kept])
    assert report.after == model_size(model).tensorized
    torch.testing.assert_close(model(x), y, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(SizeTable([model.tt]).surrogate(), surrogate_before)
    assert not prune_(model, multiple=multiple).changed
    step(model, optimizer, x)  # a pruned gate gets no gradient
    pruned = values[kept] <= 0.01
    assert torch.equal(model.tt.rank_params[1][pruned], values[kept][pruned])
    assert not torch.equal(model.tt.rank_params[1][~pruned], values[kept][~pruned])


def test_pruning_all_gates_of_a_rank_empties_the_train_whatever_the_multiple() -> None:
    model = layer()
    set_gates(model.tt, 1, slice(None))
    prune_(model, multiple=4)
    assert model.spec.inner_ranks == (0, 0, 0)


def test_a_multiple_below_one_is_refused() -> None:
    model = layer()
    set_gates(model.tt, 0, 1)
    with pytest.raises(RankError, match="multiples of 1 or more, got 0"):
        prune_(model, multiple=0)
    assert model.spec == TT


# --- version counters -------------------------------------------------------------------------------------------------


SPEC = TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1))


def zero_most(model: nn.ModuleList) -> None:
    optimizer = torch.optim.SGD(model[0].tt.parameters(), lr=0.0)
    model[0](torch.randn(4, 12)).square().sum().backward()
    update_importance_(optimizer, model[0].tt.rank_params, gradients_of(optimizer))
    zero_gates_([model[0].tt], [optimizer], 20)


def zero_and_prune(model: nn.ModuleList) -> None:
    with torch.no_grad():
        model[0].tt.rank_params[1].data[0] = 0.0
    prune_(model)


CHANGES: dict[str, Callable[[nn.ModuleList], object]] = {
    "prune_": zero_and_prune,
    "round_": lambda model: round_(model[0], 0.5),
    "canonicalize_": lambda model: canonicalize_([model[0].tt]),
    "zero_gates_": zero_most,
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_parameter_that_is_written_gets_a_new_version_and_no_other(change: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([TTLinear(SPEC), TTLinear(SPEC)])
    before = {name: p._version for name, p in model.named_parameters()}
    CHANGES[change](model)
    for name, p in model.named_parameters():
        written = name.startswith("0.tt." if change != "zero_gates_" else "0.tt.rank_params.")
        assert (p._version > before[name]) == written, name


def test_a_backward_through_values_that_were_cut_is_refused() -> None:
    layer = TTLinear(SPEC)
    weight = layer.tt.dense()
    with torch.no_grad():
        layer.tt.rank_params[1].data[0] = 0.0
    prune_(layer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weight.sum().backward()
