"""Pruning against masking over random gates: the same function, the same next step, with whole layers pruned too."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.tensor_train import named_trains
from comera.optim.param_groups import param_groups
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage
from comera.rank.size import SizeTable, unpruned_ranks, unpruned_size
from comera.tt.spec import BTTSpec, TTMSpec, TTSpec

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw-foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "adamw-fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "adamw-amsgrad": lambda groups: torch.optim.AdamW(groups, amsgrad=True, foreach=False),
    "sgd-momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups),
}
IDS = torch.tensor([[0, 3, 10, 3], [7, 1, 1, 9]])
INNER_RANKS = [(3, 2), (3, 5, 2), (4,), (6,)]  # of the table, of the first, second and third linear layer
BLOCK_RANKS = ((2, 0), (1, 3))  # of the third


class Net(nn.Module):
    """A table that is used twice, as embedding and as head, around three linear layers and a norm."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        table, first, second, _ = ((1, *inner, 1) for inner in INNER_RANKS)
        self.embedding = TTMEmbedding(TTMSpec(11, 6, (3, 2, 2), (2, 3, 1), table))
        self.first = TTLinear(TTSpec(6, 10, (3, 2), (5, 2), first))
        self.second = TTLinear(TTSpec(10, 6, (10,), (6,), second), bias=False)
        self.third = BTTLinear(BTTSpec(6, 6, (2, 3), (2, 3), BLOCK_RANKS))
        self.norm = nn.LayerNorm(6)
        self.head = TTMProjection(self.embedding.tt)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(self.norm(x + self.third(self.second(torch.tanh(self.first(x))))))


def gate_values() -> st.SearchStrategy[list[list[float]]]:
    """Gates of every inner rank, well above the threshold, at it or below; now and then all of one rank are pruned."""
    entry = st.sampled_from([1.0, 0.4, 1.7, 0.01, 0.0, -0.3])
    vector = lambda rank: st.lists(entry, min_size=rank, max_size=rank) | st.just([0.0] * rank)  # noqa: E731
    return st.tuples(*(vector(rank) for inner in INNER_RANKS for rank in inner)).map(list)


@cache
def warmed(optimizer: str, dtype: torch.dtype) -> tuple[Net, Any, float]:
    """A net whose optimizer has seen two steps, and its Ŝ then."""
    torch.manual_seed(0)
    net = Net(dtype)
    optim = OPTIMIZERS[optimizer](param_groups(net, lr=1e-2, rank_lr=1e-3, weight_decay=0.1))
    for _ in range(2):
        backward(net)
        optim.step()
        optim.zero_grad()
    return net, optim, sum(SizeTable([train]).surrogate().item() for _, train in named_trains(net))


def trained(optimizer: str, dtype: torch.dtype, pattern: list[list[float]]) -> tuple[Net, Any, float]:
    """A warmed net of its own, with the rank parameters set to `pattern`."""
    net, optim, surrogate_0 = copy.deepcopy(warmed(optimizer, dtype))
    gates = [d for _, train in named_trains(net) for d in train.rank_params]
    with torch.no_grad():
        for d, values in zip(gates, pattern, strict=True):
            d.copy_(torch.tensor(values))
    return net, optim, surrogate_0


def backward(net: Net) -> Tensor:
    loss = nn.functional.cross_entropy(net(IDS).flatten(0, 1), (IDS.flatten() + 1) % 11)
    loss.backward()
    return loss


def kept(net: Net, multiple: int = 1) -> dict[str, list[Tensor]]:
    """Per tensor train the unpruned gates of each inner rank with the boundaries, and the largest others up to a
    multiple; none at all if every gate of some rank is pruned."""
    found = {}
    for name, train in named_trains(net):
        keep = []
        for d, mask in zip(train.rank_params, train.unpruned(), strict=True):
            others = sorted((~mask).nonzero().flatten().tolist(), key=lambda j, d=d: (-float(d[j].detach()), j))
            unpruned = mask.nonzero().flatten().tolist()
            keep.append(torch.tensor(sorted(unpruned + others[: -len(unpruned) % multiple]), dtype=torch.long))
        if any(k.numel() == 0 for k in keep):
            keep = [k[:0] for k in keep]
        found[name] = [torch.tensor([0]), *keep, torch.tensor([0])]
    return found


def restrict(name: str, tensor: Tensor, keep: dict[str, list[Tensor]]) -> Tensor:
    """The kept part of a tensor that has the shape of the parameter `name`."""
    for train, kept_gates in keep.items():
        if name.startswith(f"{train}.cores."):
            k = int(name.rsplit(".", 1)[1])
            return tensor[kept_gates[k]][..., kept_gates[k + 1]]
        if name.startswith(f"{train}.rank_params."):
            return tensor[kept_gates[int(name.rsplit(".", 1)[1]) + 1]]
    return tensor


def assert_same_step(masked: Net, masked_optim: Any, cut: Net, cut_optim: Any, keep: Any, tolerance: float) -> None:
    close = {"rtol": tolerance, "atol": tolerance}
    for (name, a), (_, b) in zip(masked.named_parameters(), cut.named_parameters(), strict=True):
        torch.testing.assert_close(b.detach(), restrict(name, a.detach(), keep), **close)
        before, after = masked_optim.state[a], cut_optim.state[b]
        assert before.keys() == after.keys()
        for key, value in before.items():
            expected = restrict(name, value, keep) if isinstance(value, Tensor) and value.ndim else value
            torch.testing.assert_close(after[key], expected, **close, msg=lambda m, n=name, k=key: f"{n} {k}: {m}")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=10, deadline=None)
@given(pattern=gate_values(), prune_first=st.booleans(), multiple=st.sampled_from([1, 1, 2, 4]))
def test_the_next_step_is_the_masked_one(
    optimizer: str, pattern: list[list[float]], prune_first: bool, multiple: int
) -> None:
    # Cut between backward and step, both step with the same gradients. Cut before, sums of other lengths round
    # otherwise, and AdamW takes the sign of the smallest gradients: float64 keeps that apart from a wrong step.
    dtype, tolerance = (torch.float64, 1e-10) if prune_first else (torch.float32, 1e-6)
    masked, masked_optim, surrogate_0 = trained(optimizer, dtype, pattern)
    cut, cut_optim = copy.deepcopy((masked, masked_optim))
    keep = kept(masked, multiple)
    controllers = []
    for net, optim in ((masked, masked_optim), (cut, cut_optim)):
        controller = RankController(net, early=EarlyStage(size_weight=0.5, ridge=0.01), multiple=multiple)
        controller.load_state_dict({**controller.state_dict(), "surrogate_0": surrogate_0})
        controllers.append(controller.attach(optim))

    backward(masked)
    if prune_first:
        controllers[1].prune_()
        loss = backward(cut)
    else:
        loss = backward(cut)
        controllers[1].prune_()
    norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.5) for net in (masked, cut)]
    torch.testing.assert_close(norms[1], norms[0])
    masked_optim.step()
    cut_optim.step()
    assert_same_step(masked, masked_optim, cut, cut_optim, keep, tolerance)

    cut_optim.zero_grad()
    assert backward(cut).isfinite()
    assert loss.isfinite()
    cut_optim.step()
    assert all(p.isfinite().all() for p in cut.parameters())


@settings(max_examples=30, deadline=None)
@given(pattern=gate_values(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_the_function_is_unchanged_and_the_model_holds_what_was_unpruned(
    pattern: list[list[float]], dtype: torch.dtype
) -> None:
    net, _, _ = trained("sgd-momentum", dtype, pattern)
    before, keep = net(IDS).detach(), kept(net)
    nonzero = {name: all(unpruned_ranks(train)) for name, train in named_trains(net)}
    sizes = {name: unpruned_size(train) for name, train in named_trains(net)}
    parameters = {name: restrict(name, p.detach(), keep).clone() for name, p in net.named_parameters()}
    report = RankController(net).prune_()

    torch.testing.assert_close(net(IDS), before, rtol=1e-5 if dtype is torch.float32 else 1e-12, atol=1e-6)
    for name, p in net.named_parameters():
        assert torch.equal(p.detach(), parameters[name]), name
    for name, train in named_trains(net):
        assert train.spec.numel == unpruned_size(train) == (sizes[name] if nonzero[name] else 0)
        assert all(mask.all() for mask in train.unpruned())
        if isinstance(train.spec, BTTSpec):
            assert train.block_ranks.tolist() == [list(row) for row in train.spec.rows_of_ranks]
    assert report.after == sum(p.numel() for _, train in named_trains(net) for p in train.parameters())
    assert report.changed == (report.after < report.before)
    assert not RankController(net).prune_().changed
