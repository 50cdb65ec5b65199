"""SMMF against its formulas in plain algebra; its state is small, follows pruning and resumes to the bit."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import comera
from comera.errors import ConfigError
from comera.optim import SMMF
from comera.optim.smmf import matrix_shape, state_bytes
from comera.rank.optimizer_state import zero_state_
from comera.rank.prune import prune_

from ...helpers.next_token_net import network, train


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


FORM = comera.TT(order=4, rank=6)


def rank_one(moment: Tensor) -> Tensor:
    """What is kept of a matrix: its signs, and the product of its row and column sums."""
    size = moment.abs()
    return moment.sign() * size.sum(1, keepdim=True) * size.sum(0, keepdim=True) / size.sum()


@pytest.mark.parametrize(
    ("numel", "shape"),
    [(0, (0, 0)), (1, (1, 1)), (7, (1, 7)), (12, (3, 4)), (36, (6, 6)), (2880, (48, 60)), (65536, (256, 256))],
)
def test_a_parameter_is_the_matrix_nearest_to_a_square(numel: int, shape: tuple[int, int]) -> None:
    assert matrix_shape(numel) == shape


@pytest.mark.parametrize("shape", [(6, 10), (3, 4, 5), (7,), (1,), (12, 0), ()], ids=str)
def test_steps_follow_the_formulas(shape: tuple[int, ...]) -> None:
    start = drawn(*shape)
    p = nn.Parameter(start.clone())
    optimizer = SMMF([p], lr=0.1, beta=0.8, growth=0.9, decay=-0.8, eps=1e-6, weight_decay=0.3)
    expected = start.double().view(matrix_shape(start.numel()))
    first, second = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 6):
        grad = drawn(*shape, seed=step)
        grad.view(-1)[:1] *= -1 if step % 2 else 3  # signs change, and sizes
        p.grad = grad.clone()
        optimizer.step()
        beta, gamma = 0.8 * 0.9 ** (step - 1), 1 - step**-0.8
        if start.numel():
            whole = grad.double().view_as(expected)
            carried = (rank_one(first), rank_one(second)) if step > 1 else (first, second)
            first = beta * carried[0] + (1 - beta) * whole
            second = gamma * carried[1] + (1 - gamma) * whole**2
            expected = (1 - 0.1 * 0.3) * expected - 0.1 * first / (second.sqrt() + 1e-6)
        torch.testing.assert_close(p.detach(), expected.view(shape).float(), rtol=1e-5, atol=1e-6)


def test_parameters_of_one_size_are_moved_as_alone() -> None:
    together = [nn.Parameter(drawn(*shape)) for shape in ((6, 10), (4, 15), (60,), (7,))]
    alone = [nn.Parameter(p.detach().clone()) for p in together]
    optimizers = [SMMF(together, lr=0.1), *(SMMF([p], lr=0.1) for p in alone)]
    for step in range(3):
        for k, (one, other) in enumerate(zip(together, alone, strict=True)):
            missing = k == 1 and step == 1  # it is a step behind from then on
            one.grad = None if missing else drawn(*one.shape, seed=10 * step + k)
            other.grad = None if missing else one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def test_the_state_is_as_small_as_its_shapes_say() -> None:
    model = network(FORM)
    optimizer = SMMF(comera.param_groups(model, lr=1e-2))
    train(model, optimizer, 2)
    kept = [value.nbytes for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert sum(kept) == sum(state_bytes(p.numel()) for p in model.parameters())
    dense = nn.Linear(768, 768)
    assert sum(state_bytes(p.numel()) for p in dense.parameters()) < sum(8 * p.numel() for p in dense.parameters()) / 30


def test_state_is_cut_with_its_core_and_a_loaded_state_goes_on_to_the_bit() -> None:
    model = network(FORM)
    optimizer = SMMF(comera.param_groups(model, lr=2e-2))
    train(model, optimizer, 5)
    layer = model[1]
    moments: dict[int, list[Tensor]] = {}

    def note(k: int, moment: Tensor) -> Tensor:
        moments.setdefault(k, []).append(moment.clone())
        return moment

    with torch.no_grad():
        for gate in layer.tt.rank_params:
            gate[::3] = 0
    kept = [gate.ne(0) for gate in layer.tt.rank_params]
    for k, core in enumerate(layer.tt.cores):
        optimizer.edited_state(core, lambda moment, k=k: note(k, moment))
    prune_(model, [optimizer])
    for k, core in enumerate(layer.tt.cores):
        cut = [moment[kept[k - 1]] if k else moment for moment in moments[k]]
        cut = [moment[..., kept[k]] if k < len(kept) else moment for moment in cut]
        now: list[Tensor] = []
        optimizer.edited_state(core, lambda moment, now=now: now.append(moment.clone()) or moment)  # type: ignore[func-returns-value]
        for before, after in zip(cut, now, strict=True):
            matrix = before.reshape(matrix_shape(before.numel()))
            torch.testing.assert_close(after.reshape(matrix.shape), rank_one(matrix))
    state, weights = deepcopy(optimizer.state_dict()), deepcopy(model.state_dict())
    losses = train(model, optimizer, 4, first=5)
    other = network(FORM)
    other.load_state_dict(weights)
    resumed = SMMF(comera.param_groups(other, lr=1e-3))
    resumed.load_state_dict(state)
    assert train(other, resumed, 4, first=5) == losses


def test_a_state_keeps_its_dtypes_when_it_is_loaded_for_parameters_of_another() -> None:
    p = nn.Parameter(drawn(6, 10).bfloat16())
    optimizer = SMMF([p])
    optimizer.load_state_dict(SMMF([nn.Parameter(drawn(6, 10))]).state_dict())  # of an optimizer before its first step
    p.grad = drawn(6, 10).bfloat16()
    optimizer.step()
    resumed = SMMF([nn.Parameter(p.detach().clone())])
    resumed.load_state_dict(optimizer.state_dict())
    (before,), (after,) = optimizer.state.values(), resumed.state.values()
    assert {key: value.dtype for key, value in before.items()} == {key: value.dtype for key, value in after.items()}
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_gates_that_are_zeroed_lose_their_moments() -> None:
    d = nn.Parameter(torch.ones(6))
    optimizer = SMMF([d], lr=0.1)
    d.grad = drawn(6)
    optimizer.step()
    zero_state_(d, torch.tensor([1, 4]), [optimizer])
    moments: list[Tensor] = []
    optimizer.edited_state(d, lambda moment: moments.append(moment.clone()) or moment)  # type: ignore[func-returns-value]
    for moment in moments:
        assert moment[[1, 4]].abs().max() < moment[[0, 2, 3, 5]].abs().min()


def test_it_learns_about_as_well_as_adamw() -> None:
    results = []
    for optimizer in (SMMF, comera.optim.AdamW):
        model = network(FORM)
        results.append(train(model, optimizer(comera.param_groups(model, lr=1e-2)), 60)[-1])
    assert results[0] < 0.5 * train(network(FORM), SMMF(network(FORM).parameters()), 1)[0]
    assert results[0] < 2 * results[1] + 0.1


@pytest.mark.parametrize(
    ("field", "value"),
    [("lr", -1.0), ("beta", 1.0), ("growth", 0.0), ("decay", 0.0), ("eps", 0.0), ("weight_decay", -0.1)],
)
def test_values_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be .*, got {value}"):
        SMMF([nn.Parameter(torch.ones(2))], **{field: value})


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="expected dense gradients, got sparse ones for 1 parameters"):
        SMMF(table.parameters()).step()
