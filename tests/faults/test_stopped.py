"""Kills and a full disk at every file operation: what is there is the old state or the new one, and work goes on."""

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from comera.convert import TT, TensorizeConfig, tensorize_
from comera.errors import ComeraError
from comera.export.program import export_program
from comera.export.write import export_compressed, export_dense
from comera.files import replace_file
from comera.optim.param_groups import param_groups
from comera.pretrained import load_pretrained, save_pretrained, stored
from comera.rank.controller import RankController
from comera.recipes.data.cache import open_or_make
from comera.trainer.checkpoint import clean, find_checkpoint, load_checkpoint, save_checkpoint
from comera.trainer.random_state import rng_state
from comera.trainer.trainer_json import Progress

from .children import OTHER_ERROR, REFUSED, How, operations, settle, stopped_at_byte, stopped_at_call

INPUTS = torch.ones(3, 32)
PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


@dataclass(frozen=True)
class Scenario:
    """before: makes the old state in a folder. work: replaces it. state: what is there now, "old", "new" or else."""

    before: Callable[[Path], object]
    work: Callable[[Path], object]
    state: Callable[[Path], str]


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 8))
    tensorize_(made, TensorizeConfig(linear=TT(order=2, rank=2 + seed), overrides={"2": None}))
    return made.eval()


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 8))


@cache
def outputs_of(seed: int) -> torch.Tensor:
    return model(seed)(INPUTS)  # type: ignore[no-any-return]


def of(outputs: torch.Tensor) -> str:
    """Whose outputs these are."""
    for name, seed in (("old", 1), ("new", 2)):
        if torch.allclose(outputs, outputs_of(seed), rtol=0, atol=1e-5):
            return name
    return "something else"


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, RankController]:
    made = model(seed)
    optimizer = torch.optim.AdamW(param_groups(made, lr=1e-2))
    return made, optimizer, RankController(made).attach(optimizer)


def save_step(run: Path, step: int, seed: int) -> None:
    try:
        save_checkpoint(run, *trained(seed), Progress(step=step), identity={}, rng=[rng_state()])
    except (OSError, ComeraError):
        clean(run)  # as `fit` does
        raise


def checkpoint_state(run: Path) -> str:
    clean(run)
    made, optimizer, controller = trained(3)
    load_checkpoint(find_checkpoint(run), made, optimizer, controller, identity={})
    return of(made.eval()(INPUTS))


@contextmanager
def shards() -> Iterator[None]:
    """Here a file of a model holds at most so many bytes of tensors."""
    before, stored.SHARD = stored.SHARD, 800
    yield
    stored.SHARD = before


def save_shards(seed: int, folder: Path) -> None:
    with shards():
        save_pretrained(model(seed), folder)


def step_shards(run: Path, step: int) -> None:
    with shards():
        save_step(run, step, step)


def pretrained_state(folder: Path) -> str:
    return of(load_pretrained(dense(), folder).eval()(INPUTS))


def prepare(folder: Path, text: str) -> str:
    def write(partial: Path) -> None:
        for name in ("a", "b"):
            (partial / name).write_text(text)
        replace_file(partial / "manifest.json", text)

    return open_or_make(folder, lambda made: "".join((made / name).read_text() for name in ("a", "b")), write)


def damaged(cache: Path) -> None:
    prepare(cache / "data", "old")
    (cache / "data" / "a").write_text("other")


def prepared_state(cache: Path) -> str:
    """What opening it gives: the old is damaged, so it is made anew."""
    return {"newnew": "new"}.get(prepare(cache / "data", "new"), "something else")


def dense_state(folder: Path) -> str:
    from safetensors.torch import load_file

    plain = dense()
    plain.load_state_dict(load_file(folder / "model.safetensors"))
    return of(plain(INPUTS))


def program_state(folder: Path) -> str:
    return of(torch.export.load(folder / "model.pt2").module()(INPUTS))


def export(kind: Callable[..., object], seed: int, build: Any, folder: Path) -> None:
    kind(model(seed), [INPUTS], folder / "out", build, overwrite=True)


SCENARIOS = {
    "save_checkpoint": Scenario(lambda run: save_step(run, 1, 1), lambda run: save_step(run, 2, 2), checkpoint_state),
    "save_checkpoint, the same step": Scenario(
        lambda run: save_step(run, 1, 1), lambda run: save_step(run, 1, 2), checkpoint_state
    ),
    "save_pretrained": Scenario(
        lambda folder: save_pretrained(model(1), folder),
        lambda folder: save_pretrained(model(2), folder),
        pretrained_state,
    ),
    "save_checkpoint, in shards": Scenario(
        lambda run: step_shards(run, 1), lambda run: step_shards(run, 2), checkpoint_state
    ),
    "save_pretrained, in shards": Scenario(
        lambda folder: save_shards(1, folder), lambda folder: save_shards(2, folder), pretrained_state
    ),
    "save_pretrained, shards for a file": Scenario(
        lambda folder: save_pretrained(model(1), folder), lambda folder: save_shards(2, folder), pretrained_state
    ),
    "save_pretrained, a file for shards": Scenario(
        lambda folder: save_shards(1, folder), lambda folder: save_pretrained(model(2), folder), pretrained_state
    ),
    "open_or_make": Scenario(lambda cache: None, lambda cache: prepare(cache / "data", "new"), prepared_state),
    "open_or_make, damaged data": Scenario(damaged, lambda cache: prepare(cache / "data", "new"), prepared_state),
    "export_compressed": Scenario(
        lambda place: export(export_compressed, 1, lambda _: dense(), place),
        lambda place: export(export_compressed, 2, lambda _: dense(), place),
        lambda place: pretrained_state(place / "out"),
    ),
    "export_dense": Scenario(
        lambda place: export(export_dense, 1, lambda _: dense(), place),
        lambda place: export(export_dense, 2, lambda _: dense(), place),
        lambda place: dense_state(place / "out"),
    ),
    "export_program": Scenario(
        lambda place: export_program(model(1), [INPUTS], place / "out"),
        lambda place: export_program(model(2), [INPUTS], place / "out", overwrite=True),
        lambda place: program_state(place / "out"),
    ),
}
EVERY = 4  # in `make test`, one of so many operations
PLACES = [
    pytest.param(name, how, every, id=f"{name}-{how}-{every}", marks=pytest.mark.faults if slow else ())
    for name in SCENARIOS
    for how in ("kill", "disk full")
    for every, slow in ((EVERY, name == "export_program"), (1, True))
    if not (name == "export_program" and every > 1)
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Forked children have no others."""
    torch.set_num_threads(1)


@pytest.mark.parametrize(("name", "how", "every"), PLACES)
def test_the_old_state_or_the_new_one(
    tmp_path: Path, name: str, how: How, every: int, record_property: Callable[[str, object], None]
) -> None:
    scenario = SCENARIOS[name]
    first, place = tmp_path / "first", tmp_path / "place"
    first.mkdir()
    scenario.before(first)

    def work() -> None:
        scenario.work(place)

    def again() -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(first, place)

    again()
    calls = operations(work)
    assert scenario.state(place) == "new"
    largest = max(path.stat().st_size for path in place.rglob("*") if path.is_file())
    points = [(stopped_at_call, n) for n in range(0, calls, every)]
    points += [(stopped_at_byte, n) for n in range(0, largest, max(1, largest * every // 40))]
    wrong = []
    for stop, n in points:
        again()
        before = files(place)
        status = stop(work, n, how)
        what = f"{stop.__name__} {n} of {calls if stop is stopped_at_call else largest}"
        expected = (0, REFUSED) if how == "disk full" else (0, -signal.SIGKILL, -signal.SIGXFSZ)
        if status not in expected:
            wrong.append(f"{what}: {'a raw error' if status == OTHER_ERROR else status}")
        elif status == REFUSED and (more := sorted(files(place) - before)):
            wrong.append(f"{what}: left {more[0]}")
        try:
            came = scenario.state(place)
            if came not in ("old", "new") or (status == 0 and came != "new"):
                wrong.append(f"{what}: {came}")
            scenario.work(place)
            if (came := scenario.state(place)) != "new":
                wrong.append(f"{what}: afterwards {came}")
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__} {str(error)[:150]}")
    settle(record_property, f"{how}: {name}", len(points), wrong)


def files(place: Path) -> set[str]:
    """What is there but for what a state consists of."""
    found = (path.relative_to(place) for path in place.rglob("*") if not path.name.endswith(".lock"))
    return {str(path) for path in found if "partial" in str(path) or any(part.startswith(".") for part in path.parts)}


def test_the_page_has_a_row_for_every_scenario() -> None:
    page = PAGE.read_text("utf-8")
    missing = [
        f"{how}: {name}" for name in SCENARIOS for how in ("kill", "disk full") if f"| {how}: {name} |" not in page
    ]
    assert not missing, "make faults"
