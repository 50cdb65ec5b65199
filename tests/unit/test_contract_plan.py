"""Plans: what they count, what they choose, how they print, and that they are made once."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from comera.contract.linear import tt_linear, ttm_linear
from comera.contract.plan import (
    Cost,
    _plan_linear,
    batch_bucket,
    choose,
    plan_linear,
    plan_lookup,
    plan_projection,
)
from comera.tt.spec import TTMSpec, TTSpec, clip_ranks


def tt(in_modes, out_modes, rank):
    modes = (*in_modes, *out_modes)
    features = [torch.Size(m).numel() for m in (in_modes, out_modes)]
    return TTSpec(*features, tuple(in_modes), tuple(out_modes), clip_ranks(rank, modes))


def ttm(row_modes, col_modes, rank, rows=None):
    sizes = [m * n for m, n in zip(row_modes, col_modes, strict=True)]
    rows = rows or torch.Size(row_modes).numel()
    return TTMSpec(rows, torch.Size(col_modes).numel(), tuple(row_modes), tuple(col_modes), clip_ranks(rank, sizes))


BERT = tt((12, 8, 8), (8, 8, 12), 30)
VOCABULARY = ttm((16, 20, 10, 10), (4, 4, 8, 6), 32, rows=30522)
LONG = tt((4, 4, 4, 4), (4, 4, 4, 4), 12)


def measured_flops(function, spec, batch, features):
    """Operations of one forward and backward, counted by torch while they run."""
    cores = [torch.randn(shape, requires_grad=True) for shape in spec.core_shapes]
    x = torch.randn(batch, features, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        function(x, spec, cores).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("batch", "bucket"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024)])
def test_bucket_is_the_next_power_of_two(batch, bucket):
    assert batch_bucket(batch) == bucket


def test_plans_are_made_once_per_spec_bucket_and_itemsize():
    spec = tt((3, 5), (7, 2), 3)
    before = _plan_linear.cache_info()
    plan = plan_linear(spec, 900)
    assert plan_linear(spec, 1024) is plan
    assert plan_linear(tt((3, 5), (7, 2), 3), 513) is plan
    assert plan_linear(spec, 1025) is not plan
    assert plan_linear(spec, 900, itemsize=2) is not plan
    after = _plan_linear.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (3, 2)


@pytest.mark.parametrize("strategy", ["halves", "chain", "dense"])
@pytest.mark.parametrize(
    "spec", [BERT, LONG, tt((6,), (4, 3, 2), 5), tt((5, 4, 3, 2, 2), (7, 3), 6), tt((9,), (8,), 4)], ids=str
)
@pytest.mark.parametrize("batch", [1, 16])
def test_planned_flops_are_the_measured_ones(spec, batch, strategy):
    plan = plan_linear(spec, batch).using(strategy)
    assert plan.flops == measured_flops(lambda *a: tt_linear(*a, plan=plan), spec, batch, spec.in_features)


@pytest.mark.parametrize(("strategy", "split"), [("halves", 1), ("halves", 2), ("dense", 0)])
def test_planned_flops_of_a_projection_are_the_measured_ones(strategy, split):
    spec = ttm((5, 4, 6), (3, 4, 2), 5)
    plan = plan_projection(spec, 8).using(strategy, split)
    assert plan.flops == measured_flops(lambda *a: ttm_linear(*a, plan=plan), spec, 8, spec.embedding_dim)


def test_large_batch_and_small_rank_take_the_halves():
    for batch in (128, 1024, 4096):
        assert plan_linear(BERT, batch).strategy == "halves"


def test_full_rank_takes_the_dense_product():
    assert plan_linear(tt((24,), (24,), 24), 1024).strategy == "dense"
    assert plan_linear(tt((8, 8), (8, 8), 64), 1024).strategy == "dense"
    assert plan_projection(ttm((8, 8), (4, 4), 32), 1024).strategy == "dense"


def test_tiny_layer_takes_the_dense_product():
    assert plan_linear(tt((2, 2), (2, 2), 4), 512).strategy == "dense"


@pytest.mark.parametrize("batch", [1, 2, 1024])
def test_choice_for_a_long_chain_is_the_one_with_the_fewest_measured_flops(batch):
    plan = plan_linear(LONG, batch)
    flops = {
        option.strategy: measured_flops(
            lambda *a, strategy=option.strategy: tt_linear(*a, plan=plan.using(strategy)), LONG, batch, LONG.in_features
        )
        for option in plan.options
    }
    assert plan.strategy == min(flops, key=flops.__getitem__)
    assert (plan.strategy == "chain") == (batch < 1024)


def test_vocabulary_is_cut_in_the_middle():
    assert (plan_projection(VOCABULARY, 150).strategy, plan_projection(VOCABULARY, 150).split) == ("halves", 2)
    assert (plan_lookup(VOCABULARY, 4096).strategy, plan_lookup(VOCABULARY, 4096).split) == ("halves", 2)


def test_small_table_is_looked_up_dense_and_counts_no_row_twice():
    small = ttm((2, 2), (2, 2), 4)
    assert plan_lookup(small, 4096).strategy == "dense"
    assert plan_lookup(small, 4096) is plan_lookup(small, 4)


@pytest.mark.parametrize("plan", [plan_linear(BERT, 0), plan_projection(VOCABULARY, 0), plan_lookup(VOCABULARY, 0)])
def test_empty_batch_has_a_plan(plan):
    assert plan.strategy in {"halves", "chain", "dense"}
    assert plan.seconds >= 0


def test_rank_zero_costs_next_to_nothing():
    assert plan_linear(tt((4, 4), (4, 4), 0), 64).flops == 0


def test_prints_a_table_with_the_choice_marked():
    lines = str(plan_linear(BERT, 1000)).splitlines()
    assert lines[0] == "x (1024 × 768) times TT 12·8·8 / 8·8·12 ranks 12-30-30-30-12"
    assert lines[1].split() == ["strategy", "split", "MFLOP", "MB", "est.", "ms"]
    assert [line.split()[0] for line in lines[2:]] == ["→", "dense", "chain"]
    halves = plan_linear(BERT, 1000)
    assert lines[2].split() == [
        *("→", "halves", "3"),
        *(f"{halves.flops / 1e6:,.3f}", f"{halves.bytes / 1e6:,.3f}", f"{halves.seconds * 1e3:,.3f}"),
    ]


def test_estimate_is_the_documented_sum():
    cost = Cost(flops=95_000_000_000, bytes=10_000_000_000, calls=200_000) + Cost()
    assert cost.seconds == pytest.approx(3.0)


def test_using_an_unknown_option_names_the_known_ones():
    with pytest.raises(ValueError, match=r"planned options halves \(split 3\), dense .* got spiral"):
        plan_linear(BERT, 8).using("spiral")
    with pytest.raises(ValueError, match=r"got halves \(split 7\)"):
        plan_projection(VOCABULARY, 8).using("halves", 7)


def test_choose_follows_a_given_plan_and_makes_one_otherwise():
    assert choose("linear", BERT, 1000, 4) == ("halves", 3)
    assert choose("linear", BERT, 1000, 4, plan_linear(BERT, 8).using("dense")) == ("dense", 3)
    assert choose("lookup", VOCABULARY, 4096, 4) == ("halves", 2)
