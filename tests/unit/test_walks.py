"""How far a reader walks who follows one public call: a bound for each, that only a shorter walk may change.

A walk has the calls of our functions that the tensors in question (or modules) are passed to, alone or in a list, tuple
or dict. A stay is what happens in one file before the next one is entered: a walk has one for each file, and one more
for each return to a file.
"""

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType, UnionType
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import IDENTITY, make, save, train
from torch import Tensor, nn

import comera
from comera.nn import TTLinear, TTMEmbeddingBag, changes
from comera.trainer.checkpoint import load_checkpoint
from comera.tt import tt_spec, ttm_spec

SRC = Path(comera.__file__).parent


def carried(value: object, kinds: type | UnionType, depth: int = 0) -> bool:
    if isinstance(value, kinds):
        return True
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return depth < 2 and any(carried(each, kinds, depth + 1) for each in held)


def walk(call: Callable[[], object], kinds: type | UnionType) -> list[str]:
    """The file of each stay of a call, which is made once before: what is loaded and planned once does not count."""
    call()
    found = []

    def entered(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<") and Path(code.co_filename).is_relative_to(SRC):
            count = code.co_argcount + code.co_kwonlyargcount
            count += sum(bool(code.co_flags & flag) for flag in (4, 8))  # *args, **kwargs
            if any(carried(frame.f_locals.get(name), kinds) for name in code.co_varnames[:count]):
                found.append(str(Path(code.co_filename).relative_to(SRC)))

    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [file for file, _ in groupby(found)]


def linear(_: Path) -> Callable[[], object]:
    layer, x = TTLinear(tt_spec(768, 768, order=6, rank=8)), torch.randn(128, 768)
    return lambda: layer(x)


def bag(_: Path) -> Callable[[], object]:
    table = TTMEmbeddingBag(ttm_spec(10_000, 64, order=3, rank=8), mode="mean")
    ids, offsets = torch.randint(0, 10_000, (500,)), torch.arange(0, 500, 5)
    return lambda: table(ids, offsets)


def checkpoint(run: Path) -> Callable[[], object]:
    state = make()
    train(state, 2)
    folder = save(run, state, 2)
    return lambda: load_checkpoint(folder, *state, identity=IDENTITY)


@pytest.mark.parametrize(
    ("begin", "kinds", "files", "stays"),
    [(linear, Tensor, 12, 26), (bag, Tensor, 9, 14), (checkpoint, Tensor | nn.Module, 8, 12)],
)
def test_a_walk_gets_no_longer(
    begin: Callable[[Path], Callable[[], object]],
    kinds: type | UnionType,
    files: int,
    stays: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(changes, "_LISTENERS", [])  # of rooms that other tests import
    walked = walk(begin(tmp_path), kinds)
    assert len(set(walked)) <= files, " ".join(walked)
    assert len(walked) <= stays, " ".join(walked)
