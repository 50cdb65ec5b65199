"""The kernel of tables touches no memory that its operands do not have: wrong lengths, numbers and ids raise."""

import pytest
import torch

from comera.kernels.cpp import compiler, lookup

from ...helpers.odd_operands import lookup_operands
from ...helpers.refused import CHANGE_IDS, CHANGES, assert_all_refused, longer

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_lookups_are_refused(change):
    drows, ids, lefts, rights, gates, *numbers = lookup_operands()
    made = [*lookup.pair_rows(ids, lefts, rights, gates, *numbers)[3:], None]
    wanted = [True, True, True, True, True, False, True, True, False]

    def backward(drows, ids, made, gates, lefts=lefts, rights=rights):
        return lookup.pair_rows_backward(drows, ids, lefts, rights, made, gates, *numbers, wanted)

    assert_all_refused(backward, [drows, ids, made, gates], change)
    assert_all_refused(lambda gates: lookup.pair_rows(ids, lefts, rights, gates, *numbers), [gates], change)

    def of_parts(first, second, left=lefts[2], right=rights[2]):
        return backward(drows, ids, made, gates, [*first, left], [*second, right])

    assert_all_refused(of_parts, [lefts[:2], rights[:2]], change)  # cores
    if change is not longer:  # L and R may have more rows
        assert_all_refused(lambda right: of_parts(lefts[:2], rights[:2], right=right), [rights[2]], change)
        if change is not CHANGES[3]:  # and L may be a core
            assert_all_refused(lambda left: of_parts(lefts[:2], rights[:2], left), [lefts[2]], change)


def test_wrong_numbers_of_lookups_are_refused():
    drows, *operands = lookup_operands()
    ids, lefts, rights, gates, limits, paddings, thresholds = operands
    for wrong in (
        [ids, lefts, rights, [None, None, gates[0]], limits, paddings, thresholds],  # gates without a core
        [ids, lefts, rights, gates, [13, *limits[1:]], paddings, thresholds],
        [ids, lefts, rights, gates, [-1, *limits[1:]], paddings, thresholds],
        [ids, lefts, rights, gates, limits, paddings, thresholds[1:]],
        [ids, lefts, rights, gates, limits, paddings[1:], thresholds],
        [ids[1:], lefts, rights, gates, limits, paddings, thresholds],
    ):
        with pytest.raises((RuntimeError, ValueError), match=r"expected|argument"):
            lookup.pair_rows(*wrong)
    made = [*lookup.pair_rows(*operands)[3:], None]
    for missing in ([None, *made[1:]], [*made[:2], rights[2]], made[1:]):
        with pytest.raises((RuntimeError, ValueError), match=r"expected|argument"):
            lookup.pair_rows_backward(drows, ids, lefts, rights, missing, *operands[3:], [True, True, False] * 3)
    for wanted in ([True] * 9, [True] * 8):  # there are no gates of the second and third
        with pytest.raises(RuntimeError, match="expected"):
            lookup.pair_rows_backward(drows, ids, lefts, rights, made, *operands[3:], wanted)


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_a_dense_table_are_refused(change):
    drows, ids, tables, rights, gates, *numbers = lookup_operands([(5, (7, 1), (3, 1), None)])

    def backward(drows, ids, tables=tables):
        return lookup.pair_rows_backward(drows, ids, tables, rights, [None], gates, *numbers, [True, False, False])

    assert_all_refused(backward, [drows, ids], change)
    if change is not longer:  # a table may have more rows
        assert_all_refused(lambda tables: backward(drows, ids, tables), [tables], change)


def test_wrong_numbers_of_a_dense_table_are_refused():
    drows, ids, tables, rights, gates, limits, paddings, thresholds = lookup_operands([(5, (7, 1), (3, 1), None)])
    for wrong in ([tables, [torch.randn(3)], limits], [[torch.randn(7, 3, 1)], gates, limits], [tables, gates, [8]]):
        given = ids, wrong[0], rights, wrong[1], wrong[2], paddings, thresholds
        with pytest.raises(RuntimeError, match="expected"):
            lookup.pair_rows(*given)
    for made, wanted in (([None], [True, True, False]), ([None], [True, False, True]), (drows, [True, False, False])):
        with pytest.raises(RuntimeError, match="expected"):
            lookup.pair_rows_backward(drows, ids, tables, rights, made, gates, limits, paddings, thresholds, wanted)
    for wrong in (-1, 7, 2**40):
        ids[0][2] = wrong
        with pytest.raises(ValueError, match="expected numbers that fit each other"):
            lookup.pair_rows(ids, tables, rights, gates, limits, paddings, thresholds)
