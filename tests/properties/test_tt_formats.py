"""Every format over random shapes: against the formula entry by entry, and against each other."""

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from comera.tt.blocks import fold_blocks
from comera.tt.decompose import round_cores, singular_values, tt_svd
from comera.tt.dense import fold, frobenius_norm, materialize, merge
from comera.tt.init import init_cores
from comera.tt.spec import BTTSpec, TTMSpec, spec_from_dict

from ..helpers.oracle import padded_weight, unfoldings
from ..helpers.strategies import btt_specs, random_cores, specs, train_specs


def digits(index, modes):
    found = []
    for mode in reversed(modes):
        index, digit = divmod(index, mode)
        found.append(digit)
    return found[::-1]


def entry(spec, cores, row, col):
    """W[row, col] by docs/method.md §1: a product of one matrix per core; of a BTT, the components of its block."""
    if isinstance(spec, BTTSpec):
        (a, i), (c, j) = digits(row, spec.in_modes), digits(col, spec.out_modes)
        flat = [rank for ranks in spec.rows_of_ranks for rank in ranks]
        block = a * spec.blocks[1] + c
        own = slice(sum(flat[:block]), sum(flat[: block + 1]))
        return (cores[0][0, i, own] * cores[1][own, j, 0]).sum()
    if isinstance(spec, TTMSpec):
        pairs = zip(cores, digits(row, spec.row_modes), digits(col, spec.col_modes), strict=True)
        matrices = [core[:, i, j] for core, i, j in pairs]
    else:
        indices = digits(row, spec.in_modes) + digits(col, spec.out_modes)
        matrices = [core[:, i] for core, i in zip(cores, indices, strict=True)]
    product = torch.eye(1, dtype=torch.float64)
    for matrix in matrices:
        product = product @ matrix
    return product.sum()


def separate_ranks(spec):
    """Inner ranks, and those of each block of a BTT."""
    return [rank for row in spec.rows_of_ranks for rank in row] if isinstance(spec, BTTSpec) else spec.inner_ranks


@given(specs(), st.data())
def test_the_dense_weight_has_the_entries_of_the_formula(spec, data):
    cores = random_cores(spec)
    weight = materialize(spec, cores)
    assert weight.shape == spec.shape
    for _ in range(5):
        row, col = (data.draw(st.integers(0, size - 1)) for size in spec.shape)
        torch.testing.assert_close(weight[row, col], entry(spec, cores, row, col), rtol=1e-10, atol=1e-12)


@given(train_specs())
def test_fold_undoes_materialize_and_pads_with_zeros(spec):
    weight = torch.arange(1.0, prod(spec.shape) + 1).reshape(spec.shape)
    full = fold(spec, weight)
    assert full.shape == spec.sizes
    assert torch.equal(full.sum(), weight.sum())
    rows, cols = spec.padded_shape
    if isinstance(spec, TTMSpec):
        pairs = [n for pair in zip(spec.row_modes, spec.col_modes, strict=True) for n in pair]
        full = full.reshape(pairs).permute(*range(0, len(pairs), 2), *range(1, len(pairs), 2))
    assert torch.equal(full.reshape(rows, cols)[: spec.shape[0], : spec.shape[1]], weight)


@given(btt_specs())
def test_folded_blocks_are_those_of_the_weight_padded_with_zeros(spec):
    weight = torch.arange(1.0, prod(spec.shape) + 1).reshape(spec.shape)
    (a, c), (n, m) = spec.blocks, spec.sizes
    full = torch.zeros(spec.padded_shape)
    full[: spec.in_features, : spec.out_features] = weight
    cut = [full[i * n : i * n + n, j * m : j * m + m] for i in range(a) for j in range(c)]
    assert torch.equal(fold_blocks(spec, weight), torch.stack(cut))


@given(train_specs())
def test_the_norm_from_the_cores_is_that_of_the_padded_weight(spec):
    cores = random_cores(spec)
    assert float(frobenius_norm(cores)) == pytest.approx(float(merge(cores).norm()), rel=1e-10)


@given(specs(min_rank=1))
def test_initial_cores_meet_the_std_at_every_shape(spec):
    cores = init_cores(spec, 0.3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert [tuple(core.shape) for core in cores] == list(spec.core_shapes)
    assert float(padded_weight(spec, cores).square().mean().sqrt()) == pytest.approx(0.3, rel=1e-10)


@given(specs())
def test_specs_survive_their_description(spec):
    assert spec_from_dict(spec.to_dict()) == spec


@given(specs(min_rank=1), st.integers(0, 2**16))
def test_tt_svd_is_quasi_optimal(spec, seed):
    weight = torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = tt_svd(weight, spec)
    if isinstance(spec, BTTSpec):  # caps by block
        values = map(torch.linalg.svdvals, fold_blocks(spec, weight))
        tails = [torch.cat([s[r:] for s, r in zip(values, separate_ranks(spec), strict=True)]).norm()]
    else:
        matrices = zip(unfoldings(spec, weight), spec.inner_ranks, strict=True)
        tails = [torch.linalg.svdvals(matrix)[rank:].norm() for matrix, rank in matrices]
    # best >= each tail, so sqrt(Σ tails²) <= sqrt(order - 1) · best (Oseledets 2011, theorem 2.2)
    bound = float(sum(tail**2 for tail in tails)) ** 0.5 / float(weight.norm())
    assert found.error <= bound + 1e-12
    if spec.shape == spec.padded_shape:
        assert found.error >= max([float(tail) for tail in tails], default=0.0) / float(weight.norm()) - 1e-12


@given(specs(), st.floats(0.01, 0.99), st.integers(0, 2**16))
def test_tt_svd_keeps_an_allowed_error(spec, allowed, seed):
    weight = torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = tt_svd(weight, spec.with_ranks(10**9), rel_error=allowed)
    assert found.error <= allowed
    assert all(found.spec.inner_ranks)


@given(specs(), st.integers(0, 6), st.integers(0, 2**16))
def test_rounding_makes_the_error_that_it_returns(spec, cap, seed):
    cores = random_cores(spec, seed=seed)
    full = padded_weight(spec, cores)
    found = round_cores(spec, cores, ranks=cap)
    new_and_old = zip(separate_ranks(found.spec), separate_ranks(spec), strict=True)
    assert all(new <= min(old, cap) for new, old in new_and_old)
    distance = float((full - padded_weight(found.spec, found.cores)).norm())
    assert distance == pytest.approx(found.error * float(full.norm()), rel=1e-6, abs=1e-10 * float(full.norm()))


@given(specs(min_rank=1), st.floats(0.0, 0.9), st.integers(0, 2**16))
def test_rounding_keeps_an_allowed_error_and_never_needs_more_ranks(spec, allowed, seed):
    cores = random_cores(spec, seed=seed)
    full = padded_weight(spec, cores)
    assume(float(full.norm()) > 1e-6)
    found = round_cores(spec, cores, rel_error=allowed)
    assert float((full - padded_weight(found.spec, found.cores)).norm()) <= (allowed + 1e-10) * float(full.norm())
    assert found.spec.numel <= spec.numel


@given(btt_specs(min_rank=1), st.data())
def test_rounding_blocks_keeps_the_largest_of_all_singular_values(spec, data):
    cores = random_cores(spec, seed=data.draw(st.integers(0, 99)))
    count = data.draw(st.integers(0, spec.ranks[1]))
    full = padded_weight(spec, cores)
    blocks = fold_blocks(replace(spec, in_features=full.shape[0], out_features=full.shape[1]), full)
    values = torch.linalg.svdvals(blocks).flatten().sort(descending=True).values
    torch.testing.assert_close(singular_values(spec, cores)[0], values[: spec.ranks[1]], rtol=1e-9, atol=1e-9)
    found = round_cores(spec, cores, ranks=(1, count, 1))
    assert found.spec.ranks[1] == count
    assert found.error * float(full.norm()) == pytest.approx(float(values[count:].norm()), rel=1e-8, abs=1e-9)
    distance = float((full - padded_weight(found.spec, found.cores)).norm())
    assert distance == pytest.approx(float(values[count:].norm()), rel=1e-8, abs=1e-9)
