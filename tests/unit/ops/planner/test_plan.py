"""Plans: what they count, what they choose, how they print, and that they are made once."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from comera.ops.linear import tt_linear
from comera.ops.planner.cost import ACCELERATOR, CPU, Cost, Machine, machine, product, work
from comera.ops.planner.groups import Group
from comera.ops.planner.plan import choose, make_plan, plan_linear, plan_lookup, plan_projection
from comera.ops.planner.problem import LinearProblem, LookupProblem, ProjectionProblem, batch_bucket
from comera.ops.projection import ttm_linear
from comera.tt.spec import TTSpec

from ....helpers.specs import tt, ttm

BERT = tt((12, 8, 8), (8, 8, 12), 30)
VOCABULARY = ttm((16, 20, 10, 10), (4, 4, 8, 6), 32, pad_rows=1478)
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
    before = make_plan.cache_info()
    plan = plan_linear(spec, 900)
    assert plan_linear(spec, 1024) is plan
    assert plan_linear(tt((3, 5), (7, 2), 3), 513) is plan
    assert plan_linear(spec, 1025) is not plan
    assert plan_linear(spec, 900, itemsize=2) is not plan
    assert plan_linear(spec, 900, device="cuda") is not plan
    assert plan_linear(spec, 900, grad_x=False) is not plan
    after = make_plan.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (5, 2)


def test_evaluation_takes_the_plan_of_training():
    assert plan_linear(BERT, 64, grad_x=False, grad_cores=False) is plan_linear(BERT, 64)


@pytest.mark.parametrize("strategy", ["low_rank", "sequential", "dense"])
@pytest.mark.parametrize(
    "spec", [BERT, LONG, tt((6,), (4, 3, 2), 5), tt((5, 4, 3, 2, 2), (7, 3), 6), tt((9,), (8,), 4)], ids=str
)
@pytest.mark.parametrize("batch", [1, 16])
def test_planned_flops_are_the_measured_ones(spec, batch, strategy, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "none")  # the C++ merge computes partial products again in its backward
    plan = plan_linear(spec, batch).using(strategy)
    assert plan.flops == measured_flops(lambda *a: tt_linear(*a, plan=plan), spec, batch, spec.in_features)


@pytest.mark.parametrize("ends", [(1, 3), (2, 3), (3,)])
def test_planned_flops_of_a_projection_are_the_measured_ones(ends):
    spec = ttm((5, 4, 6), (3, 4, 2), 5)
    plan = plan_projection(spec, 8).using(ends)
    assert plan.flops == measured_flops(lambda *a: ttm_linear(*a, plan=plan), spec, 8, spec.embedding_dim)


def test_large_batch_and_small_rank_take_low_rank_factors():
    for batch in (128, 1024, 4096):
        assert plan_linear(BERT, batch).strategy == "low_rank"


def test_full_rank_takes_the_dense_product():
    assert plan_linear(tt((24,), (24,), 24), 1024).strategy == "dense"
    assert plan_linear(tt((8, 8), (8, 8), 64), 1024).strategy == "dense"
    assert plan_projection(ttm((8, 8), (4, 4), 32), 1024).strategy == "dense"


def test_tiny_layer_takes_the_dense_product():
    assert plan_linear(tt((2, 2), (2, 2), 4), 512).strategy == "dense"


@pytest.mark.parametrize(("batch", "strategy"), [(1, "groups"), (8, "groups"), (1024, "low_rank")])
def test_a_long_train_is_merged_more_the_larger_the_batch(batch, strategy):
    plan = plan_linear(LONG, batch)
    assert plan.strategy == strategy
    assert plan.seconds <= min(plan.using(s).seconds for s in ("low_rank", "dense", "sequential", (2, 6, 8)))
    assert len(plan.groups) >= len(plan_linear(LONG, 8 * batch).groups)


def test_vocabulary_is_cut_in_the_middle():
    for plan in (plan_projection(VOCABULARY, 150), plan_lookup(VOCABULARY, 4096)):
        assert (plan.strategy, plan.chosen.ends) == ("two_parts", (2, 4))


def test_rows_of_a_large_table_are_merged_more_the_more_there_are():
    table = ttm((60, 48, 50, 58), (2, 2, 2, 2), 32)
    assert plan_lookup(table, 16).strategy == "sequential"
    assert plan_lookup(table, 10_000).strategy == "two_parts"
    sizes = [len(plan_lookup(table, 4**k).groups) for k in range(10)]
    assert sizes == sorted(sizes, reverse=True)


def test_any_groups_of_a_table_can_be_priced():
    plan = plan_lookup(VOCABULARY, 8)
    forced = plan.using((1, 2, 4))
    assert (forced.strategy, forced.groups) == ("groups", (Group.of(0), Group.of(1), Group.of(2, 3)))
    assert plan.seconds <= forced.seconds


def test_small_table_is_looked_up_dense_and_counts_no_row_twice():
    small = ttm((2, 2), (2, 2), 4)
    assert plan_lookup(small, 4096).strategy == "dense"
    assert plan_lookup(small, 4096) is plan_lookup(small, 4)


@pytest.mark.parametrize("plan", [plan_linear(BERT, 0), plan_projection(VOCABULARY, 0), plan_lookup(VOCABULARY, 0)])
def test_empty_batch_has_a_plan(plan):
    assert plan.strategy in {"low_rank", "two_parts", "sequential", "dense"}
    assert plan.seconds >= 0


def test_rank_zero_costs_next_to_nothing():
    assert plan_linear(tt((4, 4), (4, 4), 0), 64).flops == 0


def test_prints_a_table_with_the_choice_marked():
    plan = plan_linear(BERT, 64)
    lines = str(plan).splitlines()
    assert lines[0] == "x (64 × 768) times TT 12·8·8 / 8·8·12 ranks 12-30-30-30-12"
    assert lines[1].split() == ["strategy", "cores", "MFLOP", "MB", "est.", "ms"]
    assert [line[2:12].strip() for line in lines[2:]] == ["low_rank", "dense", "sequential", "groups"]
    assert [line[0] for line in lines[2:]] == [" ", " ", " ", "→"]
    numbers = f"{plan.flops / 1e6:,.3f}", f"{plan.bytes / 1e6:,.3f}", f"{plan.seconds * 1e3:,.3f}"
    assert lines[5].split() == ["→", "groups", *plan.chosen.name.split(), *numbers]


def test_another_order_of_merging_prints_its_brackets():
    thin = TTSpec(768, 768, (12, 8, 8), (8, 8, 12), (1, 2, 30, 30, 30, 2, 1))
    plan = plan_linear(thin, 4096)
    assert plan.using("low_rank").chosen.name == "(1 2 3)(4 (5 6))"
    assert plan.using("dense").chosen.name == "(1 (2 3 (4 5) 6))"
    inner = Group.of(Group.of(1, 2), Group.of(3, 4), 5)
    assert plan.using((6,)).groups == plan.using("dense").groups == (Group.of(0, inner),)
    assert plan.using((3, 6)).groups == (Group.of(0, Group.of(1, 2)), Group.of(3, 4, 5))
    assert plan.using((3, 6)).chosen.name == "(1 (2 3))(4 5 6)"
    assert plan_linear(BERT, 8).using((3, 6)) == plan_linear(BERT, 8).using("low_rank")


def test_estimate_is_the_documented_sum():
    on = Machine(single=1e9, half=4e9, double=5e8, bytes=1e8, call=1e-3, half_bytes=6)
    assert product(on, 10, 20, 30, 4).seconds == pytest.approx(3 * (1e-3 + 12000 / 1e9 + 4 * 1100 / 1e8))
    assert product(on, 10, 20, 30, 8, passes=2).seconds == pytest.approx(2 * (1e-3 + 12000 / 5e8 + 8 * 1100 / 1e8))
    assert product(on, 10, 20, 30, 2, passes=1).seconds == pytest.approx(1e-3 + 12000 / 4e9 + 6 * 1100 / 1e8)
    assert product(on, 10, 20, 30, 4, times=7, passes=1) == work(on, 4, 7 * 12000, 7 * 4400, 1)
    assert work(on, 4, 10, 20, 3) + work(on, 4, 1, 2, 1) == Cost(11, 22, 4, pytest.approx(4e-3 + 11e-9 + 22e-8))


def test_the_type_of_device_chooses_the_constants():
    assert machine("cpu") is machine("meta") is CPU
    assert machine("cuda") is machine("xpu") is ACCELERATOR
    assert plan_linear(BERT, 64, device="cuda").seconds < plan_linear(BERT, 64).seconds


def test_using_an_unknown_option_names_the_known_ones():
    with pytest.raises(ValueError, match=r"such as low_rank \(3, 6\), dense \(6,\), .* got 'spiral'"):
        plan_linear(BERT, 8).using("spiral")
    with pytest.raises(ValueError, match=r"that x \(8 × 768\) times the transpose of TTM .* got \(7, 4\)"):
        plan_projection(VOCABULARY, 8).using((7, 4))
    with pytest.raises(ValueError, match=r"got \(1, 2, 4\)"):
        plan_projection(VOCABULARY, 8).using((1, 2, 4))


@pytest.mark.parametrize("ends", [(), (2,), (2, 5), (2, 2, 6), (4, 2, 6), (0, 6), (-1, 6), (6, 7)])
def test_ends_that_do_not_partition_the_cores_are_refused(ends):
    for plan in (plan_linear(BERT, 8), plan_lookup(ttm((2,) * 6, (2,) * 6, 3), 8)):
        with pytest.raises(ValueError, match="expected a strategy or the ends of groups"):
            plan.using(ends)


def test_groups_can_be_named_by_their_ends():
    assert plan_projection(VOCABULARY, 8).using((1, 4)).chosen.ends == (1, 4)
    forced = plan_linear(BERT, 8).using((2, 4, 6))
    groups = Group.of(0, 1), Group.of(2, 3), Group.of(4, 5)
    assert (forced.strategy, forced.groups, forced.chosen.ends) == ("groups", groups, (2, 4, 6))
    assert "→" not in str(forced)  # none of those that were weighed


def test_choice_follows_a_given_plan_and_makes_one_otherwise():
    parts, alone = (Group.of(0, 1), Group.of(2, 3)), tuple(map(Group.of, range(4)))
    assert choose(LookupProblem, VOCABULARY, 4096, 4) == ("two_parts", parts)
    forced = plan_lookup(VOCABULARY, 8).using("sequential")
    assert choose(LookupProblem, VOCABULARY, 4096, 4, plan=forced) == ("sequential", alone)
    assert choose(ProjectionProblem, VOCABULARY, 150, 4) == ("two_parts", parts)
    forced = plan_projection(VOCABULARY, 8).using("dense")
    assert choose(ProjectionProblem, VOCABULARY, 8, 4, plan=forced)[0] == "dense"
    factors = Group.of(0, 1, 2), Group.of(3, Group.of(4, 5))
    assert choose(LinearProblem, BERT, 1000, 4, "cpu", False, True) == ("low_rank", factors)
    forced = plan_linear(BERT, 8).using("dense")
    assert choose(LinearProblem, BERT, 1000, 4, "cpu", False, True, plan=forced) == ("dense", (Group.of(*factors),))


def test_factors_from_a_batched_merge_may_cost_more():
    plan = plan_linear(BERT, 8, grad_x=True, grad_cores=True)
    assert plan.strategy == "groups"
    assert choose(LinearProblem, BERT, 8, 4)[0] == "groups"
    assert choose(LinearProblem, BERT, 8, 4, merged=True) == ("low_rank", plan.using("low_rank").groups)
    wide = tt((16, 16, 16), (21, 21, 25), 64)
    assert choose(LinearProblem, wide, 8, 4, merged=True)[0] == "groups"
