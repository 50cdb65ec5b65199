"""Parameter groups by type, and the learning-rate schedule."""

import doctest
from math import prod, sqrt
from typing import Any

import pytest
import torch
from torch import nn

from comera.errors import ConfigError
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import TTLinear
from comera.nn.tensor_train import TensorTrain
from comera.optim import param_groups
from comera.optim.core_rates import RARE, core_rates
from comera.rank.prune import prune_
from comera.trainer.optimizer import lr_multiplier
from comera.tt.ngram import NGramSpec
from comera.tt.shapes import btt_spec, tt_spec, ttm_spec
from comera.tt.spec import BTTSpec, Spec, TTMSpec, TTSpec


def model() -> nn.ModuleDict:
    embedding = TTMEmbedding(TTMSpec(11, 6, (3, 4), (2, 3), (1, 5, 1)))
    dense = nn.Linear(6, 6)
    tied = nn.Linear(6, 6)
    tied.weight = dense.weight
    parts = {"embedding": embedding, "linear": TTLinear(TTSpec(6, 6, (3, 2), (2, 3), (1, 3, 4, 3, 1))), "dense": dense}
    return nn.ModuleDict(
        {**parts, "tied": tied, "norm": nn.LayerNorm(6), "head": TTMProjection(embedding.tt, bias=False)}
    )


def test_groups_follow_types_and_hold_each_parameter_once() -> None:
    net = model()
    rates = {"lr": 1e-3, "core_lr": 1e-4, "table_lr": 1e-5, "rank_lr": 1e-2}
    groups = {g["name"]: g for g in param_groups(net, **rates, weight_decay=0.1)}
    trains = [net["embedding"].tt, net["linear"].tt]
    members = {name: {id(p) for p in group["params"]} for name, group in groups.items()}
    assert members == {
        "cores": {id(core) for core in net["linear"].tt.cores},
        "tables": {id(core) for core in net["embedding"].tt.cores},
        "ranks": {id(d) for tt in trains for d in tt.rank_params},
        "dense": {id(net["dense"].weight)},
        "dense_no_decay": {
            id(p) for p in (net["linear"].bias, net["dense"].bias, net["tied"].bias, *net["norm"].parameters())
        },
    }
    every = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(every) == sorted(id(p) for p in net.parameters())
    settings = {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()}
    assert settings == {
        "cores": (1e-4, 0.1 / 4),
        "tables": (1e-5, 0.1 / 2),
        "ranks": (1e-2, 0.0),
        "dense": (1e-3, 0.1),
        "dense_no_decay": (1e-3, 0.0),
    }


def test_the_example_of_the_docstring_runs() -> None:
    (example,) = doctest.DocTestFinder().find(param_groups, "param_groups", globs={})
    assert len(example.examples) >= 6
    doctest.DebugRunner().run(example)


def test_lr_serves_where_no_other_is_given_and_optimizers_keep_the_names() -> None:
    optimizer = torch.optim.AdamW(param_groups(model(), lr=3e-4, rates="flat"))
    assert [g["name"] for g in optimizer.param_groups] == ["cores", "tables", "ranks", "dense", "dense_no_decay"]
    assert {g["lr"] for g in optimizer.param_groups} == {3e-4}
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0}


def test_given_rates_are_taken_to_the_bit() -> None:
    net = nn.ModuleList(TTLinear(TTSpec(6, 6, (6,), (6,), (1, 3, 1))) for _ in range(3))
    rates = {g["name"]: g["lr"] for g in param_groups(net, lr=0.1, core_lr=3e-3, rank_lr=0.7)}
    assert rates == {"cores": 3e-3, "ranks": 0.7, "dense_no_decay": 0.1}


def test_tables_take_the_rate_of_the_cores_where_they_have_none() -> None:
    rates = {g["name"]: g["lr"] for g in param_groups(model(), lr=3e-4, core_lr=1e-4)}
    assert rates == {"cores": 1e-4, "tables": 1e-4, "ranks": 3e-4, "dense": 3e-4, "dense_no_decay": 3e-4}


def test_frozen_parameters_and_empty_groups_are_omitted() -> None:
    net = model()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("rank_params" in name)
    assert [g["name"] for g in param_groups(net, lr=1e-3)] == ["ranks"]
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="ModuleDict has no trainable parameter"):
        param_groups(net, lr=1e-3)
    with pytest.raises(ConfigError, match="ReLU has no trainable parameter"):
        param_groups(nn.ReLU(), lr=1e-3)


@pytest.mark.parametrize("field", ["lr", "core_lr", "table_lr", "rank_lr", "weight_decay"])
@pytest.mark.parametrize("value", [-1e-3, float("nan"), float("inf")])
def test_values_out_of_range_are_refused(field: str, value: float) -> None:
    values: dict[str, Any] = {"lr": 1e-3, field: value}
    with pytest.raises(ConfigError, match=f"{field} must be a finite number >= 0"):
        param_groups(nn.Linear(2, 2), **values)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.4: 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 0.6: 0.55, 1.0: 0.1}),
        ("linear", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.4: 0.775, 0.6: 0.55, 1.0: 0.1}),
        ("constant", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.6: 1.0, 1.0: 1.0}),
    ],
)
def test_the_multiplier_warms_up_then_falls(schedule: Any, expected: dict[float, float]) -> None:
    for progress, value in expected.items():
        assert lr_multiplier(progress, warmup=0.2, schedule=schedule, final=0.1) == pytest.approx(value)


def test_progress_beyond_its_range_is_clamped_and_no_warmup_starts_at_one() -> None:
    assert lr_multiplier(-0.5, warmup=0.0, schedule="cosine", final=0.0) == 1.0
    assert lr_multiplier(1.3, warmup=0.0, schedule="cosine", final=0.25) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup": 1.0}, "0 <= warmup < 1, got 1.0"),
        ({"warmup": -0.1}, "0 <= warmup < 1, got -0.1"),
        ({"final": 1.5}, "final must be a multiplier from 0 to 1, got 1.5"),
        ({"schedule": "step"}, "'cosine', 'linear' or 'constant', got 'step'"),
    ],
)
def test_schedules_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"warmup": 0.1, "schedule": "cosine", "final": 0.1, **changes}
    with pytest.raises(ConfigError, match=message):
        lr_multiplier(0.5, **arguments)


# --- the rates of cores -----------------------------------------------------------------------------------------------


LINEAR = [
    tt_spec(48, 64, order=2, rank=6),
    tt_spec(64, 48, order=6, rank=9),
    tt_spec(97, 61, order=5, rank=4),
    btt_spec(48, 64, rank=1),
    btt_spec(64, 48, rank=3),
    BTTSpec(12, 10, (3, 4), (2, 5), ((1, 4), (2, 3), (0, 1))),
]


def made(spec: Spec, std: float = 0.1) -> TensorTrain:
    generator = torch.Generator().manual_seed(0)
    return TensorTrain(spec, init_std=std, generator=generator, dtype=torch.float64)


class Held(torch.nn.Module):
    """What holds a tensor train in a model."""

    def __init__(self, spec: Spec, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.tt = TensorTrain(spec, init_std=0.1, generator=generator)


def moved(train: TensorTrain, k: int, step: float) -> float:
    """Spectral norm of the change of the weight when all entries of a core move by `step` up."""
    before = train.dense().detach()
    cores = [core.detach().clone() for core in train.cores]
    cores[k] += step
    return float(torch.linalg.matrix_norm(train.dense([*cores, *train.rank_params]).detach() - before, 2))


@pytest.mark.parametrize("spec", LINEAR, ids=str)
def test_the_steps_of_all_cores_together_move_the_weight_no_further_than_a_dense_step(spec: Spec) -> None:
    train, step = made(spec), 1e-3
    rates = core_rates(train)
    dense = step * sqrt(prod(spec.shape))  # of a matrix whose entries all move by the step
    each = [moved(train, k, step * rate) for k, rate in enumerate(rates)]
    assert all(0 < found <= dense / spec.order * (1 + 1e-2) for found in each)  # rates have three digits


@pytest.mark.parametrize("spec", LINEAR[:2] + LINEAR[3:5], ids=str)
def test_the_bound_is_one_for_the_product_and_not_for_the_scale_of_a_core(spec: Spec) -> None:
    train = made(spec)
    rates = core_rates(train)
    with torch.no_grad():  # the same weight, with its scale elsewhere
        train.cores[0].mul_(4)
        train.cores[1].div_(4)
    again = core_rates(train)
    assert again[0] == pytest.approx(4 * rates[0], rel=1e-2)
    assert again[1] == pytest.approx(rates[1] / 4, rel=1e-2)


@pytest.mark.parametrize("spec", LINEAR[:5], ids=str)
def test_a_weight_of_half_the_size_moves_as_far(spec: Spec) -> None:
    small, large = core_rates(made(spec, 0.05)), core_rates(made(spec, 0.1))
    if isinstance(spec, TTSpec):  # all cores are smaller by the same factor: each makes up for the others
        factors = [2 ** (1 - 1 / spec.order)] * spec.order
    else:  # only L is smaller: R makes up for it
        factors = [2.0, 1.0]
    assert small == pytest.approx([rate * factor for rate, factor in zip(large, factors, strict=True)], rel=1e-2)


def test_a_row_of_a_table_moves_no_further_than_that_of_a_rare_token() -> None:
    spec = ttm_spec(60, 24, order=3, rank=5)
    train, step = made(spec), 1e-3
    before = train.dense()
    for k, rate in enumerate(core_rates(train)):
        cores = [core.detach().clone() for core in train.cores]
        cores[k] += step * rate
        change = (train.dense([*cores, *train.rank_params]) - before).detach().norm(dim=1).max()
        assert 0 < float(change) <= RARE * step * sqrt(24) / 3 * (1 + 1e-2)


def test_a_row_that_makes_logits_too_moves_as_that_of_a_dense_table_in_every_step() -> None:
    embed = TTMEmbedding(ttm_spec(60, 24, order=3, rank=5))
    alone, tied = core_rates(embed.tt), core_rates(embed.tt, logits=True)
    assert alone == pytest.approx([RARE * rate for rate in tied], rel=1e-2)
    model = torch.nn.Sequential(embed)
    assert sorted(group["lr"] for group in param_groups(model, lr=1.0)[:-1]) == sorted(alone)
    model.append(TTMProjection(embed.tt, bias=False))
    assert sorted(group["lr"] for group in param_groups(model, lr=1.0)[:-1]) == sorted(tied)


@pytest.mark.parametrize("spec", [tt_spec(48, 64, order=4, rank=0), btt_spec(48, 64, rank=0)], ids=str)
def test_there_is_nothing_to_measure_in_an_empty_train_or_on_the_meta_device(spec: Spec) -> None:
    assert core_rates(made(spec)) is None
    full = spec.with_ranks(2)
    assert core_rates(TensorTrain(full, init_std=0.1, device="meta")) is None


def test_groups_take_them_unless_rates_are_given() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.tt = made(LINEAR[0])
    expected = sorted({1e-3 * rate for rate in core_rates(made(LINEAR[0]))})
    found = sorted({g["lr"] for g in param_groups(model, lr=1e-3, rates="spectral") if g["name"] == "cores"})
    assert found == pytest.approx(expected)
    assert {g["lr"] for g in param_groups(model, lr=1e-3, rates="spectral", core_lr=2e-3) if g["name"] == "cores"} == {
        2e-3
    }


@pytest.mark.parametrize("kind", ["rank 0", "zeros"])
@pytest.mark.parametrize("spec", [LINEAR[0], LINEAR[4]], ids=str)
def test_a_train_without_anything_to_measure_does_not_change_the_rates_of_the_others(spec: Spec, kind: str) -> None:
    def rates(*blocks: torch.nn.Module) -> list[float]:
        model = torch.nn.Sequential(*(torch.nn.ModuleDict({"up": block}) for block in blocks))
        groups = param_groups(model, lr=1e-3, rates="spectral", weight_decay=0.1)
        return [group["lr"] for group in groups if group["name"] == "cores"]

    other = Held(spec.with_ranks(0) if kind == "rank 0" else spec, 1)
    torch.nn.init.zeros_(other.tt.cores[0])
    assert rates(Held(spec, 0), other) == rates(Held(spec, 0))
    assert rates(other) == [1e-3] * spec.order


def test_an_optimizer_made_after_a_cut_loads_its_state() -> None:
    def groups(model: torch.nn.Module) -> list[tuple[str, int]]:
        return [(g["name"], len(g["params"])) for g in param_groups(model, lr=1e-3, rates="spectral")]

    model = torch.nn.Sequential()
    for k in range(2):
        model.add_module(f"block{k}", torch.nn.ModuleDict({"up": Held(LINEAR[1], k), "down": Held(LINEAR[4], k)}))
    before = groups(model)
    assert len(before) < 2 * sum(spec.order for spec in (LINEAR[1], LINEAR[4]))  # blocks share groups
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3, rates="spectral"))
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, TensorTrain):
                part.rank_params[0][1::2] = 0
                part.cores[0].mul_(3)
    prune_(model, [optimizer])
    assert groups(model) == before
    torch.optim.AdamW(param_groups(model, lr=1e-3, rates="spectral")).load_state_dict(optimizer.state_dict())


def test_a_weight_decays_as_a_dense_one_does() -> None:
    model = Held(LINEAR[1], 0)
    groups = param_groups(model, lr=1e-2, rates="spectral", weight_decay=0.1)
    cores = [group for group in groups if group["name"] == "cores"]
    assert prod(1 - g["lr"] * g["weight_decay"] for g in cores for _ in g["params"]) == pytest.approx(
        1 - 1e-3, abs=1e-6
    )


def test_another_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="rates must be 'flat' or 'spectral', got 'mup'"):
        param_groups(Held(LINEAR[0], 0), lr=1e-3, rates="mup")  # type: ignore[arg-type]


@pytest.mark.parametrize(("std", "inner", "rows"), [(0.05, None, 1), (0.05, 12, 13), (2.0, None, 1), (0.05, 1, 2)])
def test_tables_of_ngrams_move_in_proportion_as_dense_rows_do(std: float, inner: int | None, rows: int) -> None:
    """A step of Adam at the rate η adds η to each entry of a dense row, η / σ of it; `inner`: in all rows at once.
    Rows of more than norm one, 16 entries of 1/4, count as these."""
    train = made(NGramSpec(99, 16, longest=4, heads=8, inner=inner), std)
    *tables, p = core_rates(train) or []
    assert tables == pytest.approx([1 / min(std, 0.25) / rows] * 4, rel=5e-3)
    assert p == 1.0


def test_rates_of_ngrams_are_finite_beside_a_table_of_zeros() -> None:
    assert core_rates(made(NGramSpec(99, 16, longest=2, heads=8), 0.0)) == [100.0, 100.0, 1.0]
