"""Random damage of every file of checkpoints, saved models and prepared data: nothing else loads in silence.

Each case either raises one of our errors and changes nothing, or gives what was saved. Prepared data is made anew.
"""

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from comera.convert import TT, TTM, TensorizeConfig, tensorize_
from comera.errors import CheckpointError, ComeraError
from comera.files import write_sums
from comera.optim.param_groups import param_groups
from comera.pretrained import load_pretrained, read_manifest, save_pretrained, stored
from comera.rank.controller import RankController
from comera.recipes.code_lm import data as code
from comera.recipes.data.cache import open_or_make
from comera.recipes.dlrm import criteo
from comera.trainer.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from comera.trainer.random_state import rng_state, set_rng_state
from comera.trainer.trainer_json import Progress

from ..helpers.click_rows import ROWS, write
from .children import settle

IDENTITY = {"lr": 1e-3, "betas": [0.9, 0.999], "recipe": "toy"}
State = tuple[nn.Sequential, torch.optim.Optimizer, RankController]
Record = Callable[[str, object], None]
TIMES = (1, pytest.param(10, marks=pytest.mark.faults))  # as many cases in `make faults`


def damages(content: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` different ways to damage a file, each with what was done to it."""
    rng = random.Random(seed)
    while count:
        start = rng.randrange(len(content))
        end = min(len(content), start + rng.choice((1, 8, 64, 512)))
        kind = rng.choice(("bit", "noise", "zeros", "cut", "lost", "swapped", "more"))
        damaged = bytearray(content)
        if kind == "bit":
            damaged[start] ^= 1 << rng.randrange(8)
        elif kind == "noise":
            damaged[start:end] = rng.randbytes(end - start)
        elif kind == "zeros":
            damaged[start:end] = bytes(end - start)
        elif kind == "cut":
            del damaged[start:]
        elif kind == "lost":
            del damaged[start:end]
        elif kind == "swapped":
            other = rng.randrange(len(content))
            damaged[start], damaged[other] = damaged[other], damaged[start]
        else:
            damaged[start:start] = rng.randbytes(end - start)
        if bytes(damaged) != content:
            count -= 1
            yield f"{kind} at {start} to {end} of {len(content)}", bytes(damaged)


def make(seed: int = 0) -> State:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(60, 16), nn.Flatten(), nn.Linear(32, 24), nn.BatchNorm1d(24), nn.Linear(24, 60))
    tensorize_(
        model, TensorizeConfig(linear=TT(order=4, rank=4), embedding=TTM(order=2, rank=4), overrides={"4": None})
    )
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2))
    return model, optimizer, RankController(model).attach(optimizer)


def train(state: State, steps: int) -> None:
    model, optimizer, controller = state
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randint(60, (8, 2), generator=generator)).square().mean()
        loss.backward()
        controller.observe(loss)
        optimizer.step()


def everything(state: State) -> dict[str, Any]:
    """All that a checkpoint restores."""
    model, optimizer, controller = state
    moments = {
        f"{name}:{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    tensors = {**model.state_dict(), **moments}
    exact = {name: (str(t.dtype), t.tolist()) if isinstance(t, Tensor) else t for name, t in tensors.items()}
    return {"tensors": exact, "controller": controller.state_dict(), "rng": rng_state()}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any], Progress]:
    """A checkpoint, and what it holds."""
    state = make()
    train(state, 3)
    progress = Progress(3, 48, 1.5, 0.25, 3, 0.25, 0.5, 1 << 20, None, 24, {"accuracy": 0.5}, {"step": 2})
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    rng = [rng_state()]
    folder = save_checkpoint(tmp_path, *state, progress, identity=IDENTITY, rng=rng)
    return folder, everything(state), progress


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "trainer.json", "comera.json", "XXH128SUMS"]
)
@pytest.mark.parametrize("times", TIMES)
def test_a_damaged_checkpoint_never_loads_other_values(
    saved: tuple[Path, dict[str, Any], Progress], name: str, times: int, record_property: Record
) -> None:
    folder, expected, progress = saved
    content = (folder / name).read_bytes()
    torch.manual_seed(4)
    state = make(seed=1)
    before = everything(state)
    wrong = []
    for what, damaged in damages(content, 80 * times, seed=len(name) + times):
        (folder / name).write_bytes(damaged)
        try:
            came = load_checkpoint(folder, *state, identity=IDENTITY)
        except ComeraError:
            if everything(state) != before:
                wrong.append(f"{what}: changed something before its error")
        except Exception as error:
            wrong.append(f"{what}: raw {error!r:.90}")
        else:
            if (everything(state), came) != (expected, progress):
                wrong.append(f"{what}: loaded other values in silence")
        if everything(state) != before:
            state = make(seed=1)
            set_rng_state(before["rng"])
            state[2].load_state_dict(before["controller"])
            assert everything(state) == before
    settle(record_property, f"damage: {name} of a checkpoint", 80 * times, wrong)


def test_a_damaged_trainer_json_is_no_best_checkpoint(saved: tuple[Path, dict[str, Any], Progress]) -> None:
    folder, _, _ = saved
    path = folder / "trainer.json"
    path.write_text(path.read_text().replace('"held_out_loss": 0.25', '"held_out_loss": 0.15'))
    with pytest.raises(CheckpointError, match="was evaluated"):
        find_checkpoint(folder.parents[1], "best")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "comera.json", "model.safetensors.index.json", "model-00002-of-00004.safetensors"]
)
@pytest.mark.parametrize("times", TIMES)
def test_a_damaged_model_never_loads_other_values(
    tmp_path: Path, name: str, times: int, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()[0]
    if name.startswith(("model-", "model.safetensors.")):
        monkeypatch.setattr(stored, "SHARD", 2000)
    save_pretrained(model, tmp_path)
    expected = {key: value.tolist() for key, value in model.state_dict().items()}
    manifest = read_manifest(tmp_path)
    wrong = []
    for what, damaged in damages((tmp_path / name).read_bytes(), 120 * times, seed=1 + times):
        (tmp_path / name).write_bytes(damaged)
        fresh = make(seed=1)[0]
        before = {key: value.tolist() for key, value in fresh.state_dict().items()}
        try:
            load_pretrained(fresh, tmp_path)
        except ComeraError:
            if {key: value.tolist() for key, value in fresh.state_dict().items()} != before:
                wrong.append(f"{what}: changed something before its error")
        except Exception as error:
            wrong.append(f"{what}: raw {error!r:.90}")
        else:
            if {key: value.tolist() for key, value in fresh.state_dict().items()} != expected:
                wrong.append(f"{what}: loaded other values in silence")
        try:
            if read_manifest(tmp_path) != manifest:
                wrong.append(f"{what}: read another manifest in silence")
        except CheckpointError:
            pass
    settle(record_property, f"damage: {name} of a saved model", 120 * times, wrong)


# What no run writes, by path in trainer.json. Each is refused, its checksums being right.
CRAFTED: list[tuple[tuple[str | int, ...], list[Any]]] = [
    (("progress",), [None, 3, [], "x"]),
    (("progress", "step"), [None, -1, 1.5, True, "3", math.nan, 10**30]),
    (("progress", "tokens"), [None, -1, 0.5, []]),
    (("progress", "time"), [None, -1.0, math.nan, math.inf, "1"]),
    (("progress", "held_out_loss"), ["x", [], True]),
    (("progress", "held_out_step"), [None, -2, 4, 0.5]),
    (("progress", "best_held_out_loss"), ["x", {}]),
    (("progress", "step_time"), [None, -1.0, math.nan]),
    (("progress", "peak_memory"), [None, -1, 2.5]),
    (("progress", "stopped"), ["never", 3, []]),
    (("progress", "examples"), [None, -1, "24"]),
    (("progress", "metrics"), [None, [], {"accuracy": "x"}, {"accuracy": None}]),
    (("progress", "start_from"), [[], 3, {"step": "x"}, {"step": -1}]),
    (("progress", "mode"), [None, 3]),
    (("progress", "peak_lrs"), [None, 3, ["x"], [-1.0], [math.inf], [0.1] * 50]),
    (("progress", "weight_decays"), [None, 3, ["x"], [-1.0], [math.nan], [0.1] * 50]),
    (("identity",), [None, 3, [], "x"]),
    (("controller",), [None, 3, [], "x", {"steps": 3}]),
    (("controller", "steps"), [None, -1, 1.5, "x", [], {}]),
    (("parameters",), [None, 3, {}, [3], [[]], [None]]),
    (("scalars",), [None, 3, [], {"2.bias": 3}, {"nobody": {"step": 1}}, {"2.bias": {"exp_avg": 0}}]),
    (("other_shapes",), [3, [], {"2.bias:exp_avg": 3}, {"2.bias:exp_avg": ["x"]}, {"2.bias:exp_avg": [-1]}]),
    (("rng",), [None, 3, {}, [3], [None], [{}], []]),
    (("rng", 0, "python"), [None, [], [3, [], None], [3, [1] * 624, None], [2, [1] * 625, None], "x"]),
    (("rng", 0, "python", 1, 0), [None, -1, 2**32, 1.5, "x"]),
    (("rng", 0, "python", 1, 624), [625, -1]),
    (("rng", 0, "python", 2), ["x", [], math.nan]),
    (("rng", 0, "torch"), [None, 3, "", "xy", "00", "ff" * 5056]),
    (("rng", 0, "cuda"), [None, 3, [3], ["xy"], ["00"]]),
    (("rng", 0, "numpy"), [None, [], 3, ["MT19937", [], 0, 0, 0.0], ["PCG64", [1] * 624, 0, 0, 0.0]]),
    (("rng", 0, "numpy", 1, 3), [None, -1, 2**32, 1.5, "x"]),
    (("rng", 0, "numpy", 2), [None, 625, -1, 0.5]),
    (("rng", 0, "numpy", 3), [None, 2, -1]),
    (("rng", 0, "numpy", 4), [None, "x", math.nan]),
    (("kernels",), [3, [], {}]),
]


def test_a_crafted_trainer_json_is_refused(
    saved: tuple[Path, dict[str, Any], Progress], record_property: Record
) -> None:
    folder, _, _ = saved
    path = folder / "trainer.json"
    trainer = json.loads(path.read_text())
    torch.manual_seed(4)
    state = make(seed=1)
    before = everything(state)
    cases = [(where, value) for where, values in CRAFTED for value in values]
    cases += [((name,), KeyError) for name in trainer if name not in ("format", "other_shapes")]
    wrong = []
    for where, value in cases:
        path.write_text(json.dumps(changed(trainer, where, value)))
        write_sums(folder)
        what = f"{where} = {value!r:.40}"
        try:
            load_checkpoint(folder, *state, identity=IDENTITY)
        except CheckpointError:
            if everything(state) != before:
                wrong.append(f"{what}: changed something before its error")
        except Exception as error:
            wrong.append(f"{what}: raw {error!r:.90}")
        else:
            wrong.append(f"{what}: taken")
        if everything(state) != before:
            state = make(seed=1)
            set_rng_state(before["rng"])
            state[2].load_state_dict(before["controller"])
    settle(record_property, "damage: trainer.json of values that no run writes", len(cases), wrong)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '{"format":', "[" * 100_000, '{"version": ' + "9" * 5000 + "}", "\x00", '{"version": NaN}']
)
def test_a_trainer_json_that_is_none_is_refused(saved: tuple[Path, dict[str, Any], Progress], text: str) -> None:
    folder, _, _ = saved
    (folder / "trainer.json").write_text(text)
    write_sums(folder)
    with pytest.raises(CheckpointError, match=r"expected (a readable )?trainer\.json"):
        load_checkpoint(folder, *make(seed=1), identity=IDENTITY)


def changed(value: Any, where: tuple[str | int, ...], new: Any) -> Any:
    """A copy of nested lists and objects with another value at a path; KeyError takes the value away."""
    if not where:
        return new
    copy = value.copy()
    if new is KeyError and len(where) == 1:
        del copy[where[0]]
    else:
        copy[where[0]] = changed(value[where[0]], where[1:], new)
    return copy


@pytest.mark.parametrize("times", TIMES)
def test_damaged_prepared_data_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, times: int, record_property: Record
) -> None:
    content = {
        "a.bin": numpy.random.default_rng(0).integers(256, size=3000).astype(numpy.uint8).tobytes(),
        "b.bin": bytes(1000),
        "manifest.json": json.dumps({"tokens": [3, 1000], "names": ["x", "y"]}).encode(),
    }
    made = []

    def make_it(folder: Path) -> None:
        made.append(folder)
        for name, data in content.items():
            (folder / name).write_bytes(data)

    def load(folder: Path) -> dict[str, bytes]:
        return {name: (folder / name).read_bytes() for name in content}

    folder = tmp_path / "data"
    assert open_or_make(folder, load, make_it) == open_or_make(folder, load, make_it) == content
    assert len(made) == 1
    wrong = []
    for name in sorted(path.name for path in folder.iterdir()):
        for what, damaged in damages((folder / name).read_bytes(), 40 * times, seed=len(name) + times):
            (folder / name).write_bytes(damaged)
            made.clear()
            caplog.clear()
            if open_or_make(folder, load, make_it) != content:
                wrong.append(f"{name}, {what}: loaded other values in silence")
            elif not made or "is damaged" not in caplog.text:
                wrong.append(f"{name}, {what}: {'said nothing' if made else 'kept the damaged file'}")
    settle(record_property, "damage: prepared data", 160 * times, wrong)


def prepare_code(folder: Path) -> Path:
    source = folder / "source"
    if not source.exists():
        source.mkdir()
        for i in range(8):
            (source / f"m{i}.py").write_text("\n".join(f"def f_{i}_{j}(x):\n    return x + {j}\n" for j in range(9)))
    config = code.CodeDataConfig(path=str(source), vocab_size=270, block_size=16, cache=str(folder / "cache"))
    return code.prepare(config, quiet=True).folder


def prepare_clicks(folder: Path) -> Path:
    path = folder / "train.txt"
    if not path.exists():
        write(path, ROWS[:60])
    config = criteo.CriteoConfig(path=str(path), cache=str(folder / "cache"))
    return criteo.prepare(config, quiet=True).folder


@pytest.mark.parametrize("prepare", [prepare_code, prepare_clicks])
@pytest.mark.parametrize("times", TIMES)
def test_damaged_data_of_recipes_is_made_anew(
    tmp_path: Path, prepare: Callable[[Path], Path], times: int, record_property: Record
) -> None:
    folder = prepare(tmp_path)
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    rng = random.Random(5)
    wrong = []
    for name in rng.sample(sorted(content), 5):
        for what, damaged in damages(content[name], 2 * times, seed=len(name) + times):
            (folder / name).write_bytes(damaged)
            if {path.name: path.read_bytes() for path in prepare(tmp_path).iterdir()} != content:
                wrong.append(f"{name}, {what}: loaded other values in silence")
                (folder / name).write_bytes(content[name])
    settle(record_property, f"damage: {prepare.__name__.replace('prepare_', 'prepared ')}", 10 * times, wrong)
