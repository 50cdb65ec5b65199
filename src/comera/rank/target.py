"""The size that a user asks for: a fraction of the present one, a number of parameters, or bytes."""

import re
import warnings
from collections.abc import Collection, Iterable, Mapping

from comera.errors import RankError
from comera.nn.tensor_train import TensorTrain
from comera.rank.trains import check_roundable
from comera.tt.format import spec_size
from comera.tt.ngram import NGramSpec

_UNITS = {"b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BYTES = re.compile(r"\s*(\d{1,15}(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def bytes_of(text: str) -> float | None:
    """The bytes that a text such as "1.5MB" names (1 MB = 2^20 bytes); None if it is none."""
    found = _BYTES.fullmatch(text)
    unit = _UNITS.get(found[2].lower()) if found else None
    return None if found is None or unit is None else float(found[1]) * unit


def smallest_size(trains: Iterable[TensorTrain], *, multiple: int = 1) -> int:
    """Parameters that tensor trains store with every inner rank at 1, or at `multiple` if it was higher.

    A train with an inner rank of 0 is the zero weight and ends up storing nothing; one of order 1 has no inner ranks.
    An n-gram table can go as a whole.
    """
    specs = [train.spec for train in trains if not isinstance(train.spec, NGramSpec)]
    return sum(
        spec_size(spec, [min(rank, multiple) for rank in spec.inner_ranks]) for spec in specs if all(spec.inner_ranks)
    )


def check_multiple(multiple: int) -> None:
    """Raise RankError unless ranks can be kept at multiples of it."""
    if multiple < 1:
        raise RankError(f"multiple: expected ranks at multiples of 1 or more, got {multiple}")


def target_of(
    trains: Collection[TensorTrain], target: float | int | str, *, size: int, multiple: int, where: str
) -> int:
    """`resolve_target` for tensor trains, of which `size` parameters count as stored now."""
    parameters = [p for train in trains for p in train.parameters()]
    stored = sum(p.numel() * p.element_size() for p in parameters)
    mean = stored / max(1, sum(p.numel() for p in parameters))
    smallest = smallest_size(trains, multiple=multiple)
    dtypes = sorted({str(train.cores[0].dtype).removeprefix("torch.") for train in trains})
    if isinstance(target, str) and len(dtypes) > 1:
        warnings.warn(
            f"{where}={target!r}: these tensor trains are stored in {' and '.join(dtypes)}, so bytes count at the mean "
            f"of now, {mean:.2f} a parameter, and what is left may take somewhat more: give a number of parameters, or "
            "ask for less",
            stacklevel=4,
        )
    return resolve_target(target, size=size, smallest=smallest, bytes_per_element=mean, where=where)


def check_target(trains: Collection[TensorTrain], target: float | int | str, *, multiple: int = 1) -> None:
    """Raise RankError for the target of a late stage that these tensor trains cannot reach."""
    check_roundable(trains)
    if all(train.late_from is None for train in trains):
        stored = sum(p.numel() for train in trains for p in train.parameters())
        target_of(trains, target, size=stored, multiple=multiple, where="LateStage.target_size")


def late_target(target: float | int | str, sizes: Mapping[TensorTrain, int], *, multiple: int) -> int:
    """S0 of a late stage, in parameters: a fraction counts from the size at which one first began for these weights.

    Otherwise a run that goes on from saved weights, without the state of its controller, would apply its target to
    what that controller has left. sizes: parameters that pruning would leave of each tensor train.
    """
    began, now = sum(train.late_from or size for train, size in sizes.items()), sum(sizes.values())
    where = "LateStage.target_size"
    found = target_of(sizes, target, size=began, multiple=multiple, where=where)
    if began != now:
        warnings.warn(
            f"a late stage of this model began before, at {began:,} parameters in tensor trains, now {now:,}: "
            f"{where}={target!r} counts from there and is {found:,}; for another size give a number of parameters",
            stacklevel=4,
        )
    return found


def resolve_target(target: float | int | str, *, size: int, smallest: int, bytes_per_element: float, where: str) -> int:
    """The target as a number of stored parameters.

    target: a float in (0, 1], the fraction of `size` to keep; an integer number of parameters; or a string such as
    "1.5MB" (1 MB = 2^20 bytes). size, smallest: parameters stored now, and the fewest that can be reached. where: name
    of the target, for the error message. Raises RankError for anything else, or a target out of these bounds.
    """
    if isinstance(target, str):
        stored = bytes_of(target)
        if stored is None:
            raise RankError(f"{where}: expected bytes such as '1.5MB' or '700 kB', got {target!r}")
        count = int(stored / (bytes_per_element or 1.0))  # 0 if no tensor train stores anything
    elif isinstance(target, bool) or not isinstance(target, float | int) or not target > 0:
        raise RankError(
            f"{where}: expected a fraction such as 0.2, a number of parameters such as 350000 or bytes such as "
            f"'1.5MB', got {target!r}"
        )
    elif isinstance(target, float):
        if target > 1:
            raise RankError(
                f"{where}: a float is a fraction of the size, in (0, 1], got {target}; give a number of parameters as "
                "an integer"
            )
        count = int(target * size)
    else:
        count = target
    if count > size:
        raise RankError(
            f"{where}: expected at most the present {size:,} parameters of the tensorized layers "
            f"({size * bytes_per_element / 2**20:.2f} MB), got {target!r} = {count:,}: ranks never rise"
        )
    if count < smallest:
        raise RankError(
            f"{where}: {target!r} = {count:,} parameters is below the smallest possible, {smallest:,} "
            f"({smallest * bytes_per_element / 2**20:.3f} MB), which every rank at its minimum takes"
        )
    return count
