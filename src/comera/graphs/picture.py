"""What Python can see of a model between two steps: a replay, which runs no Python, is right only while that stays.

    modules  wherever they are found: attributes (modes, probabilities, hooks, parameters and buffers by name)
    objects  among attributes, such as a config or what is called, and containers: `DEPTH` levels, one inside of another
    classes  of modules, and own ones: attributes and methods
    code     of the loss, and own code that it or a module calls: closures, defaults, and by name globals, attributes of
             files, and those of the object that the loss is a method of
    tensors  memory, sizes, strides, dtype and requires_grad of all that are found, hooks of parameters and buffers
    torch    gradients, autocast, threads, default dtype, hooks of all modules

Own is what no library in `_LIBRARIES` has, and the file of the loss. Of a class, code is followed from methods that
followed code names; of the object that the loss is a method of, only what it names is compared: such an object may be
a whole trainer, with counters.

A comparison is one of dictionaries with their copies, in C, where what is identical is equal: about a microsecond for a
module. Not seen are: iterators, files, random numbers of Python's; globals that code of libraries reads; what is deeper
than `DEPTH`, in containers of more than `LONG` items, or in objects without `__dict__` (slots, queues, arrays); names
that are made or imported as code runs; in a container or an object, an equal value of another type. That is left to the
comparison of replays with steps (cpu.py).
"""

import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dis import get_instructions
from functools import cache, partial
from itertools import chain
from logging import Logger
from operator import attrgetter, is_
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.fusion.merge_cache import MergeCache
from comera.fusion.same_code import held_by

DEPTH, LONG = 3, 10_000  # containers and objects inside of each other that are looked into, and the most items of one
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_LIBRARIES = {*sys.stdlib_module_names, "comera", "torch", "transformers", "accelerate", "numpy", "_pytest"}
_NOT_READ = ModuleType, Logger, MergeCache  # a cache is forgotten before each step
_NOT_CALLED = {"__init__", "__new__", "__post_init__", "__repr__"}  # unless they are named
_ABSENT = object()
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
        self._more, self._rest = more, more()
        self._names: list[str] = []
        self._live: list[Any] = []  # containers that are not empty, and their copies
        self._copies: list[Any] = []
        self._empty: dict[tuple[str, int], Any] = {}
        self._single: list[tuple[Any, Any, Tensor]] = []  # whose comparison says whether values are equal
        self._read_names: list[str] = []
        self._reads: list[Callable[[], Any]] = []  # what code reads by name, and what that was
        self._found: list[Any] = []

        self._left: deque[tuple[str, Any, int]] = deque()  # to be looked into
        self._known: dict[object, int] = {}  # depths, by ids of what is held by other fields
        self._modules: dict[nn.Module, str] = {}
        self._classes: dict[type, Mapping[str, Any]] = {}
        self._owners: list[Any] = []
        self._named = {"forward", "backward"}  # by code
        self._methods: defaultdict[str, list[tuple[str, Any]]] = defaultdict(list)  # not named so far
        self._tensors: dict[Tensor, None] = {}
        self._file = _file(loss)
        groups = optimizer.param_groups
        self._look_into("", model, 0)
        call = getattr(type(loss), "__call__", None)  # noqa: B004
        if isinstance(call, FunctionType) and not isinstance(loss, nn.Module):
            loss = MethodType(call, loss)
        self._look_into("the loss", loss, 0)
        if whole:
            self._add("optimizer", vars(optimizer))
        for name, value in (("groups", groups), *(("parameters", group["params"]) for group in groups)):
            self._look_into(f"optimizer's {name}", value, DEPTH)
        for name, value in vars(nn.modules.module).items():
            if name.startswith("_global_"):
                self._look_into(name, value, 1)
        self._look_around()

        trained = chain.from_iterable(group["params"] for group in groups)
        self.leaves = _tensors([*(module._parameters for module in self._modules), dict(enumerate(trained))])
        self.buffers = _tensors(module._buffers for module in self._modules)
        self.tensors = list(dict.fromkeys([*self.leaves, *self.buffers]))
        for hooks in chain.from_iterable(map(_HOOKS, self.leaves)):
            self._look_into("hooks of a parameter", hooks, 1)
        self._look_around()
        self._all = list(dict.fromkeys([*self.tensors, *self._tensors]))
        self._guards = torch._C._dynamo.guards.TensorGuards(
            *self._all, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
        self._addresses, self._hooks = list(map(Tensor.data_ptr, self._all)), list(map(_HOOKS, self.leaves))
        self._settings = _settings()

    def _look_around(self) -> None:
        while self._left:
            self._look_into(*self._left.popleft())

    def _look_into(self, name: str, value: Any, depth: int) -> None:
        """Watch a value's insides; `depth` containers and objects hold it."""
        if isinstance(value, Tensor):
            if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
                self._tensors[value] = None
        elif isinstance(value, nn.Module):
            for part, module in value.named_modules():
                if module not in self._modules:
                    self._modules[module] = path = f"{name}.{part}".strip(".")
                    self._add(path, vars(module))
                    self._look_into_class(type(module))
        elif isinstance(value, partial):
            self._left.extend((name, part, depth) for part in (value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            if self._is_own(value):
                self._look_into_owner(value.__self__)
                self._look_into(name, value.__func__, depth)
        elif isinstance(value, staticmethod | classmethod | property):
            self._look_into(name, value.fget if isinstance(value, property) else value.__func__, depth)
        elif isinstance(value, FunctionType):
            if self._is_own(value):
                self._look_into_code(name, value)
        elif isinstance(value, type):
            if self._is_own(value):
                self._look_into_class(value)
        elif isinstance(value, tuple | frozenset):
            self._left.extend((_join(name, key), each, depth + 1) for key, each in enumerate(value) if depth < DEPTH)
        elif isinstance(value, dict | list | set):
            if len(value) <= LONG:
                self._add(name, value, depth)
        elif not isinstance(value, _NOT_READ) and isinstance(getattr(value, "__dict__", None), dict):
            self._add(name, vars(value), depth)
            if self._is_own(type(value)):
                self._look_into_class(type(value))

    def _look_into_class(self, kind: type) -> None:
        for each in kind.__mro__[:-1]:
            if each not in self._classes:
                self._classes[each] = vars(each)
                self._add(each.__name__, self._classes[each], 0 if self._is_own(each) else DEPTH)

    def _look_into_owner(self, owner: Any) -> None:
        """Watch what code names of an object that it is a method of."""
        if isinstance(owner, type):
            self._look_into_class(owner)
        elif not any(owner is each for each in chain(self._modules, self._owners)):
            self._owners.append(owner)
            self._look_into_class(type(owner))
            self._watch_attributes(owner, self._named)

    def _watch_attributes(self, owner: Any, names: Iterable[str]) -> None:
        own, kind = getattr(owner, "__dict__", {}), type(owner)
        spaces = [own, *(own.get(name, {}) for name in ("_parameters", "_buffers", "_modules"))]
        for space in spaces if isinstance(owner, nn.Module) else spaces[:1]:
            for name in names:
                if name in space or (space is own and hasattr(kind, name)):  # it may come to hide that of the class
                    self._watch(name, partial(space.get, name, _ABSENT), (id(space), name))

    def _look_into_code(self, name: str, function: FunctionType) -> None:
        """Watch what a function reads by name, and functions inside of it."""
        for part in ("__code__", "__defaults__", "__kwdefaults__", "__dict__"):
            self._watch(_join(name, part), partial(getattr, function, part), (id(function), part))
        for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._watch(free, partial(held_by, cell), (id(cell), ""))
        outside, attributes = _names(function.__code__)
        spaces = [(function.__globals__, outside)]
        for space, names in spaces:
            is_own = self._is_own(space.get("__name__"))
            for each in sorted(names & space.keys()):
                value = space[each]
                self._watch(each, partial(space.get, each, _ABSENT), (id(space), each), look=is_own)
                if isinstance(value, ModuleType) and all(vars(value) is not other for other, _ in spaces):
                    spaces.append((vars(value), attributes))
        new = sorted(attributes - self._named)
        self._named.update(new)
        for owner in self._owners:
            self._watch_attributes(owner, new)
        for each in new:
            self._left.extend((path, method, 1) for path, method in self._methods.pop(each, ()))

    def _watch(self, name: str, read: Callable[[], Any], key: tuple[int, str], *, look: bool = True) -> None:
        if key in self._known:
            return
        self._known[key] = 0
        value = read()
        self._read_names.append(name)
        self._reads.append(read)
        self._found.append(value)
        if look:
            self._left.append((name, value, 1))

    def _add(self, name: str, container: Any, depth: int = 0) -> None:
        """Watch a container, and what it holds: also where it was found before, but deeper."""
        before = self._known.get(id(container))
        if before is not None and before <= depth:
            return
        self._known[id(container)] = depth
        if before is None and not container:
            self._empty[name, id(container)] = container
        elif before is None:
            self._names.append(name)
            self._live.append(container)
            self._copies.append(_copy(container))
        is_class = isinstance(container, MappingProxyType)
        for key, value in _items(container):
            if isinstance(value, Tensor) and value.numel() == 1 and before is None and not isinstance(container, set):
                self._single.append((container, key, value))
            path = _join(name, key)
            if is_class and isinstance(value, FunctionType | property | staticmethod | classmethod):
                is_named = key in self._named or (key.startswith("__") and key not in _NOT_CALLED)
                if depth < DEPTH and not is_named:
                    self._methods[key].append((path, value))
                    continue
            if depth < DEPTH:
                self._left.append((path, value, depth + 1))

    def _is_own(self, value: Any) -> bool:
        """Whether a class, a function or a file, by its name, is of no library."""
        file = value if isinstance(value, str) else _file(value)
        return file == self._file or file.partition(".")[0] not in _LIBRARIES

    def __call__(self) -> str:
        try:
            same = (
                self._live == self._copies
                and not any(self._empty.values())
                and all(container[key] is value for container, key, value in self._single)
                and self._guards.check(*self._all)
                and list(map(Tensor.data_ptr, self._all)) == self._addresses
                and list(map(_HOOKS, self.leaves)) == self._hooks
                and _settings() == self._settings
                and self._more() == self._rest
            )
            read = [each() for each in self._reads]
            same = same and (all(map(is_, read, self._found)) or all(map(_same, read, self._found)))
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
        for (name, _), container in self._empty.items():
            if container:
                return name
        for name, read, found in zip(self._read_names, self._reads, self._found, strict=True):
            if not _same(read(), found):
                return name
        if _settings() != self._settings:
            return "a setting of torch"
        if self._more() != self._rest:
            return "an option of the step, or the stage of the rank controller"
        return "memory, sizes, requires_grad or hooks of a tensor"


def _file(value: Any) -> str:
    """Where a class, a function, or the class of an object is from."""
    while isinstance(value, partial):
        value = value.func
    return str(getattr(value, "__module__", ""))


@cache
def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """What code, and functions inside of it, name: globals, and attributes."""
    outside, attributes = set(), set(code.co_names)
    for each in get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            outside.add(each.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            outside |= _names(inner)[0]
            attributes |= _names(inner)[1]
    return outside, attributes


def _settings() -> tuple[object, ...]:
    """What decides on operations and results besides."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    gradients = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()
    kernels = torch.get_num_threads(), torch.get_default_dtype(), os.environ.get("COMERA_KERNELS")
    return *gradients, *autocast, *kernels


def _join(name: str, key: object) -> str:
    return f"{name}.{key}".strip(".") if isinstance(key, str | int) else name


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict | MappingProxyType) else enumerate(container)


def _copy(container: Any) -> Any:
    if isinstance(container, dict | MappingProxyType):
        return dict(container)
    return set(container) if isinstance(container, set) else container[:]


def _tensors(containers: Iterable[Mapping[Any, Tensor | None]]) -> list[Tensor]:
    found = dict.fromkeys(chain.from_iterable(container.values() for container in containers))
    return [tensor for tensor in found if tensor is not None]


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or plain ones that are equal."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, _PLAIN) and bool(one == other)
