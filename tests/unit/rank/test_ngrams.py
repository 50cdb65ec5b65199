"""Rank adaptation of n-gram tables: sizes and their gradient, pruning with moments, both stages, rounding."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import comera
from comera.errors import RankError
from comera.nn import NGramTable, model_size
from comera.nn.tensor_train import TensorTrain
from comera.ops.ngram import NGramIds
from comera.rank import prune_, round_
from comera.rank.ngrams import NGramGates
from comera.rank.size import SizeTable, size_tables, unpruned_size
from comera.tt.ngram import NGramSpec

CP = NGramSpec(7, 5, longest=4, heads=6)
TT = NGramSpec(7, 5, longest=3, heads=3, head_rank=2)
CUT = CP.keeping([torch.tensor([0, 4]), torch.tensor([1, 4, 5]), torch.tensor([2])])
SPECS = [CP, TT, CUT, NGramSpec(7, 5, longest=4, heads=6, inner=3)]


def gated(spec: NGramSpec, pruned: float = 0.3, dtype: torch.dtype = torch.float64) -> TensorTrain:
    """Gates of different sizes, some of them pruned."""
    torch.manual_seed(0)
    train = TensorTrain(spec, init_std=1.0, dtype=dtype)
    with torch.no_grad():
        for d in train.rank_params:
            d.uniform_(0.1, 2.0)
            d[torch.rand(len(d)) < pruned] = 0.0
    return train


def looped(train: TensorTrain, norm: str) -> Tensor:
    """S ("0") or Ŝ ("1") by the definition: for each table and head the union, or the largest, of all longer orders."""
    spec = train.spec
    assert isinstance(spec, NGramSpec)
    gates = [g.abs() if norm == "1" else (g != 0).double() for g in train.gates()]
    total = spec.embedding_dim * torch.cat(gates).sum()
    for k in range(spec.longest):
        for head in range(spec.heads):
            own = [
                g[at]
                for n, (g, columns) in enumerate(zip(gates, spec.gated, strict=True), start=2)
                for at, j in enumerate(columns)
                if n > k and j // spec.head_rank == head
            ]
            if own:
                price = spec.rows * (spec.head_rank if k == 0 else spec.head_rank**2)
                total = total + price * torch.stack(own).max()
    return total


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("pruned", [0.0, 0.3, 1.0])
def test_sizes_are_those_of_the_definition(spec: NGramSpec, pruned: float) -> None:
    train = gated(spec, pruned)
    (table,) = size_tables([train])
    gates = sum(int((d > 0).sum()) for d in train.rank_params)
    assert unpruned_size(train) == int(looped(train, "0"))
    assert table.size().item() == unpruned_size(train) + gates
    torch.testing.assert_close(table.surrogate(), looped(train, "1"))
    exact = torch.autograd.grad(looped(train, "1"), list(train.rank_params), allow_unused=True, materialize_grads=True)
    for found, own in zip(table.surrogate_grads(0.5), exact, strict=True):
        torch.testing.assert_close(found, 0.5 * own)


def test_tables_of_trains_and_ngrams_stand_beside_each_other() -> None:
    linear = TensorTrain(comera.TT(order=4, rank=4).spec(16, 16), init_std=1.0, dtype=torch.float64)
    tables = size_tables([gated(CP), linear, gated(TT)])
    assert [type(table) is SizeTable for table in tables] == [True, False, False]
    assert all(table.fits() for table in tables)


# --- pruning ---------------------------------------------------------------------------------------------------------


def table_of(spec: NGramSpec) -> NGramTable:
    torch.manual_seed(0)
    return NGramTable(TensorTrain(spec, init_std=1.0))


IDS = torch.randint(7, (3, 9), generator=torch.Generator().manual_seed(1))


def step(table: NGramTable, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    rows = table(NGramIds.of(IDS, table.spec.longest))
    (rows - rows.detach().roll(1, 1)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)], ids=["adamw", "sgd"]
)
def test_a_pruned_table_goes_on_as_the_masked_one(spec: NGramSpec, kind: Any) -> None:
    masked = table_of(spec)
    optimizer = kind(masked.parameters())
    step(masked, optimizer)
    with torch.no_grad():
        for n, d in enumerate(masked.tt.rank_params):
            d[: n + 1] = -1.0
    cut = copy.deepcopy(masked)
    other = kind(cut.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    size = unpruned_size(masked.tt)
    report = prune_(nn.ModuleList([cut]), [other])
    assert report.changed
    assert cut.spec.numel == unpruned_size(cut.tt) == size == sum(core.numel() for core in cut.tt.cores)
    for _ in range(3):
        ids = NGramIds.of(IDS, spec.longest)
        torch.testing.assert_close(cut(ids), masked(ids), rtol=1e-5, atol=1e-6)
        step(masked, optimizer)
        step(cut, other)


def test_all_gates_may_go_and_with_them_the_table() -> None:
    table = table_of(CP)
    with torch.no_grad():
        for d in table.tt.rank_params:
            d.zero_()
    prune_(nn.ModuleList([table]))
    assert table.spec.numel == 0
    ids = NGramIds.of(IDS, 4)
    assert not table(ids).any()
    table(ids).sum().backward()
    assert model_size(table).total == 5


def test_states_of_any_columns_load() -> None:
    table, other = table_of(CP), table_of(CP)
    with torch.no_grad():
        for n, d in enumerate(table.tt.rank_params):
            d[n : n + 2] = 0.0
    prune_(nn.ModuleList([table]))
    state = table.state_dict()
    other.load_state_dict(state)
    assert other.spec == table.spec
    ids = NGramIds.of(IDS, 4)
    assert torch.equal(other(ids), table(ids))
    state["tt.columns"] = state["tt.columns"].flip(0)
    with pytest.raises(RuntimeError, match=r"tt.columns: expected the features of 3 orders"):
        other.load_state_dict(state)
    assert other.spec == table.spec
    assert torch.equal(other.tt.get_buffer("columns"), table.tt.get_buffer("columns"))


# --- which gates stay -------------------------------------------------------------------------------------------------


def test_the_best_gates_at_a_price_are_those_of_all_subsets() -> None:
    spec = NGramSpec(4, 3, longest=3, heads=3)
    generator = torch.Generator().manual_seed(0)
    every = [torch.arange(3), torch.arange(3)]
    for price in (0.0, 0.05, 0.1, 0.2, 0.5):
        worth = torch.rand(2, 3, generator=generator)
        found = NGramGates(spec, every, worth.tolist()).choose(price)

        def gain(kept: list[Tensor], worth: Tensor = worth, price: float = price) -> float:
            left = spec.keeping(kept)
            value = sum(float(own[each].sum()) for own, each in zip(worth, kept, strict=True))
            return value - price * (left.numel + left.rank_numel)

        subsets = [torch.tensor([j for j in range(3) if mask >> j & 1], dtype=torch.long) for mask in range(8)]
        best = max(gain([a, b]) for a in subsets for b in subsets)
        assert gain(found) == pytest.approx(best, abs=1e-6)


def model_with_ngrams(rank: int = 24) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 11))
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=2, rank=8), None))
    comera.ngrams_(model, order=3, rank=rank)
    return model


def sequence(seed: int) -> Tensor:
    """What follows is decided by the two ids before."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(11, (8,), generator=generator) for _ in range(2)]
    for _ in range(14):
        ids.append((3 * ids[-1] + 5 * ids[-2] + 1) % 11)
    return torch.stack(ids, 1)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, ranks: Any = None) -> float:
    loss = torch.tensor(0.0)
    for seed in range(steps):
        ids = sequence(seed)
        loss = F.cross_entropy(model(ids[:, 1:-1]).flatten(0, 1), ids[:, 2:].flatten())
        loss.backward()
        if ranks is not None:
            ranks.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_both_stages_bring_trains_and_ngrams_to_a_target_together(optimizer: str) -> None:
    model = model_with_ngrams()
    made: torch.optim.Optimizer
    if optimizer == "muon":
        made = comera.optim.Muon(model, lr=1e-2)
    else:
        made = torch.optim.AdamW(comera.param_groups(model, lr=1e-2))
    ranks = comera.RankController(model, late=comera.LateStage(target_size=0.5, start_step=60, steps=60)).attach(made)
    before = ranks.size()
    trained(model, made, 130, ranks)
    table = model[0].ngrams
    report = ranks.meet_target_()
    assert report.after <= ranks.target_size <= before // 2 + 1
    assert table.spec.numel < NGramSpec(11, 16, 3, 24).numel
    assert report.after == sum(
        train.spec.numel + train.spec.rank_numel for _, train in comera.nn.tensor_train.named_trains(model)
    )
    assert trained(model, made, 60, ranks) < 1.0  # of single tokens nothing follows: 2.4


def test_rounding_drops_what_adds_least_and_keeps_the_moments_of_the_rest() -> None:
    model = model_with_ngrams()
    optimizer = torch.optim.AdamW(comera.param_groups(model, lr=1e-2))
    trained(model, optimizer, 3)
    table = model[0].ngrams
    with torch.no_grad():
        table.tt.rank_params[1][5:] *= 1e-3
    kept = table.tt.cores[2][:, :5].clone()
    moments = optimizer.state[table.tt.cores[2]]["exp_avg"][:, :5].clone()
    ids = NGramIds.of(IDS, 3)
    before = table(ids)
    total = sum(train.spec.numel + train.spec.rank_numel for _, train in comera.nn.tensor_train.named_trains(model))
    free = 19 * (11 + 16 + 1)  # columns of C_2 and of P, and gates
    report = round_(model, total - free, optimizers=[optimizer])
    assert report.after <= total - free
    assert table.spec.inner_ranks[1] == 5
    assert torch.equal(table.tt.cores[2], kept)
    assert torch.equal(optimizer.state[table.tt.cores[2]]["exp_avg"], moments)
    row = next(row for row in report.rows if "ngrams" in row.name)
    assert row.error is not None
    assert row.error < 2e-3
    torch.testing.assert_close(table(ids), before, rtol=1e-2, atol=1e-2)


def test_what_is_not_finite_is_refused_before_anything_changes() -> None:
    model = model_with_ngrams()
    table = model[0].ngrams
    with torch.no_grad():
        table.tt.rank_params[0][0] = torch.nan
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for change in (lambda: prune_(model), lambda: round_(model, 0.5)):
        with pytest.raises(RankError, match="NaN or infinite"):
            change()
    assert all(torch.equal(value, state[key]) or "rank_params.0" in key for key, value in model.state_dict().items())


def test_rates_are_those_of_tables_and_of_a_matrix() -> None:
    model = model_with_ngrams()
    table = model[0].ngrams
    groups = comera.param_groups(model, lr=1e-2, table_lr=3e-3)
    rate_of = {p: (group["name"], group["lr"]) for group in groups for p in group["params"]}
    *tables, p = table.tt.cores
    assert {rate_of[core] for core in tables} == {("tables", 3e-3)}
    assert rate_of[p] == ("cores", 1e-2)
    assert {rate_of[d][0] for d in table.tt.rank_params} == {"ranks"}
    muon = comera.optim.Muon(model, lr=1e-2)
    orthogonal = {p for group in muon.param_groups if group["orthogonal"] for p in group["params"]}
    assert p in orthogonal
    assert orthogonal.isdisjoint([*tables, *table.tt.rank_params, table.scale, model[0].weight])
