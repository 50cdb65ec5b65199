"""TT, TTM and TensorizeConfig: checked at construction."""

from collections.abc import Callable

import pytest

from comera.convert import BTT, TT, TTM, TensorizeConfig
from comera.errors import ConversionError, SpecError


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: TT(order=1), SpecError, "TT needs an order of at least 2"),
        (lambda: TT(order=True), SpecError, "order"),
        (lambda: TTM(order=0), SpecError, "TTM needs an order of at least 1"),
        (lambda: TT(rank=0), SpecError, "TT needs rank to be an integer >= 1, a tuple of them or None, got 0"),
        (lambda: TTM(rank=(1, 0, 1)), SpecError, "TTM needs rank to be an integer >= 1"),
        (lambda: BTT(rank=0), SpecError, "BTT needs rank to be an integer >= 1 or None, got 0"),
        (lambda: TT(rank=2.5), SpecError, "got 2.5"),
        (lambda: TT(rank=()), SpecError, r"got \(\)"),
        (lambda: TT(in_modes=(4, 0)), SpecError, "in_modes to be a tuple of positive integers or None"),
        (lambda: TTM(col_modes="8·8"), SpecError, "col_modes to be"),
        (lambda: TTM(row_modes=(-1, -1)), SpecError, r"integers, one of which may be -1, or None, got \(-1, -1\)"),
        (lambda: TT(in_modes=(-1, 4)), SpecError, "in_modes to be a tuple of positive integers or None"),
        (lambda: BTT(rank=(1, 2)), SpecError, r"BTT needs rank to be an integer >= 1 or None, got \(1, 2\)"),
        (lambda: BTT(rank=True), SpecError, "got True"),
        (lambda: BTT(blocks=4), SpecError, "blocks to be two integers >= 1 or None, got 4"),
        (lambda: BTT(blocks=(4, 0)), SpecError, "blocks to be two integers"),
        (lambda: BTT(blocks=(4, 4, 4)), SpecError, "blocks to be two integers"),
        (lambda: TensorizeConfig(embedding=BTT()), ConversionError, "embedding must be a TTM or None"),
        (lambda: TensorizeConfig(linear=TTM()), ConversionError, "linear must be a TT, a BTT or None"),
        (lambda: TensorizeConfig(embedding=TT()), ConversionError, "embedding must be a TTM or None"),
        (lambda: TensorizeConfig(overrides={"a": 3}), ConversionError, "overrides must be a mapping"),
        (lambda: TensorizeConfig(overrides=[("a", None)]), ConversionError, "overrides must be a mapping"),
        (lambda: TensorizeConfig(tied="yes"), ConversionError, "tied must be 'share' or 'untie', got 'yes'"),
        (lambda: TensorizeConfig(init="svd"), ConversionError, "init must be"),
        (lambda: TensorizeConfig(init_std=0.0), ConversionError, "init_std must be"),
        (lambda: TensorizeConfig(min_ratio=-1), ConversionError, "min_ratio must be"),
        (lambda: TensorizeConfig(threshold=1.0), ConversionError, "threshold must be in"),
    ],
)
def test_configurations_are_checked_at_construction(
    make: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_configurations_take_lists_and_keep_their_own_overrides() -> None:
    assert TT(rank=[1, 2, 1], in_modes=[4], out_modes=[4]) == TT(rank=(1, 2, 1), in_modes=(4,), out_modes=(4,))
    overrides: dict[str, TT | TTM | None] = {"up": None}
    config = TensorizeConfig(overrides=overrides)
    overrides["down"] = None
    assert config.overrides == {"up": None}


def test_given_modes_determine_the_order() -> None:
    assert TT(rank=3, in_modes=(4, 4), out_modes=(16,)).spec(16, 16).order == 3
    assert TTM(row_modes=(4, 4), rank=3).spec(16, 16).order == 2
    assert TT(order=5, rank=3, in_modes=(4, 4)).spec(16, 64).split == 2


def test_one_mode_of_a_table_is_what_the_others_leave() -> None:
    assert TTM(row_modes=(-1, 10), col_modes=(4, -1), rank=3).spec(95, 16).row_modes == (10, 10)
    plain = TTM.low_rank(5).spec(95, 16)
    assert (plain.row_modes, plain.col_modes, plain.inner_ranks) == ((95, 1), (1, 16), (5,))
    assert TTM.low_rank(50).spec(95, 16).inner_ranks == (16,)
    assert TTM.low_rank().rank is None  # for a ratio


def test_blocks_may_be_a_list() -> None:
    assert BTT(blocks=[2, 4]) == BTT(blocks=(2, 4))  # type: ignore[arg-type]
    assert hash(BTT(blocks=[2, 4])) == hash(BTT(blocks=(2, 4)))  # type: ignore[arg-type]
