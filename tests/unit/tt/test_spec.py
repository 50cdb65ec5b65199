import json

import pytest
import torch

from comera.errors import SpecError
from comera.tt.format import clip_ranks, rank_limits
from comera.tt.spec import BTTSpec, TTMSpec, TTSpec, spec_from_dict

FFN = TTSpec(768, 3072, (12, 8, 8), (12, 16, 16), (1, 12, 30, 30, 30, 16, 1))
EMBEDDING = TTMSpec(30_522, 768, (16, 20, 10, 10), (4, 4, 8, 6), (1, 30, 30, 30, 1))
BLOCKS = BTTSpec(768, 3072, (24, 32), (64, 48), 2)
RAGGED = BTTSpec(5, 7, (2, 3), (3, 3), ((0, 2, 3), (1, 0, 0)))


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


def test_blocks_count_their_own_ranks():
    assert BLOCKS.ranks == (1, 24 * 64 * 2, 1)
    assert BLOCKS.numel == 24 * 64 * 2 * (32 + 48)
    assert (RAGGED.ranks, RAGGED.core_shapes) == ((1, 6, 1), ((1, 3, 6), (6, 3, 1)))
    assert RAGGED.padded_shape == (6, 9)
    assert (RAGGED.rank_limits, BLOCKS.rank_limits) == ((1, 6 * 3, 1), (1, 24 * 64 * 32, 1))


def test_equal_ranks_of_blocks_are_one_rank():
    assert BTTSpec(4, 4, (2, 2), (2, 2), [[1, 1], [1, 1]]) == BTTSpec(4, 4, (2, 2), (2, 2), 1)
    assert hash(BTTSpec(4, 4, [2, 2], [2, 2], [[1, 0], [1, 1]])) == hash(
        BTTSpec(4, 4, (2, 2), (2, 2), ((1, 0), (1, 1)))
    )


def test_blocks_take_other_ranks():
    assert BLOCKS.with_ranks(99).block_ranks == BLOCKS.block_limit == 32
    assert RAGGED.with_ranks(RAGGED.ranks) is RAGGED
    assert RAGGED.with_ranks((1, 8, 1)).rows_of_ranks == ((2, 2, 1), (1, 1, 1))
    assert RAGGED.with_block_ranks([3, 0, 1, 0, 0, 2]).block_ranks == ((3, 0, 1), (0, 0, 2))
    with pytest.raises(SpecError, match="is above 18"):
        RAGGED.with_ranks((1, 19, 1))
    with pytest.raises(SpecError, match="got -1"):
        RAGGED.with_ranks(-1)


def test_blocks_keep_the_components_of_these_indices():
    assert RAGGED.keeping([torch.tensor([5, 0, 3])]).rows_of_ranks == ((0, 1, 1), (1, 0, 0))
    assert RAGGED.keeping([torch.tensor([], dtype=torch.long)]) == RAGGED.with_ranks(0)
    with torch.device("meta"):
        assert RAGGED.keeping([torch.arange(6, device="cpu")]) == RAGGED


@pytest.mark.parametrize("spec", [FFN, EMBEDDING, BLOCKS, RAGGED])
def test_rank_zero_stores_nothing(spec):
    empty = spec.with_ranks(0)
    assert empty.numel == empty.rank_numel == 0
    assert empty.ratio == float("inf")


@pytest.mark.parametrize("spec", [FFN, EMBEDDING, BLOCKS, RAGGED])
def test_a_spec_survives_json(spec):
    assert spec_from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_a_spec_prints_modes_and_inner_ranks():
    assert str(FFN) == "TT 12·8·8 / 12·16·16 ranks 12-30-30-30-16"
    assert str(EMBEDDING) == "TTM 16·20·10·10 × 4·4·8·6 ranks 30-30-30"
    assert str(BLOCKS) == "BTT 24·32 / 64·48 rank 2"
    assert str(RAGGED) == "BTT 2·3 / 3·3 ranks 0 to 3, mean 1.00"


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((8, 8, (2, 3), (2, 4), 1), "hold 6 entries but 8 are needed"),
        ((8, 8, (8,), (2, 4), 1), r"in_modes \(a, b\) and out_modes \(c, d\), got \(8,\)"),
        ((8, 8, (2, 4), (2, 2, 2), 1), "in_modes"),
        ((8, 8, (2, 4), (2, 4), 5), r"rank of a \(4, 4\) block must be from 0 to 4, got 5"),
        ((8, 8, (2, 4), (2, 4), -1), "from 0 to 4, got -1"),
        ((8, 8, (2, 4), (2, 4), ((1, 2.0), (1, 1))), "from 0 to 4, got 2.0"),
        ((8, 8, (2, 4), (2, 4), ((1, 2),)), r"2 rows of 2, got rows of \[2\]"),
        ((8, 8, (2, 4), (2, 4), ((1, 2), (1,))), r"2 rows of 2, got rows of \[2, 1\]"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        BTTSpec(*fields)


def test_row_and_column_modes_pair_up():
    with pytest.raises(SpecError, match="pad the shorter one with ones"):
        TTMSpec(8, 4, (4, 2), (4,), (1, 4, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "cp"}, "format 'tt', 'ttm', 'btt' or 'ngram', got 'cp'"),
        ({"format": ["tt"]}, "format 'tt', 'ttm', 'btt' or 'ngram'"),
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


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (1.5, "lists of integers"),
        (None, "lists of integers"),
        ([1, 2], "lists of integers"),
        ([[1]], "24 rows of 64"),
    ],
)
def test_foreign_ranks_of_blocks_are_refused(ranks, message):
    with pytest.raises(SpecError, match=message):
        spec_from_dict({**BLOCKS.to_dict(), "block_ranks": ranks})
