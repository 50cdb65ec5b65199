"""Copies that average a model's parameters while it trains, such as `torch.optim.swa_utils.AveragedModel`.

An average runs over parameters, position by position. So the tensor trains of a copy must have the ranks of the model's
and the same basis in each: what is cut out of one is cut out of the other, and an average starts again from the model's
values when a train is expressed in another basis (docs/method.md §3). A copy that is not passed along raises at the
first cut and goes wrong in silence before.
"""

from collections.abc import Sequence

from torch import nn

from comera.errors import RankError
from comera.nn.tensor_train import TensorTrain
from comera.rank.trains import adaptable_trains


def trains_of_copies(model: nn.Module, copies: Sequence[nn.Module]) -> dict[TensorTrain, list[TensorTrain]]:
    """For each tensor train of the model those that average it, in the order of the copies.

    Raises RankError for a copy with other tensor trains.
    """
    own = list(adaptable_trains(model).values())
    found: dict[TensorTrain, list[TensorTrain]] = {train: [] for train in own}
    for copy in copies:
        trains = list(adaptable_trains(copy).values())
        if [train.spec for train in trains] != [train.spec for train in own]:
            raise RankError(
                f"expected a copy with the {len(own)} tensor trains of the model and their ranks, got "
                f"{type(copy).__name__} with {len(trains)} or others: copy the model after tensorize_, and pass the "
                "copy to everything that changes ranks, RankController(model, copies=[...]), prune_ and round_"
            )
        for train, copied in zip(own, trains, strict=True):
            if copied is train:
                raise RankError(f"expected a copy of the model, got {type(copy).__name__} around the model itself")
            found[train].append(copied)
    return found
