"""Groups of cores: their tree, how they print, the default order and the two parts of a table."""

from dataclasses import FrozenInstanceError

import pytest

from comera.ops.planner.groups import Group, default_group, default_groups, two_parts
from comera.tt.spec import TTMSpec, TTSpec

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
