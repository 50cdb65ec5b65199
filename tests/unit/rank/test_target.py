"""Sizes as users give them."""

from typing import Any

import pytest
from torch import nn

from comera.errors import RankError
from comera.nn.embedding import TTMEmbedding
from comera.nn.linear import TTLinear
from comera.rank.target import check_multiple, resolve_target, smallest_size
from comera.rank.trains import adaptable_trains
from comera.tt.format import spec_size
from comera.tt.spec import TTMSpec, TTSpec

SPEC = TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1))


def resolve(target: Any) -> int:
    return resolve_target(target, size=1_000_000, smallest=1000, bytes_per_element=4.0, where="target")


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        *[(0.25, 250_000), (1.0, 1_000_000), (1000, 1000), (1_000_000, 1_000_000)],
        *[("1MB", 2**18), ("1.5 MiB", 3 * 2**17), ("700kB", 700 * 256), ("8000 B", 2000), (" 0.001gb ", 268_435)],
    ],
)
def test_fractions_parameters_and_bytes(target: Any, parameters: int) -> None:
    assert resolve(target) == parameters


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (1_000_001, r"at most the present 1,000,000 parameters of the tensorized layers \(3.81 MB\), got 1000001"),
        ("4MB", "at most the present"),
        (999, r"999 = 999 parameters is below the smallest possible, 1,000 \(0.004 MB\)"),
        (0.0001, "below the smallest possible"),
        ("1 kB", "below the smallest possible"),
        (1.5, r"a float is a fraction of the size, in \(0, 1\], got 1.5"),
        ("half", "expected bytes such as '1.5MB'"),
        ("-3MB", "expected bytes such as"),
        ("3 parsecs", "expected bytes such as"),
        ("350000", "expected bytes such as"),
        ("9" * 400 + " MB", "expected bytes such as"),
        (10**400, "at most the present"),
        (float("inf"), r"a fraction of the size, in \(0, 1\], got inf"),
        (True, "expected a fraction such as 0.2"),
        (0, "expected a fraction such as 0.2"),
        (-0.5, "expected a fraction such as 0.2"),
        (float("nan"), "expected a fraction such as 0.2"),
        (None, "expected a fraction such as 0.2"),
    ],
)
def test_what_cannot_be_is_refused(target: Any, message: str) -> None:
    with pytest.raises(RankError, match=message):
        resolve(target)


def test_the_smallest_size_counts_tied_trains_once_and_keeps_multiples_and_empty_trains() -> None:
    first = TTLinear(SPEC)
    model = nn.ModuleList([first, TTLinear(first.tt), TTLinear(SPEC.with_ranks((1, 0, 0, 0, 1)))])
    assert smallest_size(adaptable_trains(model).values()) == 3 + 4 + 4 + 3 + 3
    assert smallest_size(adaptable_trains(model).values(), multiple=4) == spec_size(SPEC.with_ranks((1, 3, 4, 3, 1)))
    assert smallest_size(adaptable_trains(nn.Linear(2, 2)).values()) == 0


def test_a_train_with_a_rank_of_0_takes_nothing_in_the_end_and_one_of_order_1_all_it_has() -> None:
    table = TTMEmbedding(TTMSpec(5, 3, (5,), (3,), (1, 1)))
    empty = TTLinear(SPEC.with_ranks((1, 3, 0, 3, 1)))
    assert smallest_size(adaptable_trains(nn.ModuleList([table, empty])).values()) == 15


def test_where_nothing_is_stored_a_fraction_is_nothing_and_bytes_are_too_many() -> None:
    nothing = {"size": 0, "smallest": 0, "bytes_per_element": 0.0, "where": "target"}
    assert resolve_target(0.5, **nothing) == 0
    with pytest.raises(RankError, match="at most the present 0 parameters"):
        resolve_target("1 kB", **nothing)


def test_multiples_are_one_or_more() -> None:
    check_multiple(1)
    for multiple in (0, -8):
        with pytest.raises(RankError, match=f"multiples of 1 or more, got {multiple}"):
            check_multiple(multiple)
