"""The merge cache: when tensor trains are merged, when not, and that results stay."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import comera
from comera.fusion import MergeCache, accumulating, fuse_
from comera.fusion.merge_cache import caches
from comera.nn.tensor_train import TensorTrain
from comera.rank.prune import prune_
from comera.trainer.step import TrainStep


class Model(nn.Module):
    """Two layers of one spec, the first called twice, and one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 8)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(torch.tanh(self.first(x))))))
        if self.fails:
            raise RuntimeError("in the middle")
        return self.last(x)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    made = Model().double()
    comera.tensorize_(made, comera.TensorizeConfig(linear=comera.TT(order=4, rank=3), embedding=None))
    return made


@pytest.fixture
def x() -> Tensor:  # many rows, so that plans are halves
    return torch.randn(500, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many trains were merged at a time by caches, in order."""
    import comera.fusion.merge_cache as room

    seen: list[int] = []

    def counted(specs, *others):  # type: ignore[no-untyped-def]
        seen.append(len(specs))
        return merge(specs, *others)

    merge = room.merge
    monkeypatch.setattr(room, "merge", counted)
    return seen


def attach(model: nn.Module) -> int:
    """A merge cache; returns how many trains it merges together."""
    return MergeCache(model).batched


def detach(model: nn.Module) -> None:
    for cache in caches(model):
        cache.detach()


def results(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), [p.grad for p in model.parameters()]


def test_results_stay_and_a_kind_is_merged_once_in_a_forward(model: Model, x: Tensor, merges: list[int]) -> None:
    plain = copy.deepcopy(model)
    assert attach(model) == 2
    for _ in range(2):
        torch.testing.assert_close(results(model, x), results(plain, x), rtol=1e-11, atol=1e-11)
    assert merges == [2, 1, 2, 1]


def test_each_forward_sees_the_weights_as_they_are_then(model: Model, x: Tensor) -> None:
    attach(model)
    before = model(x)
    model.first.tt.cores[0].data.mul_(2)  # a write that no version counts
    after = model(x)
    detach(model)
    torch.testing.assert_close(after, model(x))
    assert not torch.allclose(before, after)


def test_parts_called_by_themselves_see_every_counted_change(model: Model, x: Tensor, merges: list[int]) -> None:
    attach(model)
    for _ in range(2):
        torch.testing.assert_close(model.first(x), x @ model.first.weight.t() + model.first.bias)
        model.second(x)
        with torch.no_grad():
            model.first.tt.cores[0].mul_(2)
    assert merges == [2, 2]
    model.first(x).sum().backward()
    model.first.tt.cores[0].data.mul_(2)  # a change that no version counts, after a backward, as of some optimizers
    torch.testing.assert_close(model.first(x), x @ model.first.weight.t() + model.first.bias)


def test_parts_called_by_themselves_see_a_step_that_counts_no_versions(model: Model, x: Tensor) -> None:
    fuse_(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model(x).square().mean().backward()
    before = model.first(x)  # such as for a log, with gradients
    optimizer.step()
    after = model.first(x)
    assert torch.allclose(after, x @ model.first.tt.dense() + model.first.bias)
    assert not torch.allclose(after, before)


def test_without_gradients_parts_keep_nothing(model: Model, x: Tensor, merges: list[int]) -> None:
    attach(model)
    with torch.no_grad():
        model(x)
        model.first.tt.cores[0].data.mul_(2)
        torch.testing.assert_close(model.first(x), x @ model.first.weight.t() + model.first.bias)
    assert merges == [2]  # a layer called by itself merges its own cores


def test_a_forward_that_fails_is_over(model: Model, x: Tensor, merges: list[int]) -> None:
    attach(model)
    with torch.no_grad():
        model.fails = True
        with pytest.raises(RuntimeError, match="in the middle"):
            model(x)
        model.fails = False
        model.first(x)
        assert merges == [2]
        model(x)
    assert merges == [2, 2]


def test_what_is_made_without_gradients_serves_no_graph(model: Model, x: Tensor) -> None:
    class Mixed(nn.Module):
        def __init__(self, inner: Model) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.inner.first(x)
            return self.inner(x)

    mixed = Mixed(model)
    attach(mixed)
    _, grads = results(mixed, x)
    detach(mixed)
    torch.testing.assert_close(grads, results(mixed, x)[1])


def test_losses_of_one_forward_may_go_back_one_by_one(model: Model, x: Tensor) -> None:
    class Two(nn.Module):
        def __init__(self, inner: Model) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner.first(x).square().sum(), self.inner.second(x).sum()

    two = Two(model)
    attach(two)
    for loss in two(x):
        loss.backward()
    found = [p.grad for p in two.parameters()]
    two.zero_grad()
    detach(two)
    sum(two(x)).backward()
    torch.testing.assert_close(found, [p.grad for p in two.parameters()])


def test_accumulated_gradients_stay(model: Model, x: Tensor) -> None:
    plain = copy.deepcopy(model)
    attach(model)
    for part in x.split(250):
        for each in (model, plain):
            each(part).square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_forwards_of_one_step_share_a_merge_whose_gradients_come_at_its_end(
    model: Model, x: Tensor, merges: list[int]
) -> None:
    plain = copy.deepcopy(model)
    attach(model)
    for _ in range(2):  # the second step sees the weights of then
        merges.clear()
        with accumulating(model):
            for part in x.split(200):
                model(part).square().sum().backward()
            assert merges == [2, 1]
            assert model.first.tt.cores[0].grad is None
        for part in x.split(200):
            plain(part).square().sum().backward()
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-9, atol=1e-12)
        for made in (model, plain):
            torch.optim.SGD(made.parameters(), lr=1e-3).step()
            made.zero_grad()
    model.fails = True
    with pytest.raises(RuntimeError, match="in the middle"), accumulating(model):
        model(x)
    model.fails = False
    merges.clear()
    model(x).sum().backward()
    assert merges == [2, 1]


def test_a_step_of_several_micro_batches_merges_once(model: Model, x: Tensor, merges: list[int]) -> None:
    attach(model)
    step = TrainStep(model, lambda model, batch: model(batch).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    step(x.split(100))
    assert merges == [2, 1]


def test_they_stay_together_when_their_ranks_part(model: Model, x: Tensor, merges: list[int]) -> None:
    attach(model)
    tt: TensorTrain = model.first.tt
    with torch.no_grad():
        tt.rank_params[1][0] = 0.0
    prune_(model)
    assert model.first.spec != model.second.spec
    plain = copy.deepcopy(model)
    detach(plain)
    torch.testing.assert_close(results(model, x), results(plain, x))
    assert merges == [2, 1]


def test_copies_and_pickles_are_together_among_themselves(model: Model, x: Tensor, merges: list[int]) -> None:
    attach(model)
    model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        merges.clear()
        with torch.no_grad():
            other.first.tt.cores[0].mul_(2)
        torch.testing.assert_close(other(x), comera.materialize_(copy.deepcopy(other))(x))
        assert merges[:1] == [2]
        assert len(caches(other)) == 1
        assert caches(other) != caches(model)


def test_it_is_a_part_of_fuse_and_is_taken_back(model: Model, x: Tensor, merges: list[int]) -> None:
    for _ in range(2):
        assert fuse_(model).merged == 2
    assert len(caches(model)) == 1
    model(x)
    fuse_(model, enabled=False)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._forward_hooks_always_called
    model(x)
    assert merges == [2, 1]


def test_few_rows_ask_for_no_halves(model: Model, merges: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comera.ops.planner.plan.MERGED_ADVANTAGE", 1.0)
    attach(model)
    model(torch.randn(1, 24, dtype=torch.float64))
    assert merges == []


def test_a_part_computes_with_the_parameters_that_it_is_given(model: Model, x: Tensor) -> None:
    attach(model)
    first = {name: p.detach().clone() for name, p in model.first.named_parameters()}
    for scale in (1, 2):
        given = {name: scale * p for name, p in first.items()}
        found = torch.func.functional_call(model.first, given, (x,))
        model.first.load_state_dict(given, assign=True)
        torch.testing.assert_close(found, x @ model.first.weight.t() + model.first.bias)
