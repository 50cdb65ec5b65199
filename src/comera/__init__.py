"""CoMERA for PyTorch: rank-adaptive tensor-compressed training.

Names are imported on first use (PEP 562), so that `comera --help` does not wait for torch; type checkers and editors
read them in `__init__.pyi`.
"""

from importlib import import_module
from typing import Any

from comera._version import __version__ as __version__

# public name -> module that defines it
_HOMES = {
    "TT": "convert",
    "TTM": "convert",
    "ComeraError": "errors",
    "EarlyStage": "rank.objective",
    "LateStage": "rank.objective",
    "RankController": "rank.controller",
    "TTMSpec": "tt.spec",
    "TTSpec": "tt.spec",
    "TensorizeConfig": "convert",
    "fuse_": "fusion.fuse",
    "load_pretrained": "pretrained",
    "materialize_": "convert",
    "model_size": "rank.size",
    "param_groups": "optim.param_groups",
    "recompute_": "recompute.blocks",
    "round_": "rank.budget",
    "save_pretrained": "pretrained",
    "tensorize_": "convert",
}
_ROOMS = frozenset({"convert", "fusion", "nn", "optim", "rank", "recompute", "tt"})  # as in comera.nn.TTLinear

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"comera.{_HOMES[name]}"), name)
    elif name in _ROOMS:
        value = import_module(f"comera.{name}")
    else:
        raise AttributeError(f"module 'comera' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES, *_ROOMS]
