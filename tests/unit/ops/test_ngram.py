"""Features of n-grams: an oracle position by position in float64, all gradients, documents, pruned gates, halves."""

import pytest
import torch

from comera.errors import DataError
from comera.ops.ngram import EPS, NGramIds, ngram_features
from comera.tt import init_cores
from comera.tt.ngram import NGramSpec

from ...helpers.oracle import signal_to_noise

SPECS = [
    NGramSpec(7, 5, longest=4, heads=6),
    NGramSpec(7, 5, longest=4, heads=6).keeping([torch.tensor([0, 4]), torch.tensor([1, 4, 5]), torch.tensor([2])]),
    NGramSpec(7, 5, longest=4, heads=6).keeping([torch.tensor([0, 4]), torch.tensor([1]), torch.tensor([]).long()]),
    NGramSpec(7, 5, longest=3, heads=3, head_rank=2),
    NGramSpec(7, 5, longest=3, heads=3, head_rank=2).keeping([torch.tensor([0, 3, 5]), torch.tensor([4])]),
    NGramSpec(7, 5, longest=4, heads=6, inner=3),
    NGramSpec(7, 5, longest=2, heads=1),
]


def operands(spec, seed=0):
    """Tables and gates in float64, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    tables = init_cores(spec, 1.0, generator=generator, dtype=torch.float64)[:-1]
    gates = [torch.rand(rank, generator=generator, dtype=torch.float64) + 0.5 for rank in spec.inner_ranks]
    return [t.requires_grad_() for t in tables], [g.requires_grad_() for g in gates]


def row(spec, table, k, t, u):
    """C_k[t] as columns of a CP (heads,), as matrices of a TT (heads, r, r), or its first row vectors (heads, 1, r)."""
    values = table[t] if u is None else u @ table[:-1] + table[-1]
    r = spec.head_rank
    return values if r == 1 else values.view(-1, 1 if k == 0 else r, r)


def oracle(spec, tables, gates, ids, reach, u=None):
    """The formulas on top of tt/ngram.py for one position; ids, u: of it and of what comes before, the latest last."""
    r = spec.head_rank
    e = row(spec, tables[0], 0, ids[-1], None if u is None else u[-1])
    features = []
    for n in range(2, spec.longest + 1):
        heads = spec.head_counts[n - 1]
        if n - 1 <= reach:
            c = row(spec, tables[n - 1], n - 1, ids[-n], None if u is None else u[-n])
        else:
            c = torch.ones(heads, dtype=e.dtype) if r == 1 else torch.eye(r, dtype=e.dtype).expand(heads, r, r)
        e = e[:heads] * c if r == 1 else e[:heads] @ c
        if heads:
            e = e / torch.sqrt(e.square().mean() + EPS)
        columns = torch.tensor(spec.gated[n - 2], dtype=torch.long)
        features.append(e.flatten()[columns])
    return torch.cat(features)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_against_the_formula_with_all_gradients(spec):
    tables, gates = operands(spec)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(7, (2, 5 + 3), generator=generator)
    reach = torch.tensor([[0, 1, 2, 3, 4], [7, 0, 1, 0, 9]])
    u = torch.randn(2, 8, 3, generator=generator, dtype=torch.float64, requires_grad=True) if spec.inner else None
    gates = [g.detach() for g in gates]
    found = ngram_features(NGramIds(ids, reach), spec, tables, gates, u)
    exact = torch.stack(
        [
            torch.stack(
                [
                    oracle(spec, tables, gates, ids[b, : 4 + i], int(reach[b, i]), None if u is None else u[b, : 4 + i])
                    for i in range(5)
                ]
            )
            for b in range(2)
        ]
    )
    assert found.shape == (2, 5, spec.rank_numel)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    leaves = [*tables, *([] if u is None else [u])]
    dy = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(found, leaves, dy, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(exact, leaves, dy, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gradients_by_differences(spec):
    tables, gates = operands(spec)
    ids = NGramIds.of(torch.randint(7, (2, 4)), spec.longest)
    u = torch.randn(2, ids.ids.shape[1], 3, dtype=torch.float64, requires_grad=True) if spec.inner else None

    leaves = [leaf for leaf in (*tables, u) if leaf is not None and leaf.numel()]
    assert torch.autograd.gradcheck(lambda *_: ngram_features(ids, spec, tables, gates, u), leaves)


@pytest.mark.parametrize("spec", SPECS[:5], ids=str)
def test_pruned_gates_are_as_if_cut_out(spec):
    tables, gates = operands(spec)
    generator = torch.Generator().manual_seed(2)
    ids = NGramIds.of(torch.randint(7, (3, 6), generator=generator), spec.longest)
    for share in (0.3, 0.7, 1.0):
        with torch.no_grad():
            pruned = [g * (torch.rand(len(g), generator=generator) >= share) for g in gates]
        left, cuts, kept = spec.cut([g.nonzero().flatten() for g in pruned])
        found = ngram_features(ids, spec, tables, pruned)
        cut = ngram_features(
            ids,
            left,
            [change(table) for change, table in zip(cuts, tables, strict=False)],
            [g[indices] for g, indices in zip(pruned, kept, strict=True)],
        )
        assert found.isfinite().all()
        starts = [sum(spec.inner_ranks[:n]) for n in range(len(gates))]
        where = torch.cat([start + indices for start, indices in zip(starts, kept, strict=True)])
        torch.testing.assert_close(found[..., where], cut, rtol=1e-12, atol=1e-12)


def test_a_table_in_half_precision_is_computed_in_float32():
    spec = SPECS[0]
    tables, gates = operands(spec)
    ids = NGramIds.of(torch.randint(7, (2, 9)), spec.longest)
    rounded = [t.bfloat16() for t in tables]
    half = ngram_features(ids, spec, rounded, [g.float() for g in gates])
    assert half.dtype == torch.bfloat16
    assert signal_to_noise(half, ngram_features(ids, spec, [t.double() for t in rounded], gates)) > 45
    exact = ngram_features(ids, spec, tables, gates)
    with torch.autocast("cpu", torch.bfloat16):
        same = ngram_features(ids, spec, [t.float() for t in tables], [g.float() for g in gates])
    torch.testing.assert_close(same.double(), exact, rtol=1e-4, atol=1e-5)


def test_empty_batches_and_ids_without_a_past():
    spec = SPECS[0]
    tables, gates = operands(spec)
    empty = ngram_features(NGramIds.of(torch.zeros(0, 3, dtype=torch.long), 4), spec, tables, gates)
    assert empty.shape == (0, 3, 18)
    with pytest.raises(DataError, match="expected 3 earlier ids for n-grams to 4, got 1"):
        ngram_features(NGramIds.of(torch.zeros(1, 3, dtype=torch.long), 2), spec, tables, gates)
    with pytest.raises(DataError, match=r"\(batch, positions\)"):
        ngram_features(NGramIds(torch.zeros(6).long(), torch.zeros(3).long()), spec, tables, gates)
