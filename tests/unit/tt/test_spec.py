import json

import pytest

from comera.errors import SpecError
from comera.tt.format import clip_ranks, rank_limits
from comera.tt.spec import TTMSpec, TTSpec, spec_from_dict

FFN = TTSpec(768, 3072, (12, 8, 8), (12, 16, 16), (1, 12, 30, 30, 30, 16, 1))
EMBEDDING = TTMSpec(30_522, 768, (16, 20, 10, 10), (4, 4, 8, 6), (1, 30, 30, 30, 1))


def test_parameters_are_counted_by_the_formula_of_the_paper():
    assert FFN.numel == 12 * 12 + 12 * 8 * 30 + 30 * 8 * 30 + 30 * 12 * 30 + 30 * 16 * 16 + 16 * 16
    assert FFN.rank_numel == 12 + 30 + 30 + 30 + 16
    assert FFN.dense_numel == 768 * 3072
    assert FFN.ratio == FFN.dense_numel / (FFN.numel + FFN.rank_numel)


def test_a_ttm_counts_its_column_modes():
    assert EMBEDDING.numel == 16 * 4 * 30 + 30 * 20 * 4 * 30 + 30 * 10 * 8 * 30 + 30 * 10 * 6
    assert EMBEDDING.core_shapes[1] == (30, 20, 4, 30)
    assert EMBEDDING.padded_shape == (32_000, 768)


def test_rank_limits_are_those_of_the_smaller_side():
    assert rank_limits((12, 8, 8, 2)) == (1, 12, 16, 2, 1)
    assert clip_ranks(10, (12, 8, 8, 2)) == (1, 10, 10, 2, 1)


def test_rank_zero_stores_nothing():
    empty = FFN.with_ranks(0)
    assert empty.numel == empty.rank_numel == 0
    assert empty.ratio == float("inf")


@pytest.mark.parametrize("spec", [FFN, EMBEDDING])
def test_a_spec_survives_json(spec):
    assert spec_from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_a_spec_prints_modes_and_inner_ranks():
    assert str(FFN) == "TT 12·8·8 / 12·16·16 ranks 12-30-30-30-16"
    assert str(EMBEDDING) == "TTM 16·20·10·10 × 4·4·8·6 ranks 30-30-30"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((8, 8, (2, 3), (8,), (1, 2, 2, 1)), "hold 6 entries but 8 are needed"),
        ((8, 8, (8,), (8, 0), (1, 2, 2, 1)), "out_modes must be positive integers"),
        ((8, 8, (), (8,), (1, 1)), "in_modes must be positive integers"),
        ((0, 8, (1,), (8,), (1, 1, 1)), "positive integer, got 0"),
        ((8, 8, (8,), (8,), (1, 9, 1)), r"rank 9 at ranks\[1\] is above 8"),
        ((8, 8, (8,), (8,), (1, -1, 1)), "ranks must be integers >= 0"),
        ((8, 8, (8,), (8,), (2, 8, 1)), "boundary ranks must be 1"),
        ((8, 8, (8,), (8,), (1, 1)), "order\\+1 = 3 entries"),
    ],
)
def test_parts_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        TTSpec(*fields)


def test_row_and_column_modes_pair_up():
    with pytest.raises(SpecError, match="pad the shorter one with ones"):
        TTMSpec(8, 4, (4, 2), (4,), (1, 4, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "cp"}, "format 'tt', 'ttm' or 'btt', got 'cp'"),
        ({"format": ["tt"]}, "format 'tt' or 'ttm'"),
        ({"rank": 3}, "needs the fields"),
        ({"ranks": 3}, "lists of integers"),
        ({"ranks": None}, "lists of integers"),
        ({"in_features": "768"}, "must be a positive integer, got '768'"),
        ({"in_modes": "12"}, "in_modes must be positive integers"),
        ({"ranks": [1, 12, 30.5, 30, 30, 16, 1]}, r"got 30.5 at ranks\[2\]"),
    ],
)
def test_foreign_descriptions_are_refused(change, message):
    with pytest.raises(SpecError, match=message):
        spec_from_dict({**FFN.to_dict(), **change})
