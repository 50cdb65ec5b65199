"""Subspaces against plain algebra: what is projected, products by einsum, bases by full SVDs, moments carried."""

import pytest
import torch
from torch import Tensor

from comera.contrib.subspaces import Projection, carried, plan, project, refined, restore, restore_squares


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis(n: int, rank: int, seed: int) -> Tensor:
    return torch.linalg.qr(drawn(n, rank, seed=seed)).Q


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def low_rank(rows: int, columns: int, decay: float) -> Tensor:
    """A matrix with singular values 1, decay, decay², ..."""
    n = min(rows, columns)
    values = decay ** torch.arange(n, dtype=torch.float64)
    return basis(rows, n, 1) * values @ basis(columns, n, 2).mT


def held(x_NE: Tensor, basis_NR: Tensor) -> float:
    """The share of the squares of X that a subspace holds."""
    return float((basis_NR.mT @ x_NE).square().sum() / x_NE.square().sum())


@pytest.mark.parametrize(
    ("shape", "settings", "seen_as", "ranks"),
    [
        ((64, 256), {}, (64, 256), {0: 16}),
        ((256, 64), {}, (256, 64), {1: 16}),
        ((64, 64), {}, (64, 64), {1: 16}),
        ((64, 256), {"two_sided": True}, (64, 256), {0: 16, 1: 16}),  # no more than the other mode
        ((1, 60, 24), {}, (1, 60, 24), {1: 6, 2: 6}),
        ((64, 32, 3, 3), {}, (64, 32, 3, 3), {0: 16, 1: 8}),
        ((64, 32, 3, 3), {"as_matrix": True}, (64, 288), {0: 16}),
        ((18, 20, 17), {}, (18, 20, 17), {0: 5, 1: 5, 2: 5}),
        ((64, 1, 5), {}, (64, 1, 5), {0: 5}),  # depthwise
        ((8, 8, 3, 3), {}, (8, 8, 3, 3), {}),
        ((256, 8), {}, (256, 8), {}),  # the shorter side has nothing to gain
        ((256,), {}, (256,), {}),
        ((), {}, (), {}),
        ((0, 64), {}, (0, 64), {}),
        ((64, 256), {"rank": 8}, (64, 256), {0: 8}),
        ((64, 256), {"rank": 64}, (64, 256), {}),  # nothing projected away
        ((64, 64), {"rank": 60}, (64, 64), {}),  # the basis would take more than it saves
        ((64, 256), {"rank": 1.0}, (64, 256), {}),
    ],
)
def test_modes_are_projected_where_that_saves_state(
    shape: tuple[int, ...], settings: dict[str, float], seen_as: tuple[int, ...], ranks: dict[int, int]
) -> None:
    assert plan(shape, **{"rank": 0.25, **settings}) == Projection(seen_as, ranks)  # type: ignore[arg-type]


def test_a_core_and_its_bases_are_counted() -> None:
    assert Projection((64, 32, 3, 3), {0: 16, 1: 8}).elements == 2 * 16 * 8 * 9 + 64 * 16 + 32 * 8
    assert Projection((5, 7), {}).elements == 2 * 35


def test_cores_are_those_of_einsum() -> None:
    tensor, bases = drawn(6, 7, 5, 4), {0: basis(6, 2, 1), 2: basis(5, 3, 2), 3: basis(4, 2, 3)}
    core = project(tensor, bases)
    torch.testing.assert_close(core, torch.einsum("nmkl,na,kb,lc->ambc", tensor, *bases.values()))
    torch.testing.assert_close(restore(core, bases), torch.einsum("ambc,na,kb,lc->nmkl", core, *bases.values()))
    squares = (each.square() for each in bases.values())
    expected = torch.einsum("ambc,na,kb,lc->nmkl", core.square(), *squares)
    torch.testing.assert_close(restore_squares(core.square(), bases), expected)
    transposed = drawn(4, 5, 7, 6).permute(3, 2, 1, 0)
    assert torch.equal(project(transposed, bases), project(transposed.contiguous(), bases))


@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (12, 30)], ids=str)
def test_a_basis_holds_almost_as_much_as_that_of_a_full_svd(shape: tuple[int, int]) -> None:
    x_NE = low_rank(*shape, decay=0.8)
    best = held(x_NE, torch.linalg.svd(x_NE).U[:, :6])
    found = refined(x_NE, {}, {0: 6}, generator())[0]
    torch.testing.assert_close(found.mT @ found, torch.eye(6, dtype=torch.float64))
    assert found.is_contiguous()
    assert best - 1e-3 < held(x_NE, found) <= best + 1e-12
    warm = refined(x_NE, {0: found}, {0: 6}, generator())[0]
    assert best - 1e-6 < held(x_NE, warm) <= best + 1e-12


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize(("energy", "decay"), [(0.5, 0.9), (0.9, 0.8), (0.99, 0.5), (1.0, 0.9)])
def test_the_rank_is_the_smallest_that_holds_the_energy(energy: float, decay: float, start: bool) -> None:
    x_NE = low_rank(40, 90, decay)
    shares = (decay ** torch.arange(40, dtype=torch.float64)).square().cumsum(0)
    expected = min(12, 1 + int((shares < energy * shares[-1]).sum()))
    begun = {0: torch.linalg.svd(x_NE).U[:, :3].contiguous()} if start else {}
    found = refined(x_NE, begun, {0: 12}, generator(), energy)[0]
    assert found.shape == (40, expected)
    assert expected == 12 or held(x_NE, found) >= energy - 1e-3


def test_bases_of_a_tensor_are_those_of_higher_order_svd_and_iterations_improve_them() -> None:
    core, ranks = drawn(3, 4, 2), {0: 3, 1: 4, 2: 2}
    exact = restore(core, {k: basis(n, core.shape[k], k) for k, n in enumerate((30, 25, 20))})
    bases = refined(exact, {}, ranks, generator())
    torch.testing.assert_close(restore(project(exact, bases), bases), exact)
    noisy = exact + 0.05 * drawn(*exact.shape, seed=9)
    errors = []
    bases = {}
    for _ in range(4):
        bases = refined(noisy, bases, ranks, generator())
        errors.append(float((restore(project(noisy, bases), bases) - noisy).norm()))
    svds = {k: torch.linalg.svd(noisy.movedim(k, 0).flatten(1), full_matrices=False).U[:, :r] for k, r in ranks.items()}
    best = float((restore(project(noisy, svds), svds) - noisy).norm())  # of the plain higher-order SVD
    assert errors[0] < 1.02 * best
    assert errors[-1] < 1.0001 * best
    assert errors[-1] <= errors[0]


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_squares_out_of_range_do_not_matter(size: float) -> None:
    x_NE = low_rank(40, 90, 0.8).float()
    expected, found = (refined(each, {}, {0: 6}, generator())[0] for each in (x_NE, x_NE * size))
    torch.testing.assert_close(found @ found.mT, expected @ expected.mT, atol=1e-4, rtol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_gradients_that_say_nothing_still_give_orthonormal_bases(value: float) -> None:
    found = refined(torch.full((40, 90), value), {}, {0: 6}, generator())[0]
    torch.testing.assert_close(found.mT @ found, torch.eye(6))


def test_moments_follow_their_bases() -> None:
    old = {0: basis(20, 4, 1), 1: basis(30, 5, 2)}
    new = {0: basis(20, 6, 3), 1: basis(30, 3, 4)}
    first, second, unknown = drawn(4, 5, 2), drawn(4, 5, 2, seed=1).square(), drawn(6, 3, 2, seed=2).square()
    moved, squares = carried(first, second, old, new, unknown)
    torch.testing.assert_close(moved, project(restore(first, old), new))
    rotations = [new[k].mT @ old[k] for k in (0, 1)]
    weights = torch.einsum("ac,bd->abcd", *(rotation.square() for rotation in rotations))
    known = weights.sum((2, 3))
    expected = torch.einsum("abcd,cde->abe", weights, second) + (1 - known)[:, :, None] * unknown
    torch.testing.assert_close(squares, expected)
    assert squares.min() >= 0


def test_moments_in_a_larger_subspace_lose_nothing_and_new_directions_begin_with_their_gradient() -> None:
    wide = basis(20, 6, 1)
    old, new = {0: wide[:, :4].contiguous()}, {0: wide}
    first, second, unknown = drawn(4, 5), drawn(4, 5, seed=1).square(), drawn(6, 5, seed=2).square()
    moved, squares = carried(first, second, old, new, unknown)
    torch.testing.assert_close(moved, torch.cat([first, torch.zeros(2, 5, dtype=torch.float64)]))
    torch.testing.assert_close(squares, torch.cat([second, unknown[4:]]))
