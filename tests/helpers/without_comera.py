"""Runs a torch.export program in a fresh process that can import neither comera nor transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from .fresh_python import run_fresh

_SCRIPT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("comera", "transformers"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
import torch

program, inputs, outputs = sys.argv[1:]
module = torch.export.load(program).module()
results = [module(*args, **kwargs) for args, kwargs in torch.load(inputs)]
torch.save(results, outputs)
print(sorted(name for name in ("comera", "transformers") if name in sys.modules))
"""


def run_without_comera(program: Path, batches: Sequence[Sequence[Tensor] | Mapping[str, Tensor]]) -> list[Any]:
    """The program's outputs for each batch, which is a list of arguments or a mapping from their names."""
    calls = [((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {}) for batch in batches]
    with TemporaryDirectory() as place:
        inputs, outputs = f"{place}/inputs.pt", f"{place}/outputs.pt"
        torch.save(calls, inputs)
        shown = run_fresh(_SCRIPT, str(program), inputs, outputs)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout == "[]\n"
        results: list[Any] = torch.load(outputs)
    return results
