"""Runs of recipes that are cut off, that end as others do, and that go on only as they were begun."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from comera.errors import ConfigError
from comera.trainer.checkpoint import checkpoints


def cut_off(task: Any, batches: int, run: Callable[[], object], error: type[BaseException] = KeyboardInterrupt) -> None:
    """Run until a task of this class is asked for one batch more than `batches`: there it raises the error."""
    batch, left = task.train_batch, [batches]

    def stop(self: Any, *place: int) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return batch(self, *place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "train_batch", stop)
        with pytest.raises(error):
            run()


def end_state(run: Path) -> dict[str, Tensor]:
    """All that the last checkpoint holds of the model and the optimizer."""
    files = {name: load_file(checkpoints(run)[-1] / f"{name}.safetensors") for name in ("model", "optimizer")}
    return {f"{name} {key}": value for name, file in files.items() for key, value in file.items()}


def assert_same_end(run: Path, other: Path) -> None:
    """To the bit."""
    one, two = end_state(run), end_state(other)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def assert_goes_on_only_as_begun(run: Callable[..., object], config: Any, changes: Mapping[str, Any]) -> None:
    """changes: by the name that the error must give."""
    for name, change in changes.items():
        with pytest.raises(ConfigError, match=rf"{name}: expected"):
            run(replace(config, **change), resume=True)
