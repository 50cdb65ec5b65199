"""N-gram specs: sizes by the formula, what is left when gates go, layouts, and columns that fit nothing."""

import pytest
import torch

from comera.errors import SpecError
from comera.tt import init_cores
from comera.tt.ngram import NGramSpec
from comera.tt.spec import spec_from_dict

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
