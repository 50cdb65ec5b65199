"""The exact search for groups, against every partition, every contraction tree, opt_einsum and torch's counting."""

import itertools
from dataclasses import FrozenInstanceError
from math import inf, prod

import opt_einsum
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from comera.ops.planner.cost import CPU, Machine
from comera.ops.planner.groups import Group, default_group, default_groups, two_parts
from comera.ops.planner.search import DEFAULT_ADVANTAGE, GroupSearch, merging
from comera.ops.sequential import contract_groups
from comera.tt.format import clip_ranks
from comera.tt.spec import TTMSpec, TTSpec

from ....helpers.specs import tt

# Seconds are operations: what the search minimises can be compared with counts of operations.
COUNTING = Machine(single=1.0, half=1.0, double=1.0, bytes=inf, call=0.0)


SPECS = [
    tt((5,), (7,), 3),
    tt((4, 3), (5,), 3),
    tt((3, 5), (7, 2), 4),
    tt((5,), (3, 2, 7, 3), 4),
    tt((12, 8, 8), (12, 16, 16), 30),
    TTSpec(768, 768, (12, 8, 8), (8, 8, 12), (1, 5, 14, 12, 11, 4, 1)),
    tt((3, 5, 7, 3), (2, 9, 5), 6),
    tt((4, 4, 4, 4), (4, 4, 4, 4), 12),
    tt((3, 2, 5, 2, 3), (7, 3, 2), 5),
    tt((2,) * 7, (64,), 8),
]
BATCHES = [1, 4, 64, 4096]


def forward_only(spec, batch):
    return GroupSearch(spec, batch, 4, COUNTING, grad_x=False, grad_cores=False)


def all_ends(order):
    return [
        (*(k + 1 for k, cut in enumerate(cuts) if cut), order)
        for cuts in itertools.product([False, True], repeat=order - 1)
    ]


def network(spec, batch):
    """Index sets of x and the cores, of the output, and the size of every index."""
    size = {"b": batch} | {f"n{k}": mode for k, mode in enumerate(spec.modes)}
    size |= {f"r{k}": rank for k, rank in enumerate(spec.ranks) if 0 < k < spec.order}
    x = frozenset({"b", *(f"n{k}" for k in range(spec.split))})
    cores = [frozenset({f"n{k}", f"r{k}", f"r{k + 1}"} & set(size)) for k in range(spec.order)]
    return [x, *cores], frozenset({"b", *(f"n{k}" for k in range(spec.split, spec.order))}), size


def fewest_flops(spec, batch):
    """Operations of the best of all contraction trees over x and the cores, by dynamic programming over subsets."""
    tensors, output, size = network(spec, batch)
    full = (1 << len(tensors)) - 1

    def indices(subset):
        return frozenset().union(*(t for i, t in enumerate(tensors) if subset >> i & 1))

    outer = [indices(subset) & (indices(full & ~subset) | output) for subset in range(full + 1)]
    best = [0] * (full + 1)
    for subset in range(1, full + 1):
        lowest, left, costs = subset & -subset, (subset - 1) & subset, []
        while left:
            if left & lowest:  # every pair once
                right = subset ^ left
                costs.append(best[left] + best[right] + 2 * prod(size[i] for i in outer[left] | outer[right]))
            left = (left - 1) & subset
        best[subset] = min(costs, default=0)
    return best[full]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_contraction_tree_at_all_needs_fewer_operations(spec, batch):
    search = forward_only(spec, batch)
    assert search.price(search.best())[1].flops <= 1.005 * fewest_flops(spec, batch)  # + DEFAULT_ADVANTAGE


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_opt_einsum_finds_no_cheaper_path(spec, batch):
    tensors, output, size = network(spec, batch)
    symbol = {index: opt_einsum.get_symbol(k) for k, index in enumerate(size)}
    terms = ["".join(symbol[i] for i in sorted(t)) for t in [*tensors, output]]
    shapes = [tuple(size[i] for i in sorted(t)) for t in tensors]
    equation = f"{','.join(terms[:-1])}->{terms[-1]}"
    exhaustive = "optimal" if spec.order < 8 else "dp"  # both exact; "optimal" takes minutes for nine operands
    _, path = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=exhaustive)
    search = forward_only(spec, batch)
    assert search.price(search.best())[1].flops <= 1.005 * float(path.opt_cost)


def test_over_uneven_ranks_no_tree_is_5_percent_better():
    generator = torch.Generator().manual_seed(0)

    def draw(low, high, count):
        return torch.randint(low, high + 1, (count,), generator=generator).tolist()

    for _ in range(150):
        (p,), (q,) = draw(1, 3, 1), draw(1, 3, 1)
        modes = draw(2, 9, p + q)
        limits = clip_ranks(10**6, modes)
        ranks = (1, *(min(r, limit) for r, limit in zip(draw(2, 20, p + q - 1), limits[1:-1], strict=True)), 1)
        spec = TTSpec(prod(modes[:p]), prod(modes[p:]), modes[:p], modes[p:], ranks)
        batch = BATCHES[draw(0, 3, 1)[0]]
        search = forward_only(spec, batch)
        assert search.price(search.best())[1].flops <= 1.05 * fewest_flops(spec, batch), (spec, batch)


@pytest.mark.parametrize("machine", [CPU, COUNTING], ids=["cpu", "counting"])
@pytest.mark.parametrize("gradients", [(True, True), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize("batch", [0, 1, 8, 100, 4096])
@pytest.mark.parametrize("spec", [*SPECS, tt((3, 4), (2, 5), 0), tt((3, 4), (2, 5), 1)], ids=str)
def test_the_best_is_the_cheapest_of_all_partitions(spec, batch, gradients, machine):
    search = GroupSearch(spec, batch, 4, machine, *gradients)
    seconds = {ends: search.price(ends)[1].seconds for ends in all_ends(spec.order)}
    assert seconds[search.best()] == pytest.approx(min(seconds.values()), rel=1e-12)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_groups_cover_the_train_from_left_to_right(spec):
    search = GroupSearch(spec, 64, 4, CPU)
    for ends in all_ends(spec.order)[:40]:
        groups, _ = search.price(ends)
        assert [core for group in groups for core in group.cores] == list(range(spec.order))
        assert tuple(group.end for group in groups) == ends


def all_trees(first, last):
    if last - first == 1:
        return [Group.of(first)]
    cuts = range(first + 1, last)
    return [Group.of(a, b) for c in cuts for a in all_trees(first, c) for b in all_trees(c, last)]


@pytest.mark.parametrize("spec", SPECS[:7], ids=str)
def test_merging_order_is_the_cheapest_or_the_default_within_5_percent(spec):
    search = GroupSearch(spec, 1, 4, COUNTING)
    for (a, b), (tree, cost) in search.merges.items():
        flops = {t: merging(spec, COUNTING, t).flops for t in all_trees(a, b)}
        assert cost.flops == flops[tree]
        if tree == default_group(spec, a, b):
            assert cost.flops <= DEFAULT_ADVANTAGE * min(flops.values())
        else:
            assert cost.flops == min(flops.values())
            assert flops[default_group(spec, a, b)] > DEFAULT_ADVANTAGE * cost.flops


def test_a_small_outer_rank_is_contracted_last():
    spec = TTSpec(768, 768, (12, 8, 8), (8, 8, 12), (1, 2, 30, 30, 30, 2, 1))
    groups, cost = GroupSearch(spec, 4096, 4, CPU).price((3, 6))
    assert groups == (Group.of(0, Group.of(1, 2)), Group.of(3, 4, 5))
    assert cost.flops < GroupSearch(spec, 4096, 4, CPU).price((3, 6), default_order=True)[1].flops


@pytest.mark.parametrize("grad_x", [True, False])
@pytest.mark.parametrize("grad_cores", [True, False])
@pytest.mark.parametrize(
    "spec", [tt((3, 5), (7, 2), 4), TTSpec(13, 12, (3, 5), (7, 2), (1, 3, 4, 2, 1)), tt((5,), (3, 2, 4), 4)], ids=str
)
def test_counts_are_those_of_torch_for_every_partition_and_wanted_gradients(spec, grad_x, grad_cores):
    cores = [torch.randn(shape, requires_grad=grad_cores) for shape in spec.core_shapes]
    x = torch.randn(6, spec.in_features, requires_grad=grad_x)
    for ends in all_ends(spec.order):
        groups, cost = GroupSearch(spec, 6, 4, CPU, grad_x, grad_cores).price(ends)
        with FlopCounterMode(display=False) as counter:
            y = contract_groups(x, spec, cores, groups)
            if y.requires_grad:
                y.sum().backward()
        assert counter.get_total_flops() == cost.flops


# --- groups of cores --------------------------------------------------------------------------------------------------


TRAIN = TTSpec(64, 64, (4, 4, 4), (4, 4, 4), (1, 2, 3, 4, 3, 2, 1))


TABLE = TTMSpec(64, 64, (4, 4, 4), (4, 4, 4), (1, 2, 3, 1))


def test_a_group_is_a_value():
    group = Group.of(2, Group.of(3, 4))
    assert (group.first, group.end, group.cores) == (2, 5, range(2, 5))
    assert group.pair == (Group.of(2), Group.of(3, 4))
    assert {group: 1}[Group.of(2, Group.of(3, 4))] == 1
    assert group != Group.of(2, 3, 4) == Group.of(Group.of(2, 3), 4)
    with pytest.raises(FrozenInstanceError):
        group.end = 7


@pytest.mark.parametrize(
    ("group", "printed"),
    [
        (Group.of(0), "(1)"),
        (Group.of(3, 4, 5), "(4 5 6)"),
        (Group.of(3, Group.of(4, 5)), "(4 (5 6))"),
        (Group.of(Group.of(0, Group.of(1, 2)), 3), "(1 (2 3) 4)"),
        (Group.of(Group.of(0, 1), Group.of(2, 3)), "(1 2 (3 4))"),
    ],
)
def test_inner_parentheses_show_what_does_not_merge_from_left_to_right(group, printed):
    assert str(group) == printed


def test_the_default_order_goes_inwards_from_the_ends():
    a, b = default_group(TRAIN, 0, 3), default_group(TRAIN, 3, 6)
    assert (str(a), str(b), str(default_group(TRAIN, 1, 5))) == ("(1 2 3)", "(4 (5 6))", "(2 3 4 5)")
    assert default_group(TRAIN, 0, 6) == Group.of(a, b)
    assert str(default_group(TRAIN, 2, 6)) == "(3 (4 (5 6)))"
    assert default_group(TRAIN, 5, 6) == Group.of(5)
    assert str(default_group(TABLE, 0, 3)) == "(1 2 3)"
    assert default_groups(TABLE, (1, 3)) == (Group.of(0), Group.of(1, 2))


@pytest.mark.parametrize(
    ("ends", "left"),
    [((1, 2), 1), ((1, 2, 3), 1), ((1, 2, 3, 4), 2), ((1, 5, 6), 1), ((4, 5, 6), 1), ((2, 5, 6, 7), 1)],
)
def test_two_parts_differ_least_in_their_cores(ends, left):
    groups = tuple(Group.of(*range(a, b)) for a, b in zip((0, *ends), ends, strict=False))
    assert two_parts(groups) == (groups[:left], groups[left:])
