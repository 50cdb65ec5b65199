import json

import pytest
import torch

from comera.errors import SpecError
from comera.tt import init_cores, materialize, tt_spec
from comera.tt.experts import check_stack, expert_matrix
from comera.tt.format import clip_ranks, rank_limits
from comera.tt.ngram import NGramSpec
from comera.tt.shapes import btt_spec
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
    [(1.5, "lists of integers"), (None, "lists of integers"), ([1, 2], "lists of integers"), ([[1]], "24 rows of 64")],
)
def test_foreign_ranks_of_blocks_are_refused(ranks, message):
    with pytest.raises(SpecError, match=message):
        spec_from_dict({**BLOCKS.to_dict(), "block_ranks": ranks})


# --- tables of n-grams ------------------------------------------------------------------------------------------------


CP = NGramSpec(11, 5, longest=4, heads=6)


TT = NGramSpec(11, 5, longest=4, heads=3, head_rank=2)


def stored_by_the_formula(spec, kept):
    """Σ_k rows c_k |heads of ∪_{n>k} g_n| + D Σ_n |g_n|, gate by gate."""
    heads = [{own[int(j)] // spec.head_rank for j in each} for own, each in zip(spec.gated, kept, strict=True)]
    total = spec.embedding_dim * sum(map(len, kept))
    for k in range(spec.longest):
        union = set().union(*heads[max(0, k - 1) :])
        total += spec.rows * len(union) * (spec.head_rank if k == 0 else spec.head_rank**2)
    return total


@pytest.mark.parametrize("spec", [CP, TT, NGramSpec(11, 5, 4, 6, inner=3), NGramSpec(11, 5, 2, 1)], ids=str)
def test_whole_tables(spec):
    assert spec.numel == stored_by_the_formula(spec, [range(spec.features)] * (spec.longest - 1))
    assert [tuple(core.shape) for core in init_cores(spec, 1.0)] == list(spec.core_shapes)
    assert spec.rank_numel == (spec.longest - 1) * spec.features
    assert spec_from_dict(spec.to_dict()) == spec
    assert spec.dense_numel == 0


@pytest.mark.parametrize("spec", [CP, TT], ids=str)
def test_what_stays_is_sized_by_the_formula_and_cut_again(spec):
    torch.manual_seed(0)
    for _ in range(20):
        kept = [(torch.rand(spec.features) < torch.rand(())).nonzero().flatten() for _ in range(3)]
        left, cuts, gates = spec.cut(kept)
        assert left.numel == stored_by_the_formula(spec, kept)
        cores = [torch.randn(shape) for shape in spec.core_shapes]
        assert [tuple(cut(core).shape) for cut, core in zip(cuts, cores, strict=True)] == list(left.core_shapes)
        assert [sorted(each.tolist()) for each in gates] == [each.tolist() for each in kept]
        again = [(torch.rand(count) < 0.7).nonzero().flatten() for count in left.inner_ranks]
        both = [each[more].sort().values for each, more in zip(gates, again, strict=True)]
        assert left.keeping(again).numel == spec.keeping(both).numel == stored_by_the_formula(spec, both)


def test_a_state_tells_the_columns():
    left = CP.keeping([torch.tensor([0, 4]), torch.tensor([1, 4, 5]), torch.tensor([2])])
    # by need: 2 to order 4, 1, 4 and 5 to order 3, 0 to order 2
    assert left.columns == ((2, 4), (1, 2, 3), (0,))
    assert left.head_counts == (5, 5, 4, 1)
    some = CP.with_shapes(left.core_shapes, left.inner_ranks)
    assert (some.core_shapes, some.inner_ranks) == (left.core_shapes, left.inner_ranks)
    assert some.with_layout(left.layout) == left
    for wrong in (left.layout[:-1], [5, *left.layout[1:]], [4, 2, *left.layout[2:]], [-1, *left.layout[1:]]):
        with pytest.raises(SpecError, match="columns"):
            some.with_layout(wrong)
    with pytest.raises(SpecError, match="columns of order 4"):
        CP.with_shapes([(11, 5)] * 4 + [(5, 6)], left.inner_ranks)


def test_an_order_that_loses_its_last_column_is_gone():
    left = CP.keeping([torch.arange(6), torch.tensor([1]), torch.tensor([], dtype=torch.long)])
    assert left.head_counts == (6, 6, 1, 0)
    assert left.core_shapes == ((11, 6), (11, 6), (11, 1), (11, 0), (5, 7))
    nothing = CP.keeping([torch.tensor([], dtype=torch.long)] * 3)
    assert nothing.numel == nothing.rank_numel == nothing.heads == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"longest": 1}, "longest to be an integer >= 2, got 1"),
        ({"num_embeddings": 0}, "num_embeddings"),
        ({"heads": -1}, "heads to be an integer >= 0"),
        ({"inner": 0}, "inner"),
        ({"columns": ((0,), (0,))}, "expected 3 lists"),
        ({"columns": ((0, 1, 2, 3, 4, 5), (0,), (1,))}, "order 4: expected heads sorted"),
        ({"columns": ((0, 1, 2, 3, 4), (0,), (0,))}, "all 6 heads, got some on 5"),
    ],
    ids=str,
)
def test_what_fits_nothing_is_refused(change, said):
    fields = {"num_embeddings": 11, "embedding_dim": 5, "longest": 4, "heads": 6} | change
    with pytest.raises(SpecError, match=said):
        NGramSpec(**fields)


# --- stacks of matrices in one weight ---------------------------------------------------------------------------------


F64 = torch.float64


SPECS = [
    tt_spec(5 * 14, 22, order=6, rank=7, kernel_size=(5,)),
    tt_spec(5 * 14, 22, order=3, rank=7, kernel_size=(5,)),
    tt_spec(5 * 14, 22, order=2, rank=7, kernel_size=(5,)),  # the expert and all inputs in one core
    TTSpec(5 * 14, 22, (4, 4 * 5), (23,), (1, 3, 6, 1)),  # padded inputs and outputs, in a core with the expert
    btt_spec(14, 22, rank=2, experts=5),
    btt_spec(14, 22, blocks=(3, 2), rank=4, experts=5),  # padded inputs
    btt_spec(14, 22, blocks=(2, 1), rank=3, experts=5).with_block_ranks([0, 3, 1, 2, 3, 1, 2, 3, 0, 1]),
    btt_spec(14, 23, rank=2, experts=5),  # a prime number of features
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_one_expert_is_that_of_the_whole(spec: TTSpec | BTTSpec) -> None:
    torch.manual_seed(0)
    outputs = spec.out_features // 5 if isinstance(spec, BTTSpec) else spec.out_features
    check_stack(spec, 5, 14, outputs)
    cores = [core.requires_grad_() for core in init_cores(spec, 0.5, dtype=F64)]
    stack = materialize(spec, cores).reshape(14, 5, outputs)
    for index in (0, 3, -1, torch.tensor(2), torch.tensor(-2)):
        found, exact = expert_matrix(spec, cores, 5, index), stack[:, index]
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
        weights = torch.randn_like(exact)
        grads = [torch.autograd.grad((each * weights).sum(), cores, retain_graph=True) for each in (found, exact)]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_each_expert_has_a_block_tensor_train_of_its_own() -> None:
    one, stack = btt_spec(768, 3072, rank=2), btt_spec(768, 3072, rank=2, experts=8)
    assert (stack.numel, stack.ranks[1]) == (8 * one.numel, 8 * one.ranks[1])
    assert str(stack) == "BTT 24·32 / 512·48 rank 2"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (tt_spec(5 * 14, 23, order=4), "expected 70 -> 22 for 5 experts 14 -> 22, got 70 -> 23"),
        (TTSpec(70, 22, (10, 7), (22,), (1, 2, 2, 1)), "last input mode that holds the 5 experts"),
        (btt_spec(14, 5 * 22, blocks=(2, 11)), "output blocks that make up the 22 features of each of 5 experts"),
        (btt_spec(14, 5 * 22, blocks=(2, 15)), "got 15 of 8: choose a number of blocks that divides 22"),
    ],
    ids=str,
)
def test_specs_that_hold_no_such_stack(spec: TTSpec | BTTSpec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_stack(spec, 5, 14, 22)
