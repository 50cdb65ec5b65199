"""What the baselines share: which layers they take, how they report them, and what a run needs of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from comera.convert import LayerRow
from comera.convert.registry import LINEAR, refusal
from comera.errors import ConfigError, ConversionError
from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups
from comera.trainer.config import TrainConfig
from comera.trainer.memory import MemoryEstimate
from comera.trainer.memory import estimate as estimate_step

# Method: module, package, how to install it. GaLore's plain AdamW needs torch and transformers, but no bitsandbytes.
_PACKAGES = {
    "galore": ("galore_torch", "galore-torch", "pip install --no-deps galore-torch"),
    "tensorly": ("tltorch", "tensorly-torch", "pip install tensorly tensorly-torch opt_einsum"),
}


def _nothing(step: int) -> None:
    """What a method without periodic work does after a step."""


@dataclass(frozen=True)
class Applied:
    """What a run needs of a method once the model is converted.

    rows: what became of each layer; dense_total: numbers of the dense original.
    optimizer, after_step: the optional members of a task (`comera.trainer.task.Task`).
    state_bytes: of the optimizer's state; None: two moments for each trained number.
    """

    rows: tuple[LayerRow, ...]
    dense_total: int
    optimizer: Callable[[TrainConfig], Optimizer]
    after_step: Callable[[int], object] = _nothing
    state_bytes: int | None = None

    def estimate(self, model: nn.Module, loss: Callable[[], Tensor]) -> MemoryEstimate:
        """Memory and FLOPs of a step, as `comera.trainer.memory.estimate` with this method's optimizer."""
        estimate = estimate_step(model, loss)
        return estimate if self.state_bytes is None else replace(estimate, optimizer=self.state_bytes)


def linears(model: nn.Module, skip: Sequence[str] = ()) -> dict[str, nn.Linear]:
    """The layers that a baseline changes, by their first name: linear ones whose weight is theirs alone.

    Those that share a weight (an output head tied to the embedding), subclasses of `nn.Linear` and those of other
    projects' parametrisations stay as they are; skip: glob patterns of names to leave out.
    Raises ConversionError when none is left.
    """
    owners = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    found = {
        name: module
        for name, module in model.named_modules()
        if name
        and type(module) is nn.Linear
        and refusal(module, LINEAR) is None
        and owners[module.get_parameter("weight")] == 1
        and not any(fnmatchcase(name, pattern) for pattern in skip)
    }
    if not found:
        raise ConversionError(
            f"nothing to convert in {type(model).__name__}: expected layers inside it whose type is exactly nn.Linear "
            f"and whose weight is tied to no other, got none besides those that are skipped ({', '.join(skip) or '-'})"
        )
    return found


def swap_(model: nn.Module, layers: Mapping[nn.Module, nn.Module]) -> None:
    """Put new modules in the place of old ones, wherever they are registered; the train mode moves along."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and child in layers:
                module._modules[name] = layers[child].train(child.training)


def row(name: str, after: nn.Module, stored: int, dense: int, note: str) -> LayerRow:
    """A line of the report on a linear layer that became `after`; stored, dense: numbers of its weight now, before."""
    return LayerRow(name, nn.Linear.__name__, type(after).__name__, None, dense, stored, None, note)


def numbers(parameters: Iterable[Tensor]) -> int:
    """Numbers in tensors, each of them once."""
    return sum(p.numel() for p in dict.fromkeys(parameters))


def groups(model: nn.Module, own: Iterable[nn.Parameter], name: str, config: TrainConfig) -> list[dict[str, Any]]:
    """Parameter groups: `own` as a group `name` with the rate `core_lr` (`lr` if left out), decayed, then the others
    as in `param_groups`; parameters that are not trained are in none."""
    chosen = dict.fromkeys(p for p in own if p.requires_grad)
    rate = config.lr if config.core_lr is None else config.core_lr
    made: list[dict[str, Any]] = [
        {"name": name, "params": list(chosen), "lr": rate, "weight_decay": config.weight_decay}
    ]
    for group in param_groups(model, lr=config.lr, weight_decay=config.weight_decay):
        made.append({**group, "params": [p for p in group["params"] if p not in chosen]})
    return [group for group in made if group["params"]]


def adamw(groups: list[dict[str, Any]], config: TrainConfig) -> Optimizer:
    """Fused AdamW, as for the dense and the compressed model."""
    return AdamW(groups, betas=config.betas, fused=True)


def require(good: bool, field: str, expected: str, came: object) -> None:
    """Raise ConfigError for a setting out of range."""
    if not good:
        raise ConfigError(f"{field} must be {expected}, got {came!r}")


def whole(value: object, least: int) -> bool:
    """Whether a setting is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_installed(method: str) -> None:
    """Raise ConfigError for a method whose package is not installed; imports nothing."""
    if method in _PACKAGES and find_spec(_PACKAGES[method][0]) is None:
        raise missing(method, "is not installed")


def missing(method: str, cause: str) -> ConfigError:
    """The error for a method whose package cannot be used."""
    _, package, install = _PACKAGES[method]
    return ConfigError(f"method {method} needs the package {package}, which {cause}: {install}, or take another method")
