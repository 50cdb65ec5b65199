"""Pruning: slices behind pruned gates are cut out, so the model gets smaller and faster instead of being masked.

A pruned gate d_k[j] multiplies ``G_k[..., j]`` and ``G_{k+1}[j, ...]`` by exactly 0. Both slices go, together with
``d_k[j]``, their gradients and their optimizer state (docs/method.md §3; beyond [CoMERA], which only masks). Values are
copied, never multiplied, so the function is unchanged up to the rounding of shorter sums, and the next optimizer step
is the masked one restricted to what was kept. A tensor train without an unpruned gate at some inner rank is the zero
weight: all of its inner ranks become 0, its cores become empty, and the layer becomes its constant bias.
"""

from collections.abc import Sequence
from itertools import pairwise, starmap
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.distributed import shapes_changed
from comera.errors import RankError
from comera.nn.tensor_train import TensorTrain
from comera.rank.copies import Copies, trains_of_copies
from comera.rank.optimizer_state import Cut, cut_state
from comera.rank.report import RankReport, RankRow
from comera.rank.target import check_multiple
from comera.rank.trains import adaptable_trains
from comera.tt.format import spec_size
from comera.tt.ngram import NGramSpec
from comera.tt.spec import Spec


@torch.no_grad()
def prune_(
    model: nn.Module, optimizers: Sequence[Optimizer] = (), *, multiple: int = 1, copies: Copies = ()
) -> RankReport:
    """Cut the slices behind pruned gates out of a model's tensor trains and their optimizer state, in place.

    Parameters stay the same objects, so optimizers, ties and hooks keep theirs. Their shapes change and their version
    counters rise: whatever holds copies of shapes or storage (a captured CUDA graph) must be created anew, and a
    DistributedDataParallel wrapper by `comera.distributed.rewrap_` unless it is part of `model`.

    optimizers: all that hold parameters of the model. State tensors of a parameter's shape are cut with it; scalar
    state stays. multiple: keep ranks at multiples of it (8 or 16 suit tensor cores) by keeping the largest pruned gates
    too. copies: all that average the model's parameters (`torch.optim.swa_utils.AveragedModel`); the same slices are
    cut out of them. Raises RankError, with nothing changed, for NaN or infinite gates, optimizer state of a shape that
    cannot be cut (factored moments), copies of other ranks, or a multiple below 1.

    Example:
        >>> import torch, comera
        >>> from comera.rank import prune_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=8)))
        >>> optimizer = torch.optim.AdamW(comera.param_groups(model, lr=1e-3))
        >>> _ = model[0].tt.rank_params[1].data[2:].zero_()  # as training does it
        >>> x = torch.randn(3, 64)
        >>> before = model(x)
        >>> report = prune_(model, [optimizer])
        >>> [(row.before, row.after) for row in report.rows], report.before, report.after
        ([((8, 8, 8), (8, 2, 8))], 1176, 402)
        >>> torch.allclose(model(x), before, atol=1e-6)
        True
    """
    check_multiple(multiple)
    copied = trains_of_copies(model, copies)
    plans = [
        CutPlan(name, train, _unpruned(name, train, multiple), copied[train])
        for name, train in adaptable_trains(model).items()
        if train in copied
    ]
    cutting = Cutting(plans, optimizers)
    report = RankReport(
        "pruned",
        before=sum(spec_size(plan.train.spec) for plan in plans),
        after=sum(spec_size(plan.spec) for plan in plans),
        rows=tuple(RankRow(plan.name, plan.train.spec.inner_ranks, plan.spec.inner_ranks) for plan in plans),
    )
    cutting.apply()
    if cutting.changed:
        shapes_changed(model)
    return report


class CutPlan:
    """What a tensor train and its copies become where only the gates of some indices stay: the new spec, and how to cut
    each parameter. keep: for each vector of gates the indices, ascending."""

    def __init__(self, name: str, train: TensorTrain, keep: list[Tensor], copies: Sequence[TensorTrain]) -> None:
        self.name = name
        self.train, self.copies = train, copies
        self.spec: Spec
        self.cuts: dict[Tensor, Cut] = {}
        if isinstance(train.spec, NGramSpec):
            self.spec, cuts, keep = train.spec.cut(keep)
            for each in (train, *copies):
                self.cuts |= zip(each.cores, cuts, strict=True)
        else:
            if any(len(kept) == 0 for kept in keep):
                keep = [kept[:0] for kept in keep]
            self.spec = train.spec.keeping(keep)
            boundary = train.cores[0].new_zeros(1, dtype=torch.long)
            for each in (train, *copies):
                sides = pairwise(kept.to(each.cores[0].device) for kept in (boundary, *keep, boundary))
                self.cuts |= zip(each.cores, starmap(_core_cut, sides), strict=True)
        for each in (train, *copies):
            self.cuts |= {d: itemgetter(kept.to(d.device)) for d, kept in zip(each.rank_params, keep, strict=True)}


class Cutting:
    """Cuts, computed for all plans before anything changes, so that an error leaves model and optimizers as they were.

    changed: the plans under which anything goes.
    """

    def __init__(self, plans: Sequence[CutPlan], optimizers: Sequence[Optimizer]) -> None:
        self.changed = [plan for plan in plans if plan.spec != plan.train.spec]
        cuts = {parameter: cut for plan in self.changed for parameter, cut in plan.cuts.items()}
        names: dict[Tensor, str] = {
            p: f"{plan.name}.{key}" for plan in self.changed for key, p in plan.train.named_parameters()
        }
        self._values = {parameter: cut(parameter) for parameter, cut in cuts.items()}
        self._grads = {p: cut(p.grad) for p, cut in cuts.items() if p.grad is not None}
        self._states = cut_state(optimizers, cuts, names)

    def apply(self) -> None:
        """Change parameters, gradients and moments."""
        for plan in self.changed:
            for train in (plan.train, *plan.copies):
                cores, gates = ([self._values[p] for p in listed] for listed in (train.cores, train.rank_params))
                train.set_(plan.spec, cores, gates)
        for parameter, grad in self._grads.items():
            parameter.grad = grad
        for state, key, value in self._states:
            state[key] = value


def _unpruned(name: str, train: TensorTrain, multiple: int) -> list[Tensor]:
    """The gates of each vector that stay; raises RankError where that is unknown."""
    for k, d in enumerate(train.rank_params, start=1):
        if not d.isfinite().all():
            raise RankError(
                f"rank parameters {k} of {name!r} hold NaN or infinite values, so it is unknown which of them are "
                "pruned: go back to the last good checkpoint (nothing was pruned)"
            )
    return [_kept(d.detach(), mask, multiple) for d, mask in zip(train.rank_params, train.unpruned(), strict=True)]


def _kept(d: Tensor, unpruned: Tensor, multiple: int) -> Tensor:
    """Indices of the unpruned gates and of the largest others, up to a multiple; none if all are pruned."""
    count = min(len(d), -(-int(unpruned.sum()) // multiple) * multiple)
    return torch.where(unpruned, torch.inf, d).argsort(descending=True, stable=True)[:count].sort().values


def _core_cut(left: Tensor, right: Tensor) -> Cut:
    return lambda core_RNS: core_RNS.index_select(0, left).index_select(-1, right)
