"""Rounding to a budget: over all tensor trains at once, what costs the least error per parameter saved goes first.

Dropping a singular value σ at one inner rank makes a squared error of σ², and the errors of all inner ranks of a train
at most add up (Oseledets 2011). Errors of different weights are compared relative to each weight's own norm,
``w · σ²/‖W‖²``: the output of a layer scales with its weight, and what follows (a norm, a softmax) mostly removes the
scale again. The weight w per train can express how important it is to the loss; by default all trains count equally.
allocate.py then decides which ranks to keep. See docs/method.md §3.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.distributed import shapes_changed
from comera.errors import RankError
from comera.nn.tensor_train import TensorTrain
from comera.ops.dtypes import merge_dtype
from comera.rank.allocate import allocate
from comera.rank.copies import Copies, trains_of_copies
from comera.rank.ngrams import NGramGates
from comera.rank.optimizer_state import check_cuttable, reset_state_
from comera.rank.prune import CutPlan, Cutting
from comera.rank.report import RankReport, RankRow
from comera.rank.target import check_multiple, target_of
from comera.rank.trains import adaptable_trains, check_roundable
from comera.tt.blocks import component_mask, ranks_of_blocks
from comera.tt.decompose import Decomposition, round_cores, singular_values
from comera.tt.dense import absorb
from comera.tt.format import spec_size
from comera.tt.ngram import NGramSpec
from comera.tt.spec import BTTSpec, Spec


@torch.no_grad()
def round_(
    model: nn.Module,
    target: float | int | str,
    *,
    optimizers: Sequence[Optimizer] = (),
    weights: Mapping[str, float] | None = None,
    multiple: int = 1,
    copies: Copies = (),
) -> RankReport:
    """Round a model's tensor trains by SVD, in place, until together they fit a target size; it is always met.

    N-gram tables lose the gates that add least to their rows, and keep the moments of the others.

    Pruned gates count as zero. A rounded train has cores of equal norm and gates of one, as after TT-SVD. A train that
    keeps its ranks keeps its parameters and moments to the bit. Every inner rank stays at 1 (`multiple`) or above; a
    train that is the zero weight gets rank 0. Parameters stay the same objects; their version counters rise.

    Args:
        model: a model with compressed layers.
        target: what all tensor trains together may store: a fraction of their present size (0.2), a number of
            parameters (350000) or bytes ("1.5MB").
        optimizers: all that hold parameters of the tensor trains. A rounded train is expressed in another basis, in
            which its old moments mean nothing, so its state is reset, step counts included.
        weights: how much an error in a tensor train counts, by the train's name; 1 by default.
        multiple: keep ranks at multiples of it (8 or 16 suit tensor cores).
        copies: all that average the model's parameters, as for `RankController`. An average over two bases means
            nothing, so that of a rounded train starts again from the new values.

    Returns:
        Ranks and relative errors by tensor train; printable.

    Raises:
        RankError: a target above the present size or below the smallest possible, parameters that are not finite,
            weights below 0 or for an unknown train, layers with an activation between their factors, copies of other
            ranks, or a multiple below 1. Nothing has changed then.

    Example:
        >>> import torch, comera
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=16)))
        >>> optimizer = torch.optim.AdamW(comera.param_groups(model, lr=1e-3))
        >>> report = comera.round_(model, 0.5, optimizers=[optimizer])
        >>> report.after <= report.target == report.before // 2
        True
        >>> sum(p.numel() for name, p in model.named_parameters() if ".tt." in name) == report.after
        True
    """
    copied = trains_of_copies(model, copies)
    trains = {name: train for name, train in adaptable_trains(model).items() if train in copied}
    if not trains:
        raise RankError(
            f"expected a model with compressed layers, got {type(model).__name__} without any: call tensorize_ first"
        )
    check_multiple(multiple)
    check_roundable(trains.values())
    weights = weights or {}
    for name, weight in weights.items():
        if name not in trains or not 0 <= weight < float("inf"):
            raise RankError(
                f"weights: expected finite values >= 0 for tensor trains ({', '.join(trains)}), got {name!r}: {weight}"
            )
    before = sum(spec_size(train.spec) for train in trains.values())
    budget = target_of(trains.values(), target, size=before, multiple=multiple, where="target")
    # Compute everything before changing anything, so that an error leaves model and optimizers as they were.
    with _one_thread():
        rounded, kept = _round(trains, budget, weights, multiple) if before > budget else ({}, {})
    plans = {name: CutPlan(name, trains[name], own.kept, copied[trains[name]]) for name, own in kept.items()}
    cutting = Cutting(list(plans.values()), optimizers)
    rows = []
    for name, train in trains.items():
        ranks, done = train.spec.inner_ranks, rounded.get(name)
        if name in plans:
            rows.append(RankRow(name, ranks, plans[name].spec.inner_ranks, kept[name].error))
            continue
        rows.append(RankRow(name, ranks, done.spec.inner_ranks if done else ranks, done.error if done else 0.0))
        if done:
            for each in (train, *copied[train]):
                each.set_(done.spec, done.cores)
    cutting.apply()
    reset_state_([p for name in rounded for p in trains[name].parameters()], optimizers)
    after = sum(spec_size(train.spec) for train in trains.values())
    report = RankReport("rounded", before, after, tuple(rows), target=budget)
    if report.changed:
        shapes_changed(model)
    return report


@torch.no_grad()
def canonicalize_(
    trains: Iterable[TensorTrain],
    optimizers: Sequence[Optimizer] = (),
    copies: Mapping[TensorTrain, Sequence[TensorTrain]] = MappingProxyType({}),
) -> None:
    """Bring tensor trains into canonical form, where each inner rank runs over singular vectors; weights are unchanged.

    The slices of one inner rank then contribute orthogonally to each other, so that any of them can go without the
    rest. Unpruned gates are absorbed into the cores and become ones; as many as were pruned stay so, at zero, behind
    them. Ranks that exceed what their neighbors can use fall. The optimizers' state of the trains is reset, and the
    averages in their copies start again, as in `round_`. Raises RankError, with nothing changed, for parameters that
    are not finite and for an activation between factors.

    Example:
        >>> import torch
        >>> from comera.nn import TensorTrain
        >>> from comera.rank import canonicalize_
        >>> from comera.tt import tt_spec
        >>> train = TensorTrain(tt_spec(64, 64, order=4, rank=8), init_std=0.1)
        >>> _ = train.rank_params[1].data.uniform_(0.5, 1.5)  # as training does it
        >>> before = train.dense()
        >>> canonicalize_([train])
        >>> torch.allclose(train.dense(), before, atol=1e-5), train.rank_params[1].unique().tolist()
        (True, [1.0])
    """
    trains = [train for train in trains if not isinstance(train.spec, NGramSpec)]  # whose gates are as they are
    check_roundable(trains)
    check_cuttable(optimizers)
    with _one_thread():
        found = [(train, _rounded("a tensor train", train)) for train in trains]
    for train, canonical in found:
        gates = _leading(canonical.spec, train.spec.keeping([mask.nonzero().flatten() for mask in train.unpruned()]))
        for each in (train, *copies.get(train, ())):
            each.set_(canonical.spec, canonical.cores, gates)
    reset_state_([p for train in trains for p in train.parameters()], optimizers)


def _rounded(name: str, train: TensorTrain, ranks: Sequence[int] | None = None) -> Decomposition:
    """One train in the basis of its singular vectors, cut to `ranks`."""
    found = round_cores(train.spec, _effective_cores(name, train), ranks=ranks)
    # those of all trains are held at once: in float64 they would be twice the model
    return replace(found, cores=[core.to(merge_dtype(train.cores[0].dtype)) for core in found.cores])


def _leading(spec: Spec, unpruned: Spec) -> list[Tensor]:
    """Gates of a canonical train: ones for its first slices, as many as `unpruned` has, and zeros for the rest."""
    if isinstance(spec, BTTSpec) and isinstance(unpruned, BTTSpec):
        cpu = torch.device("cpu")
        own_BP, count_B = component_mask(spec, cpu), ranks_of_blocks(unpruned, cpu)
        ones_BP = own_BP.cumsum(1) <= count_B[:, None]
        return [ones_BP[own_BP].double()]
    return [
        (torch.arange(rank) < count).double()
        for rank, count in zip(spec.inner_ranks, unpruned.inner_ranks, strict=True)
    ]


class _Kept(NamedTuple):
    """The gates of each order of an n-gram table that stay, and the relative error of its rows without the others."""

    kept: list[Tensor]
    error: float


def _round(
    trains: Mapping[str, TensorTrain], budget: int, weights: Mapping[str, float], multiple: int
) -> tuple[dict[str, Decomposition], dict[str, _Kept]]:
    """The tensor trains that must change, rounded, and what stays of the n-gram tables among them."""
    tables = {name: train for name, train in trains.items() if isinstance(train.spec, NGramSpec)}
    linear = {name: train for name, train in trains.items() if name not in tables}
    importances = []
    for name, train in linear.items():
        values = singular_values(train.spec, _effective_cores(repr(name), train))
        norm = float(values[0].norm()) if values else 0.0
        weight = weights.get(name, 1.0)
        importances.append([((s / norm).square() * weight).flip(0).tolist() if norm else [] for s in values])
    shares = {name: _shares(repr(name), train) for name, train in tables.items()}
    gates = []
    for name, train in tables.items():
        assert isinstance(train.spec, NGramSpec)
        unpruned = [mask.nonzero().flatten() for mask in train.unpruned()]
        weight = weights.get(name, 1.0)
        worth = [(own[indices] * weight).tolist() for own, indices in zip(shares[name], unpruned, strict=True)]
        gates.append(NGramGates(train.spec, unpruned, worth))
    specs = [train.spec for train in linear.values()]
    ranks, kept = allocate(specs, importances, gates, budget, multiple=multiple, rounding=True)
    rounded = {
        name: _rounded(repr(name), train, (1, *inner, 1))
        for (name, train), inner in zip(linear.items(), ranks, strict=True)
        if inner != train.spec.inner_ranks
    }
    return rounded, {
        name: _Kept(own, max(0.0, 1 - sum(float(s[k].sum()) for s, k in zip(shares[name], own, strict=True))) ** 0.5)
        for name, own in zip(tables, kept, strict=True)
    }


def _shares(name: str, train: TensorTrain) -> list[Tensor]:
    """What each gate of an n-gram table adds to the squared norm of its rows, in all 1: the features, which the norm
    keeps at one, count as uncorrelated, so that it is the gate's square times that of its column of P."""
    _check_finite(name, train)
    p_DF = train.cores[-1].detach().cpu().double()
    columns = p_DF.square().sum(0).split(train.spec.inner_ranks)
    squares = [d.cpu().double().square() * own for d, own in zip(train.gates(), columns, strict=True)]
    total = sum(float(own.sum()) for own in squares)
    return [own / total if total else own for own in squares]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run small decompositions on one CPU thread: more threads gain nothing on them, and on busy cores they wait for
    one another (six BERT layers, rank 30, two busy cores: 0.4 s on one thread, 22 s on two)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _effective_cores(name: str, train: TensorTrain) -> list[Tensor]:
    """Cores with the gates absorbed, in float64 on the CPU, where small decompositions are fastest."""
    _check_finite(name, train)
    return absorb([core.cpu().double() for core in train.cores], [d.cpu().double() for d in train.gates()])


def _check_finite(name: str, train: TensorTrain) -> None:
    if not all(p.isfinite().all() for p in train.parameters()):
        raise RankError(
            f"{name} holds NaN or infinite values and cannot be rounded: go back to the last good checkpoint "
            "(nothing was rounded)"
        )
