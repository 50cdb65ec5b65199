"""AdaRankGrad and Tensor-GaLore against their formulas in plain algebra; when bases change; what their state does."""

from collections.abc import Iterator
from copy import deepcopy
from math import prod, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comera
from comera.contrib import AdaRankGrad, TensorGaLore
from comera.contrib.projected import ProjectedAdamW
from comera.contrib.subspaces import plan
from comera.errors import ConfigError
from comera.optim import AdamW
from comera.rank.prune import prune_

from ...helpers.next_token_net import network, train

BOTH = pytest.mark.parametrize("kind", [AdaRankGrad, TensorGaLore])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_rank(rank: int, rows: int, columns: int, seed: int) -> Tensor:
    """A gradient of this rank; its columns are in a subspace that does not depend on the seed."""
    return drawn(rows, rank) @ drawn(rank, columns, seed=seed + 1)


def bases_of(state: dict[str, Any]) -> dict[int, Tensor]:
    return {k: state[f"basis_{k}"] for k in range(5) if f"basis_{k}" in state}


def state_bytes(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
    return sum(value.nbytes for name, value in optimizer.state[parameter].items() if name != "step" and tensor(value))


def tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def kron(bases: dict[int, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The basis of the whole flattened tensor, (N, R)."""
    whole = torch.ones(1, 1, dtype=torch.float64)
    for k, n in enumerate(shape):
        whole = torch.kron(whole, bases.get(k, torch.eye(n, dtype=torch.float64)))
    return whole


@pytest.mark.parametrize(
    ("kind", "shape", "seen_as"),
    [
        (AdaRankGrad, (20, 32), (20, 32)),
        (AdaRankGrad, (32, 20), (32, 20)),
        (AdaRankGrad, (18, 4, 3, 2), (18, 24)),
        (TensorGaLore, (32, 20), (32, 20)),
        (TensorGaLore, (24, 4, 5), (24, 4, 5)),
        (TensorGaLore, (16, 20, 2, 1), (16, 20, 2, 1)),
        (TensorGaLore, (16, 16, 2, 1, 1), (16, 16, 2, 1, 1)),
    ],
    ids=str,
)
def test_steps_follow_the_formulas(
    kind: type[ProjectedAdamW], shape: tuple[int, ...], seen_as: tuple[int, ...]
) -> None:
    start = drawn(*shape).double()
    p = nn.Parameter(start.clone())
    often = {"check_every": 2, "refresh_every": 3, "energy": 0.8} if kind is AdaRankGrad else {"refresh_every": 3}
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3, "scale": 0.7, **often}
    optimizer = kind([p], **settings)  # type: ignore[call-arg]
    expected = start.reshape(-1)
    old, changes = None, 0
    first = second = torch.zeros(0)
    for step in range(1, 9):
        grad = drawn(*shape, seed=step).double()
        p.grad = grad.clone()
        optimizer.step()
        basis_NR = kron(bases_of(optimizer.state[p]), seen_as)
        core = basis_NR.mT @ grad.reshape(-1)
        if old is None:
            first = second = torch.zeros_like(core)
        elif not torch.equal(basis_NR, old):
            changes += 1
            turn = basis_NR.mT @ old
            unknown = (1 - 0.9 ** (step - 1)) * core**2
            first, second = turn @ first, turn**2 @ second + (1 - (turn**2).sum(1)) * unknown
        old = basis_NR
        first, second = 0.8 * first + 0.2 * core, 0.9 * second + 0.1 * core**2
        moved = basis_NR @ (first / (1 - 0.8**step) / ((second / (1 - 0.9**step)).sqrt() + 1e-6))
        scale = 0.7 * sqrt(len(expected) / plan(shape, 0.25, as_matrix=kind is AdaRankGrad).core)
        expected = (1 - 0.1 * 0.3) * expected - 0.1 * scale * moved
        torch.testing.assert_close(p.detach().reshape(-1), expected, rtol=1e-9, atol=1e-9)
        assert len(core) < len(expected)
    assert changes >= 2


@BOTH
def test_what_is_not_projected_is_moved_by_adamw_to_the_bit(kind: type[ProjectedAdamW]) -> None:
    for form, settings in ((None, {"rank": 1.0}), (comera.TT(order=2, rank=24), {})):
        losses = []
        for make in (kind, AdamW):
            model = network(form)
            own = settings if make is kind else {"fused": True}
            groups = comera.param_groups(model, lr=1e-2, weight_decay=0.1)
            losses.append(train(model, make(groups, **own), 4))  # type: ignore[arg-type]
        assert losses[0] == losses[1]


def test_ranks_follow_the_rank_of_the_gradients() -> None:
    p = nn.Parameter(drawn(64, 96))
    optimizer = AdaRankGrad([p], rank=24, energy=0.999, check_every=5, refresh_every=5)
    ranks, kept = [], []
    for step in range(30):
        p.grad = of_rank(40 if step < 10 else 6 if step < 20 else 12, 64, 96, seed=step)
        optimizer.step()
        ranks.append(optimizer.state[p]["first"].shape[0])
        kept.append(state_bytes(optimizer, p))
    assert (ranks[9], ranks[19], ranks[29]) == (24, 6, 12)
    assert kept[9] == optimizer.moment_bytes(p)
    assert kept[19] < 0.26 * kept[9]


def test_a_subspace_is_left_when_the_gradient_has_left_it_and_at_the_latest_after_its_time() -> None:
    p = nn.Parameter(drawn(64, 96))
    optimizer = AdaRankGrad([p], rank=8, check_every=5, refresh_every=23)
    refreshed = []
    for step in range(1, 60):
        elsewhere = of_rank(4, 64, 96, seed=step).flip(0) if step >= 40 else 0.0
        p.grad = of_rank(4, 64, 96, seed=step) * (step < 40) + elsewhere
        optimizer.step()
        refreshed.append(optimizer.state[p]["refreshed"])
    # the checks are at multiples of 5: the first after 23 steps is at 25; from 40 on the old subspace holds little
    assert set(refreshed[:24]) == {1}
    assert set(refreshed[24:44]) == {25}
    assert refreshed[-1] in (45, 50)
    held = (optimizer.state[p]["basis_0"].mT @ p.grad).square().sum() / p.grad.square().sum()
    assert held > 0.99


@pytest.mark.parametrize("count", [3, 7, 10, 23])
def test_parameters_take_turns(count: int) -> None:
    params = [nn.Parameter(drawn(16, 40, seed=k)) for k in range(count)]
    optimizer = TensorGaLore(params, refresh_every=10)
    turns: list[list[int]] = []
    for step in range(1, 31):
        for k, p in enumerate(params):
            p.grad = drawn(16, 40, seed=100 * step + k)
        optimizer.step()
        turns.append([k for k, p in enumerate(params) if optimizer.state[p]["refreshed"] == step])
    assert turns[0] == list(range(count))  # nothing moves without a basis
    assert max(map(len, turns[1:])) <= -(-count // 10)
    for first in (1, 11):
        later = turns[first : first + 10]
        assert sorted(k for turn in later for k in turn) == list(range(count))


def test_tucker_cores_of_convolutions_take_less_than_galore_at_equal_rank() -> None:
    for layer, x in ((nn.Conv1d(48, 64, 5), (2, 48, 9)), (nn.Conv2d(32, 64, 3), (2, 32, 5, 5)),
                     (nn.Conv3d(16, 32, 3), (2, 16, 4, 4, 4))):  # fmt: skip
        optimizer = TensorGaLore(layer.parameters(), rank=8)
        layer(drawn(*x)).square().mean().backward()
        optimizer.step()
        out, rest = layer.weight.shape[0], prod(layer.weight.shape[1:])
        galore = 4 * 8 * (2 * max(out, rest) + min(out, rest))  # two moments and a basis of the matrix (out, rest)
        assert state_bytes(optimizer, layer.weight) == optimizer.moment_bytes(layer.weight)
        assert state_bytes(optimizer, layer.weight) < 0.6 * galore
        assert state_bytes(optimizer, layer.bias) == optimizer.moment_bytes(layer.bias) == 8 * out


@BOTH
def test_it_learns_about_as_well_as_adamw_at_its_rate(kind: type[ProjectedAdamW]) -> None:
    results = []
    for make in (kind, AdamW):
        model = network(None)
        optimizer = make(comera.param_groups(model, lr=5e-3), **({"rank": 0.5} if make is kind else {}))  # type: ignore[arg-type]
        results.append(train(model, optimizer, 100))
        results[-1].append(sum(state_bytes(optimizer, p) for p in model.parameters()))
    (*ours, own), (*theirs, whole) = results
    assert ours[-1] < 0.02 * ours[0]
    assert ours[-1] < theirs[-1] + 0.05
    assert own < 0.7 * whole


def shifted(optimizer: ProjectedAdamW, parameter: Tensor) -> list[Tensor]:
    """What is edited of a parameter's state: both whole moments first."""
    seen: list[Tensor] = []

    def note(moment: Tensor) -> Tensor:
        seen.append(moment.clone())
        return moment

    optimizer.edited_state(parameter, note)
    return seen


@pytest.mark.parametrize(
    ("kind", "settings"), [(AdaRankGrad, {"check_every": 3}), (TensorGaLore, {"refresh_every": 4})]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loaded_state_goes_on_to_the_bit(
    kind: type[ProjectedAdamW], settings: dict[str, int], dtype: torch.dtype
) -> None:
    model = network(None).to(dtype)
    optimizer = kind(comera.param_groups(model, lr=2e-2), **settings)  # type: ignore[call-arg]
    train(model, optimizer, 5)
    state, weights = deepcopy(optimizer.state_dict()), deepcopy(model.state_dict())
    losses = train(model, optimizer, 8, first=5)
    other = network(None).to(dtype)
    other.load_state_dict(weights)
    resumed = kind(comera.param_groups(other, lr=1e-3), **settings)  # type: ignore[call-arg]
    resumed.load_state_dict(state)
    kept = [value for p in other.parameters() if "first" in resumed.state[p] for value in resumed.state[p].values()]
    assert {value.dtype for value in kept if tensor(value)} == {torch.float32}
    assert train(other, resumed, 8, first=5) == losses
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


@BOTH
def test_state_is_cut_with_its_core(kind: type[ProjectedAdamW]) -> None:
    form = comera.TT(order=2, rank=24)
    model = network(form)
    optimizer = kind(model.parameters(), lr=1e-2)  # without the names of groups, cores are projected too
    train(model, optimizer, 5)
    layer = model[1]
    (gate,) = layer.tt.rank_params
    with torch.no_grad():
        gate[::3] = 0
    kept = gate.ne(0)
    before = [shifted(optimizer, core)[:2] for core in layer.tt.cores]
    prune_(model, [optimizer])
    cuts = ([moment[..., kept] for moment in before[0]], [moment[kept] for moment in before[1]])
    projected = [(core, cut) for core, cut in zip(layer.tt.cores, cuts, strict=True) if cut]
    assert len(projected) == (2 if kind is TensorGaLore else 1)  # as a matrix, the first core (1, 60, 24) has one row
    for core, cut in projected:
        first, second = shifted(optimizer, core)[:2]
        assert first.shape == second.shape == core.shape
        torch.testing.assert_close(first, cut[0], rtol=1e-4, atol=1e-5 * float(cut[0].abs().max()))
        torch.testing.assert_close(second.sum(), cut[1].sum())
        assert second.min() >= 0
    state, weights = deepcopy(optimizer.state_dict()), deepcopy(model.state_dict())
    losses = train(model, optimizer, 4, first=5)
    other = network(form)
    other.load_state_dict(weights)
    resumed = kind(other.parameters())
    resumed.load_state_dict(state)
    assert train(other, resumed, 4, first=5) == losses


@BOTH
def test_cores_without_elements_and_gradients_that_are_missing_or_zero(kind: type[ProjectedAdamW]) -> None:
    empty, still, late = nn.Parameter(torch.empty(0, 32)), nn.Parameter(drawn(20, 32)), nn.Parameter(drawn(20, 32))
    alone = nn.Parameter(late.detach().clone())
    settings = {"lr": 0.1, "weight_decay": 0.1, "refresh_every": 1}
    optimizer = kind([empty, still, late], **settings)  # type: ignore[call-arg]
    other = kind([nn.Parameter(drawn(20, 32)), alone], **settings)  # type: ignore[call-arg]
    untouched = still.detach().clone()
    for step in range(4):
        empty.grad, still.grad = torch.empty(0, 32), torch.zeros(20, 32) if step else None
        late.grad = torch.zeros(20, 32) if step < 2 else drawn(20, 32, seed=step)
        optimizer.step()
    torch.testing.assert_close(still.detach(), untouched * 0.99**3)
    assert not optimizer.state.get(still)
    with torch.no_grad():
        alone.mul_(0.99).mul_(0.99)
    for step in (2, 3):
        alone.grad = drawn(20, 32, seed=step)
        other.step()
    assert torch.equal(late, alone)
    basis = bases_of(optimizer.state[late])
    late.grad.zero_()
    optimizer.step()
    assert all(torch.equal(optimizer.state[late][f"basis_{k}"], before) for k, before in basis.items())


@BOTH
def test_layouts_and_dtypes_of_gradients_do_not_matter(kind: type[ProjectedAdamW]) -> None:
    start, grads = drawn(24, 18, 3, 3), [drawn(24, 18, 3, 3, seed=k).bfloat16().float() for k in range(3)]
    plain, channels_last = nn.Parameter(start.clone()), nn.Parameter(start.to(memory_format=torch.channels_last))
    half = nn.Parameter(start.bfloat16())
    for p in (plain, channels_last, half):
        optimizer = kind([p], lr=1e-2)
        for grad in grads:
            p.grad = grad.to(memory_format=torch.channels_last).to(p.dtype) if p is not plain else grad
            optimizer.step()
    assert torch.equal(plain, channels_last)
    torch.testing.assert_close(half.float(), plain, rtol=2e-2, atol=2e-2)


def test_complex_parameters_are_left_to_adamw() -> None:
    start, grad = torch.complex(drawn(20, 32), drawn(20, 32, seed=1)), torch.complex(drawn(20, 32), drawn(20, 32))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    for p, make in ((ours, TensorGaLore), (theirs, torch.optim.AdamW)):
        p.grad = grad
        make([p], lr=0.1, weight_decay=0.0).step()
    assert torch.equal(ours, theirs)


@BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            ("lr", -1.0),
            ("rank", 0),
            ("rank", 0.0),
            ("rank", 1.5),
            ("rank", True),
            ("refresh_every", 0),
            ("scale", 0.0),
        ],
        *[("betas", (0.9, 1.0)), ("eps", 0.0), ("weight_decay", -0.1)],
    ],
)
def test_values_out_of_range_are_refused(kind: type[ProjectedAdamW], field: str, value: Any) -> None:
    for params in ([nn.Parameter(torch.ones(2))], [{"params": [nn.Parameter(torch.ones(2))], field: value}]):
        with pytest.raises(ConfigError, match=f"{field} must be .*, got "):
            kind(params, **({} if isinstance(params[0], dict) else {field: value}))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("field", "value"), [("energy", 0.0), ("energy", 1.1), ("converged", 1.0), ("check_every", 2.5)]
)
def test_values_out_of_range_of_adarankgrad_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be .*, got {value}"):
        AdaRankGrad([nn.Parameter(torch.ones(2))], **{field: value})  # type: ignore[arg-type]


def test_a_group_may_have_its_own_rank_and_others_may_come_later() -> None:
    params = [nn.Parameter(drawn(20, 32, seed=k)) for k in range(3)]
    optimizer = TensorGaLore([{"params": [params[0]], "rank": 3}, {"params": [params[1]]}])

    def step() -> Iterator[int]:
        for p in params:
            p.grad = drawn(20, 32)
        optimizer.step()
        yield from (optimizer.state[p]["first"].shape[0] for p in params if p in optimizer.state)

    assert list(step()) == [3, 5]
    optimizer.add_param_group({"params": [params[2]], "rank": 4})
    assert list(step()) == [3, 5, 4]


def test_their_former_address_leads_to_them() -> None:
    assert (comera.optim.AdaRankGrad, comera.optim.TensorGaLore) == (AdaRankGrad, TensorGaLore)
    with pytest.raises(AttributeError, match=r"'comera.optim' has no attribute 'Adafactor'"):
        _ = comera.optim.Adafactor


def test_sparse_gradients_and_sharded_parameters_are_refused() -> None:
    table = nn.Embedding(100, 32, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="expected dense gradients, got sparse ones for 1 parameters"):
        AdaRankGrad(table.parameters()).step()
    sharded = nn.Parameter(drawn(20, 32))
    sharded.full_tensor = sharded.detach  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"1 parameters are sharded, such as one of shape \(20, 32\)"):
        TensorGaLore([sharded]).step()
