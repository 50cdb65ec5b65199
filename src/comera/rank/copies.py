"""Copies that average a model's parameters while it trains, such as `torch.optim.swa_utils.AveragedModel`.

An average runs over parameters, position by position. So the tensor trains of a copy must have the ranks of the model's
and the same basis in each: what is cut out of one is cut out of the other, and an average starts again from the model's
values when a train is expressed in another basis (docs/method.md §3). A copy that is not passed along raises in its own
code at the first cut, and goes wrong before: `warn_of_strays` says so when a late stage begins.
"""

import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from comera.errors import RankError
from comera.nn.tensor_train import TensorTrain, copies_of, named_trains
from comera.rank.trains import adaptable_trains
from comera.tt.spec import Spec

Copies = Sequence[object] | Callable[[], Sequence[object]]
"""Copies of a model, or a function that returns them, for those that are made later."""

# Objects that hold averages as tensors, in `shadow_params`, and the parameters while these averages stand for them.
_HOLDERS = ("diffusers.training_utils", "EMAModel"), ("torch_ema.ema", "ExponentialMovingAverage")
_STORED = "temp_stored_params", "collected_params"


def trains_of_copies(model: nn.Module, copies: Copies) -> dict[TensorTrain, list[TensorTrain]]:
    """For each tensor train of the model whose ranks may change those that average it, in the order of the copies.

    copies: modules, whole ones such as `AveragedModel`, or objects with the averages of `model.parameters()` in their
    list `shadow_params` (diffusers' `EMAModel`). Every `AveragedModel` within the model is one of them too.

    Raises RankError for a copy with other tensor trains.
    """
    given = list(copies() if callable(copies) else copies)
    given += [module for module in model.modules() if isinstance(module, AveragedModel) and module not in given]
    modules = set(model.modules()).intersection(copy for copy in given if isinstance(copy, nn.Module))
    inside = {train for copy in modules for _, train in named_trains(copy)}
    every = [train for _, train in named_trains(model) if train not in inside]
    found: dict[TensorTrain, list[TensorTrain]] = {
        train: [] for train in adaptable_trains(model).values() if train not in inside
    }
    for copy in given:
        copied = _averages(every, copy) if isinstance(copy, nn.Module) else _clones(model, list(found), copy)
        if not found.keys() <= copied.keys() or any(copied[train].spec != train.spec for train in found):
            raise RankError(
                f"expected a copy with the {len(every)} tensor trains of the model and their ranks, got "
                f"{type(copy).__name__} with {len(copied)} or others: copy the model after tensorize_, and pass the "
                "copy to everything that changes ranks, RankController(model, copies=[...]), prune_ and round_"
            )
        for train, averages in found.items():
            averages.append(copied[train])
    return found


def _averages(every: Sequence[TensorTrain], copy: nn.Module) -> dict[TensorTrain, TensorTrain]:
    """The tensor trains of a model and those of its copy, which may hold the model too; empty if they are others."""
    held = [train for _, train in named_trains(copy)]
    if held == every:
        raise RankError(f"expected a copy of the model, got {type(copy).__name__} around the model itself")
    trains = [train for train in held if train not in set(every)]
    return dict(zip(every, trains, strict=True)) if len(trains) == len(every) else {}


class _Clones(TensorTrain):
    """A tensor train whose parameters share the memory of tensors in another owner's list, which follow it."""

    def __init__(self, train: TensorTrain, clones: Sequence[Tensor]) -> None:
        super().__init__(train.spec, init_std=train.init_std, threshold=train.threshold, device="meta")
        self.clones = clones
        held = iter(nn.Parameter(clone, requires_grad=False) for clone in clones)
        for listed in (self.cores, self.rank_params):
            for k in range(len(listed)):
                listed[k] = next(held)

    def set_(self, spec: Spec, cores: Sequence[Tensor], rank_params: Sequence[Tensor] | None = None) -> None:
        super().set_(spec, cores, rank_params)
        for clone, parameter in zip(self.clones, [*self.cores, *self.rank_params], strict=True):
            clone.data = parameter.data


def _clones(model: nn.Module, trains: Sequence[TensorTrain], copy: object) -> dict[TensorTrain, TensorTrain]:
    """The tensor trains of a model and what stands for them in a list of averages; empty if that is of another one."""
    if not hasattr(copy, "shadow_params"):
        raise RankError(
            f"copies: expected modules, or objects with averages of the model's parameters in `shadow_params`, got a "
            f"{type(copy).__name__}: pass what holds the averages, such as the module in it"
        )
    if any(getattr(copy, name, None) is not None for name in _STORED):
        raise RankError(
            f"expected the model's own parameters, but this {type(copy).__name__} has put its averages in their place: "
            "call its restore() before ranks change"
        )
    pairs = _pairs(model, copy.shadow_params)
    tensors = {train: [*train.cores, *train.rank_params] for train in trains} if pairs else {}
    return {train: _Clones(train, [pairs[p] for p in own]) for train, own in tensors.items()}


def _pairs(model: nn.Module, shadows: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """A model's parameters, all or those that are trained, and what stands for each in a list; empty if none does."""
    every = list(model.parameters())
    for parameters in (every, [p for p in every if p.requires_grad]):
        if [p.shape for p in parameters] == [shadow.shape for shadow in shadows]:
            return dict(zip(parameters, shadows, strict=True))
    return {}


def warn_of_strays(model: nn.Module, copies: Mapping[TensorTrain, Sequence[TensorTrain]]) -> None:
    """Warn of what seems to average the model but does not follow it, before its tensor trains change their basis.

    That is a copy that was written to since it was made (a snapshot is not), and a list of tensors like its parameters.
    """
    followed = {copied for each in copies.values() for copied in each}
    made = {copied: written for train in copies for copied, written in copies_of(train).items()}
    strays = ["a copy made by copy.deepcopy"] * any(made[copied] for copied in made.keys() - followed)
    clones = {clone.data_ptr() for each in followed if isinstance(each, _Clones) for clone in each.clones}
    for holder in _holders():
        shadows: Sequence[Tensor] = holder.shadow_params
        if _pairs(model, shadows) and clones.isdisjoint(shadow.data_ptr() for shadow in shadows):
            strays.append(f"the averages of {type(holder).__name__}")
    if strays:
        warnings.warn(
            f"the late stage expresses the model's tensor trains in another basis, and {' and '.join(strays)} would "
            "not follow: an average over both bases means nothing. If it averages the model, give it as copies=[...] "
            "to RankController or RankCallback",
            stacklevel=4,
        )


def _holders() -> Iterator[Any]:
    """All objects alive that hold averages as tensors."""
    kinds = tuple(getattr(sys.modules[module], name) for module, name in _HOLDERS if module in sys.modules)
    if kinds:
        yield from (held for held in gc.get_objects() if type(held) in kinds)
