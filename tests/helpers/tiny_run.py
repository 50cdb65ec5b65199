"""Options of a run of code-lm that takes a second: real code, a tiny model, a few steps."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TINY: dict[str, Any] = {
    "data.path": Path(json.__file__).parent,
    "data.vocab_size": 400,
    "data.block_size": 32,
    "data.held_out": 0.2,
    "preset": "base",
    "model.hidden": 32,
    "model.layers": 1,
    "model.heads": 2,
    "model.ffn": 64,
    "train.steps": 3,
    "train.batch_size": 4,
    "train.eval_batches": 2,
    "train.log_every": 1,
    "train.progress": "false",
}


def words(options: Mapping[str, Any]) -> list[str]:
    """Options as they stand on a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
