"""What Python can see of a model between two steps: a replay, which runs no Python, is right only while that stays.

    modules    their attributes (modes, probabilities, hooks, parameters and buffers by name), the containers and plain
               objects among them, such as a config, and their classes' forward
    the loss   what it reads by name: its closure, globals, and attributes of the object that it is a method of
    tensors    memory, sizes, strides, dtype, requires_grad and hooks of parameters and buffers
    torch      gradients, autocast, threads, default dtype, hooks of all modules

A comparison is one of dictionaries with their copies, in C, where what is identical is equal: about a microsecond for a
module. What it does not look into (an object inside of an object, the globals of a function that the loss calls) is
left to the comparison of replays with steps (cpu.py).
"""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from operator import attrgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

DEPTH, LONG = 3, 10_000  # containers inside of containers that are looked into, and the most items of one
_PLAIN = (bool, int, float, str, bytes, tuple, type(None), torch.dtype, torch.device)
_FORWARD = attrgetter("forward")
_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


class Picture:
    """Of a model, its loss and its optimizer as they are; called, it says what has changed since, "" for nothing.

    whole: whether the optimizer's step is a part of what is replayed. more: what else that reads.
    leaves: what may have gradients. buffers: of the model's modules, and of those that the loss reads.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: object,
        optimizer: Optimizer,
        *,
        whole: bool = False,
        more: Callable[[], object] = lambda: None,
    ) -> None:
        self._loss, self._read, self._more, self._rest = loss, _read_by(loss), more, more()
        roots = {"": model, **{name: each for name, each in self._read.items() if isinstance(each, nn.Module)}}
        modules: dict[nn.Module, str] = {}
        for root, each in roots.items():
            for name, module in each.named_modules():
                modules.setdefault(module, f"{root}.{name}".strip("."))
        groups = optimizer.param_groups
        trained = chain.from_iterable(group["params"] for group in groups)
        self.leaves = _tensors([*(module._parameters for module in modules), dict(enumerate(trained))])
        self.buffers = _tensors(module._buffers for module in modules)
        self.tensors = list(dict.fromkeys([*self.leaves, *self.buffers]))

        self._names: list[str] = []
        self._live: list[Any] = []  # containers that are not empty, and their copies
        self._copies: list[Any] = []
        self._empty: dict[str, Any] = {}
        self._single: list[tuple[Any, Any, Tensor]] = []  # whose comparison says whether values are equal
        self._known: set[int] = set()
        for module, name in modules.items():
            self._add(name, vars(module))
        for name, value in self._read.items():
            self._look_into(name, value, 1)
        if whole:
            self._add("optimizer", vars(optimizer))
        for name, value in (("groups", groups), *(("parameters", group["params"]) for group in groups)):
            self._look_into(f"optimizer's {name}", value, DEPTH)
        for name, value in vars(nn.modules.module).items():
            if name.startswith("_global_"):
                self._look_into(name, value, DEPTH)
        for hooks in chain.from_iterable(map(_HOOKS, self.leaves)):
            self._look_into("hooks of a parameter", hooks, DEPTH)

        self._classes = list(dict.fromkeys(map(type, modules)))
        self._forwards = list(map(_FORWARD, self._classes))
        self._guards = torch._C._dynamo.guards.TensorGuards(
            *self.tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
        self._addresses, self._hooks = list(map(Tensor.data_ptr, self.tensors)), list(map(_HOOKS, self.leaves))
        self._settings = _settings()

    def _look_into(self, name: str, value: Any, depth: int) -> None:
        """Watch a container, and one that an object's attributes are; `depth` containers hold it."""
        if isinstance(value, Tensor | ModuleType):
            return
        if isinstance(value, dict | list):
            if len(value) <= LONG:
                self._add(name, value, depth)
        elif depth == 1 and hasattr(value, "__dict__") and not callable(value):
            self._add(name, vars(value), depth)

    def _add(self, name: str, container: Any, depth: int = 0) -> None:
        if id(container) in self._known:
            return
        self._known.add(id(container))
        if not container:
            self._empty[name] = container
            return
        self._names.append(name)
        self._live.append(container)
        self._copies.append(dict(container) if isinstance(container, dict) else list(container))
        for key, value in _items(container):
            if isinstance(value, Tensor) and value.numel() == 1:
                self._single.append((container, key, value))
            elif depth < DEPTH:
                self._look_into(_join(name, key), value, depth + 1)

    def __call__(self) -> str:
        try:
            same = (
                self._live == self._copies
                and not any(self._empty.values())
                and all(container[key] is value for container, key, value in self._single)
                and self._guards.check(*self.tensors)
                and list(map(Tensor.data_ptr, self.tensors)) == self._addresses
                and list(map(_HOOKS, self.leaves)) == self._hooks
                and list(map(_FORWARD, self._classes)) == self._forwards
                and _settings() == self._settings
                and self._more() == self._rest
            )
            read = _read_by(self._loss)
            same = same and len(read) == len(self._read) and all(_same(self._read[name], read[name]) for name in read)
        except Exception:  # two tensors that are not the same, for one, have no answer
            same = False
        return "" if same else self._difference()

    def _difference(self) -> str:
        """What has changed, in words."""
        for name, live, copy in zip(self._names, self._live, self._copies, strict=True):
            now, then = dict(_items(live)), dict(_items(copy))
            for key in [*then, *(key for key in now if key not in then)]:
                if key not in now or key not in then or not _same(now[key], then[key]):
                    return _join(name, key)
        for name, container in self._empty.items():
            if container:
                return name
        read = _read_by(self._loss)
        for name in {**self._read, **read}:
            if name not in read or name not in self._read or not _same(read[name], self._read[name]):
                return name
        if _settings() != self._settings:
            return "a setting of torch"
        if list(map(_FORWARD, self._classes)) != self._forwards:
            return "the forward of a class"
        if self._more() != self._rest:
            return "an option of the step, or the stage of the rank controller"
        return "memory, sizes, requires_grad or hooks of a parameter or buffer"


def _read_by(loss: Any) -> dict[str, Any]:
    """What a loss reads by name, as it is now."""
    read: dict[str, Any] = {}
    while isinstance(loss, partial):
        read |= {**{f"argument {k}": value for k, value in enumerate(loss.args)}, **loss.keywords}
        loss = loss.func
    attributes: Mapping[str, Any] = {}
    if isinstance(loss, MethodType):
        attributes, loss = getattr(loss.__self__, "__dict__", {}), loss.__func__
    if not isinstance(loss, FunctionType):
        return {**read, "the loss": loss}
    code, cells = loss.__code__, loss.__closure__ or ()
    for names in (loss.__globals__, attributes):
        read |= {name: names[name] for name in code.co_names if name in names}
    read |= {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    return {**read, **(loss.__kwdefaults__ or {}), "defaults": loss.__defaults__}


def _settings() -> tuple[object, ...]:
    """What decides on operations and results besides."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    gradients = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()
    kernels = torch.get_num_threads(), torch.get_default_dtype(), os.environ.get("COMERA_KERNELS")
    return *gradients, *autocast, *kernels


def _join(name: str, key: object) -> str:
    return f"{name}.{key}".strip(".") if isinstance(key, str | int) else name


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _tensors(containers: Iterable[Mapping[Any, Tensor | None]]) -> list[Tensor]:
    found = dict.fromkeys(chain.from_iterable(container.values() for container in containers))
    return [tensor for tensor in found if tensor is not None]


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or plain ones that are equal."""
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other))
