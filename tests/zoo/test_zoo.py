"""Every family against every check. Some of it runs in `make test`, the rest in `make zoo`."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from .checks import CHECKS
from .families import FAMILIES, Family

FAST_FAMILIES = ("bert", "gpt2", "llama", "t5", "gemma3", "mixtral")
FAST_CHECKS = ("conversion", "float64")
PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # torch.compile's own
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning"),  # in their code
    pytest.mark.filterwarnings(
        "ignore:.*The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),  # torch.compile
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning"),  # transformers'
]


def fast(family: Family, check: str) -> bool:
    return check in FAST_CHECKS or (family.name in FAST_FAMILIES and check != "compile")


# Block tensor trains in a few families, as different as linear layers in them are.
IN_BLOCKS = [
    replace(family, name=f"{family.name} in blocks", blocks=True)
    for family in FAMILIES
    if family.name in ("bert", "gpt2", "llama", "t5", "vit")
]
PAIRS = [
    pytest.param(family, check, id=f"{family.name}-{check}", marks=() if fast(family, check) else pytest.mark.zoo)
    for family in (*FAMILIES, *IN_BLOCKS)
    for check in CHECKS
]


@pytest.mark.parametrize(("family", "check"), PAIRS)
def test_zoo(family: Family, check: str, record_property: Callable[[str, object], None]) -> None:
    if not family.blocks:  # docs/zoo.md shows one format
        record_property("zoo", (family.name, check))
    if family.missing:
        pytest.skip(family.missing)
    shortfall = family.shortfalls.get(check)
    if shortfall is None:
        record_property("remark", CHECKS[check](family) or "")
        return
    with pytest.raises(Exception) as caught:  # noqa: PT011
        CHECKS[check](family)
    assert re.search(shortfall.match, str(caught.value)), f"another error than {shortfall.match!r}: {caught.value}"
    record_property("shortfall", shortfall.reason)


def test_the_page_has_a_row_for_every_family_and_a_column_for_every_check() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    assert [row[0].removeprefix("| ") for row in rows] == ["family", *(family.name for family in FAMILIES)], "make zoo"
    assert [cell.removesuffix(" |") for cell in rows[0][1:]] == list(CHECKS), "make zoo"


def test_shortfalls_are_of_checks_that_exist() -> None:
    assert {check for family in FAMILIES for check in family.shortfalls} <= CHECKS.keys()
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert set(FAST_FAMILIES) <= {family.name for family in FAMILIES}
