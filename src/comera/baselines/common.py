"""What the baselines share: the layers they convert, the report, optimizers, and packages they need."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from comera.convert import LayerRow
from comera.convert.converter import LINEAR
from comera.convert.registry import refusal
from comera.errors import ConfigError, ConversionError
from comera.memory.estimate import MemoryEstimate
from comera.memory.estimate import estimate as estimate_step
from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups
from comera.trainer.config import TrainConfig

T = TypeVar("T", bound=nn.Module)


@dataclass(frozen=True)
class Package:
    """A package that a method needs. method: its name. module: what is imported. name: of the distribution. install:
    the command that installs it."""

    method: str
    module: str
    name: str
    install: str

    @property
    def installed(self) -> bool:
        """Whether the package is installed; imports nothing."""
        return find_spec(self.module) is not None

    def check(self) -> None:
        """Raise ConfigError if the package is not installed; imports nothing."""
        if not self.installed:
            raise self.error("is not installed")

    def error(self, cause: str) -> ConfigError:
        """The error for a package that cannot be used."""
        return ConfigError(
            f"method {self.method} needs the package {self.name}, which {cause}: {self.install}, or take another method"
        )


@dataclass(frozen=True)
class Replaced:
    """What became of the layers that a method replaced. rows: of each. dense_total: parameters of the dense model.

    See `smaller_tables_`.
    """

    rows: tuple[LayerRow, ...]
    dense_total: int


@dataclass(frozen=True)
class Applied(Replaced):
    """What a run needs of a method once the model is converted. optimizer, after_step: members of a task
    (`comera.trainer.task.Task`). state_bytes: size of the optimizer's state; None: two moments for each trained
    parameter.

    See `apply_method_`.
    """

    optimizer: Callable[[TrainConfig], Optimizer]
    after_step: Callable[[int], object] = lambda step: None
    state_bytes: int | None = None

    def estimate(self, model: nn.Module, loss: Callable[[], Tensor]) -> MemoryEstimate:
        """Memory and FLOPs of a step: `comera.memory.estimate.estimate` with this method's optimizer."""
        estimate = estimate_step(model, loss)
        return estimate if self.state_bytes is None else replace(estimate, optimizer=self.state_bytes)


@dataclass(frozen=True)
class Baseline:
    """Base of the settings of a baseline. package: what must be installed. dense_layers: whether the model keeps its
    dense layers. rate: of what replaces the linear weights, as a multiple of the dense learning rate; None: the
    learning rates of comera.

    Example:
        >>> import torch
        >>> from comera.baselines import LTE, Baseline
        >>> def trained(baseline: Baseline) -> int:
        ...     model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        ...     applied = baseline.apply_(model, skip=["1"])  # the head stays as it is
        ...     return sum(p.numel() for p in model.parameters() if p.requires_grad)
        >>> trained(LTE(heads=2, rank=4))  # heads and both biases, and the head's weight
        1608
    """

    package: ClassVar[Package | None] = None
    dense_layers: ClassVar[bool] = False
    rate: ClassVar[float | None] = None

    def apply_(self, model: nn.Module, skip: Sequence[str] = ()) -> Applied:
        """Convert a dense model in place; skip: glob patterns of layers to leave as they are."""
        raise NotImplementedError


def linear_layers(model: nn.Module, skip: Sequence[str] = ()) -> dict[str, nn.Linear]:
    """The layers that a baseline converts, by name: linear layers with a weight of their own. Left as they are: layers
    that share a weight (an output head tied to the embedding), subclasses of `nn.Linear`, other projects'
    parametrizations, and names that match a glob pattern in `skip`. Raises ConversionError if none remains."""
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
            f"and whose weight is not tied, got none besides those that are skipped ({', '.join(skip) or '-'})"
        )
    return found


def convert_linear_(
    model: nn.Module, skip: Sequence[str], make: Callable[[nn.Linear], T], note: Callable[[T], str]
) -> tuple[LayerRow, ...]:
    """Replace linear layers in place, wherever they are registered; returns what became of each. make: the new layer,
    which inherits the train mode. note: for the report. Layers and errors: see `linear_layers`."""
    layers = linear_layers(model, skip)
    new: dict[nn.Module, T] = {layer: make(layer) for layer in layers.values()}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and child in new:
                module._modules[name] = new[child].train(child.training)
    rows = []
    for name, layer in layers.items():
        stored = elements(p for key, p in new[layer].named_parameters() if key != "bias")
        rows.append(layer_row(name, new[layer], stored, layer.weight.numel(), note(new[layer])))
    return tuple(rows)


def layer_row(name: str, after: nn.Module, stored: int, dense: int, note: str) -> LayerRow:
    """The report's row for a linear layer that became `after`; stored, dense: elements of its weight now and before."""
    return LayerRow(name, nn.Linear.__name__, type(after).__name__, None, dense, stored, None, note)


def elements(tensors: Iterable[Tensor]) -> int:
    """Elements of tensors, each tensor counted once."""
    return sum(p.numel() for p in dict.fromkeys(tensors))


def split_groups(model: nn.Module, own: Iterable[nn.Parameter], name: str, config: TrainConfig) -> list[dict[str, Any]]:
    """Parameter groups: first `own`, as the group `name` at `core_lr` (default: `lr`) with weight decay; then the other
    parameters as in `param_groups`. Parameters that are not trained are in no group."""
    chosen = dict.fromkeys(p for p in own if p.requires_grad)
    rate = config.lr if config.core_lr is None else config.core_lr
    groups: list[dict[str, Any]] = [
        {"name": name, "params": list(chosen), "lr": rate, "weight_decay": config.weight_decay}
    ]
    for group in param_groups(model, lr=config.lr, weight_decay=config.weight_decay):
        groups.append({**group, "params": [p for p in group["params"] if p not in chosen]})
    return [group for group in groups if group["params"]]


def adamw(model: nn.Module, own: Iterable[nn.Parameter], name: str) -> Callable[[TrainConfig], Optimizer]:
    """Makes fused AdamW, as for the dense and the compressed model, over `split_groups`."""
    return lambda config: AdamW(split_groups(model, own, name, config), betas=config.betas, fused=True)
