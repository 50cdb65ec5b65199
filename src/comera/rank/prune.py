"""Physical shrinking: inactive slices are cut out, so the model gets smaller and faster, not only masked.

An inactive entry j of bond k multiplies by exactly 0 what ``G_k[..., j]`` and ``G_{k+1}[j, ...]`` hold, so both slices
go, with ``d_k[j]``, with their gradients and with the optimizer's moments for them (METHOD §2, beyond [CoMERA]).
Numbers are only copied, never multiplied: the function is unchanged to the rounding of shorter sums, and the next
optimizer step is the masked one restricted to what was kept. A chain with a bond that has no active entry stands for
zero: all its bonds go to rank 0, its cores get empty, and the layer is the constant bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.errors import RankError
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.rank.target import check_multiple, spec_size

Cut = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PruneRow:
    """One chain: its name, and its inner bonds' ranks before and after."""

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class PruneReport:
    """What pruning cut.

    before, after: numbers stored in all chains, cores and rank parameters; rows: one per chain, changed or not.
    """

    before: int
    after: int
    rows: tuple[PruneRow, ...]

    @property
    def changed(self) -> bool:
        """Whether any rank got smaller."""
        return any(row.before != row.after for row in self.rows)

    def __str__(self) -> str:
        rows = [(row.name, _ranks(row.before), _ranks(row.after)) for row in self.rows if row.before != row.after]
        if not rows:
            return (
                f"pruned nothing: all rank parameters of {len(self.rows)} chains are active ({self.before:,} numbers)"
            )
        name, before = (max(len(row[i]) for row in rows) for i in (0, 1))
        lines = [f"{row[0]:<{name}}  {row[1]:<{before}} -> {row[2]}" for row in rows]
        numbers = f"{self.before:,} -> {self.after:,} numbers ({self.after / self.before:.1%} left)"
        return "\n".join([*lines, f"{len(rows)} of {len(self.rows)} chains pruned: {numbers}"])


@torch.no_grad()
def prune_(model: nn.Module, optimizers: Sequence[Optimizer] = (), *, multiple: int = 1) -> PruneReport:
    """Cut the inactive slices out of a model's chains, in place, and out of the optimizers' state for them.

    The Parameter objects stay, so optimizers, ties and hooks keep theirs. Their shapes change: whatever holds copies
    of shapes or storage (a DistributedDataParallel wrapper, a captured CUDA graph) has to be made anew.
    optimizers: every one that holds parameters of the model; each state tensor of a parameter's shape is cut with it,
    scalar state stays.
    multiple: keep ranks at multiples of it (8 or 16 suit tensor cores), by keeping the largest inactive entries too.
    Raises RankError, with nothing changed, for rank parameters that are NaN or infinite, for state of a shape that
    cannot be cut (factored moments) and for a multiple below 1.
    """
    check_multiple(multiple)
    chains = [_Chain(name, train, multiple) for name, train in named_trains(model)]
    changed = [chain for chain in chains if chain.spec != chain.train.spec]
    cuts = {parameter: cut for chain in changed for parameter, cut in chain.cuts.items()}
    # Everything is computed before anything is changed, so that an error leaves model and optimizers as they were.
    values = {parameter: cut(parameter) for parameter, cut in cuts.items()}
    grads = {parameter: cut(parameter.grad) for parameter, cut in cuts.items() if parameter.grad is not None}
    states = [update for optimizer in optimizers for update in _cut_states(unwrap(optimizer), cuts, changed)]

    rows = tuple(PruneRow(chain.name, chain.train.spec.inner_ranks, chain.spec.inner_ranks) for chain in chains)
    before, after = (sum(map(spec_size, specs)) for specs in ([c.train.spec for c in chains], [c.spec for c in chains]))
    report = PruneReport(before, after, rows)
    for chain in changed:
        train = chain.train
        train.set_(chain.spec, [values[core] for core in train.cores], [values[d] for d in train.rank_params])
    for parameter, grad in grads.items():
        parameter.grad = grad
    for state, key, value in states:
        state[key] = value
    return report


def unwrap(optimizer: Optimizer) -> Optimizer:
    """The optimizer that really steps, inside wrappers such as Accelerate's, which keep it as `.optimizer`."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrap(inner) if isinstance(inner, Optimizer) else optimizer


class _Chain:
    """What pruning one chain comes to: its new spec, and the cut for each of its parameters."""

    def __init__(self, name: str, train: TensorTrain, multiple: int) -> None:
        for k, d in enumerate(train.rank_params, start=1):
            if not d.isfinite().all():
                raise RankError(
                    f"the rank parameters of {name!r}, bond {k}, hold NaN or infinite values, so which are active is "
                    "unknown: go back to the last good checkpoint (nothing was pruned)"
                )
        keep = [_kept(d.detach(), mask, multiple) for d, mask in zip(train.rank_params, train.unpruned(), strict=True)]
        if any(len(kept) == 0 for kept in keep):
            keep = [kept[:0] for kept in keep]
        self.name = name
        self.train = train
        self.spec = train.spec.with_ranks((1, *(len(kept) for kept in keep), 1))
        boundary = train.cores[0].new_zeros(1, dtype=torch.long)
        sides = pairwise([boundary, *keep, boundary])
        self.cuts: dict[Tensor, Cut] = {
            core: _core_cut(left, right) for core, (left, right) in zip(train.cores, sides, strict=True)
        }
        self.cuts.update({d: _bond_cut(kept) for d, kept in zip(train.rank_params, keep, strict=True)})


def _kept(d: Tensor, active: Tensor, multiple: int) -> Tensor:
    """Indices of the active entries and, up to a multiple, of the largest others; none if none is active."""
    count = int(active.sum())
    count = min(len(d), -(-count // multiple) * multiple)
    return torch.where(active, torch.inf, d).argsort(descending=True, stable=True)[:count].sort().values


def _core_cut(left: Tensor, right: Tensor) -> Cut:
    return lambda core_RNS: core_RNS.index_select(0, left).index_select(-1, right)


def _bond_cut(kept: Tensor) -> Cut:
    return lambda d: d.index_select(0, kept)


def _cut_states(
    optimizer: Optimizer, cuts: dict[Tensor, Cut], chains: Sequence[_Chain]
) -> list[tuple[dict[str, Any], str, Tensor]]:
    """The state entries to replace, as (state, key, value), for the parameters in `cuts`."""
    updates = []
    for parameter, cut in cuts.items():
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                continue
            if value.shape != parameter.shape:
                raise RankError(
                    f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for "
                    f"{_name(parameter, chains)} of shape {tuple(parameter.shape)}, which cannot be cut with it: "
                    "prune with an optimizer whose state has its parameters' shapes (AdamW, SGD, Adagrad), or without "
                    "passing this one and then make it anew (nothing was pruned)"
                )
            updates.append((state, key, cut(value)))
    return updates


def _name(parameter: Tensor, chains: Sequence[_Chain]) -> str:
    names = (f"{c.name}.{name}" for c in chains for name, p in c.train.named_parameters() if p is parameter)
    return repr(next(names))


def _ranks(ranks: tuple[int, ...]) -> str:
    return "-".join(map(str, ranks))
