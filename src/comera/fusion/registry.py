"""The registry of blocks that `fuse_` can replace parts of, known by their code (same_code.py)."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cached_property
from importlib import import_module
from inspect import Parameter, Signature, signature
from types import MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

from comera.errors import ConversionError
from comera.fusion.merge_cache import MergeCache
from comera.fusion.same_code import Code, code_of, forget, original
from comera.kernels.tracing import traced


class BlockPattern(ABC):
    """Describes a part that can be fused in one type of module, by the names of its submodules.

    Example:
        >>> import torch
        >>> from comera.fusion import BlockPattern, fuse_, register_block
        >>> class Scaled(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x * 3) * 2
        >>> class Once(BlockPattern):
        ...     kind, method = "scale", "forward"
        ...     def obstacle(self, module):
        ...         return None
        ...     def run(self, module, cache, x):
        ...         return x * 6
        >>> register_block(Scaled, Once())
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), Scaled())
        >>> fuse_(model).fused("scale")
        ('1',)
    """

    kind: str
    """The kind of part, for the report: "mlp", "qkv", "residual norm", "embedding norm", "norm", "pre-norm"."""
    method: str
    """The method of the module that computes the part."""
    whole: bool = True
    """Whether the part also depends on what the method calls: functions of its file and methods of its class."""
    replaced: bool = False
    """Whether none of the method's code runs, so that nothing may be wrapped around it."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the module's attributes that the method reads: all names among the fields of the pattern."""
        own: list[str] = [field.name for field in fields(self)] if is_dataclass(self) else []
        leaves = tree_leaves([getattr(self, name) for name in own if name != "method"])
        found = (leaf.names if isinstance(leaf, BlockPattern) else (leaf,) for leaf in leaves)
        return tuple(name for names in found for name in names if isinstance(name, str))

    @abstractmethod
    def obstacle(self, module: nn.Module) -> str | None:
        """Why the part of this module cannot be fused; None if it can."""

    def fused_kind(self, module: nn.Module) -> str:
        """The kind of part in this module, where that depends on its layers."""
        return self.kind

    @abstractmethod
    def run(self, module: nn.Module, cache: MergeCache, /, *args: Any, **kwargs: Any) -> Any:
        """The result of the method, computed as one operation."""

    def run_plain(self, module: "nn.Module | StandIn", /, *args: Any, **kwargs: Any) -> Any:
        """The result of the method of the module's own class; also for a stand-in."""
        return getattr(own_type(module), self.method)(module, *args, **kwargs)


_CALL = nn.Module.__call__
_GLOBAL_HOOKS = tuple(
    getattr(torch_module, f"_global_{kind}_hooks") for kind in ("forward_pre", "forward", "backward_pre", "backward")
)


def all_calls_are_seen() -> bool:
    """Whether the calls of all modules are observed, by torch's global hooks or by another `nn.Module.__call__`.

    torch's counter of FLOPs does not count: it follows the calls, and changes nothing.
    """
    if nn.Module.__call__ is not _CALL:
        return True
    owners = (getattr(hook, "__self__", None) for hooks in _GLOBAL_HOOKS if hooks for hook in hooks.values())
    return any(type(owner).__module__ != "torch.utils.module_tracker" for owner in owners)


class Fused:
    """A fused method, as an attribute of the module instance in place of its class's method.

    It refers to the module, the pattern and the cache, so in a copy or a pickle of the model it refers to the copies.
    """

    def __init__(self, module: nn.Module, pattern: BlockPattern, cache: MergeCache) -> None:
        self.module, self.pattern, self.cache = module, pattern, cache
        own = signature(MethodType(getattr(type(module), pattern.method), module))  # callers inspect it
        plain = [p.replace(annotation=Parameter.empty) for p in own.parameters.values()]
        self.__signature__ = Signature(plain)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.module, *args, **kwargs)

    def run(self, module: "nn.Module | StandIn", /, *args: Any, **kwargs: Any) -> Any:
        """The result of the method for the module or its stand-in.

        The method of the class runs instead if its code has changed, while the calls of all modules are observed, and
        for nested tensors, which have no plain shape.
        """
        nested = any(isinstance(given, Tensor) and given.is_nested for given in (*args, *kwargs.values()))
        if nested or not (traced() or (self._is_known() and not all_calls_are_seen())):
            return self.pattern.run_plain(module, *args, **kwargs)
        return self.pattern.run(module, self.cache, *args, **kwargs)  # type: ignore[arg-type]

    def _is_known(self) -> bool:
        pattern = self.pattern
        return any(type(each) is type(pattern) and each.method == pattern.method for each in patterns_of(self.module))


class StandIn:
    """Stands in for a module during one call of its forward, with some of its attributes replaced.

    So the model's own code runs as it is, and nothing of this call outlives it or is seen by another thread.
    """

    def __init__(self, module: nn.Module, replaced: Mapping[str, Any]) -> None:
        vars(self).update(replaced, _module=module)

    @classmethod
    def of(cls, module: nn.Module, replaced: Mapping[str, Any]) -> "StandIn":
        """A stand-in with attributes such as "output.dense" replaced, by stand-ins for what is around them."""
        direct = {name: value for name, value in replaced.items() if "." not in name}
        for around in dict.fromkeys(name.partition(".")[0] for name in replaced if "." in name):
            inside = {name.partition(".")[2]: replaced[name] for name in replaced if name.startswith(f"{around}.")}
            direct[around] = cls.of(getattr(module, around), inside)
        return cls(module, direct)

    @property
    def forward(self) -> Any:
        """The module's. Layers of transformers look for one at the type of what they are called with."""
        return self._module.forward

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(fused := self._module.forward, Fused):
            return fused.run(self, *args, **kwargs)
        return own_type(self).forward(self, *args, **kwargs)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


class Instead:
    """Stands in for a layer in one call of its module: it computes something else, and looks like the layer."""

    def __init__(self, layer: Any, run: Callable[[Any], Any]) -> None:
        self._layer, self._run = layer, run

    def __call__(self, input: Any) -> Any:
        return self._run(input)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def own_type(module: nn.Module | StandIn) -> type[nn.Module]:
    """The type of a module, or of that for which it stands in."""
    while isinstance(module, StandIn):
        module = module._module
    return type(module)


# --- what is known ----------------------------------------------------------------------------------------------------


class Inner(BlockPattern):
    """Nothing that is fused by itself, but known code, which patterns of the module that holds it may go through, as
    "intermediate.dense" does."""

    kind = "inner"
    method = "forward"

    def obstacle(self, module: nn.Module) -> str | None:
        return None

    def run(self, module: nn.Module, cache: MergeCache, /, *args: Any, **kwargs: Any) -> Any:
        return self.run_plain(module, *args, **kwargs)


class Known(NamedTuple):
    """A pattern for a type of module, and the code that it is for.

    own: whether the user registered it. reason: why it does not hold for this code; None if it does.
    """

    pattern: BlockPattern
    code: Code
    own: bool
    reason: str | None = None


class _Entry(NamedTuple):
    patterns: tuple[BlockPattern, ...]
    methods: Mapping[str, Any] | None
    """Those of a type, when it was registered; None for a name, whose code is what its library ships."""


_REGISTERED: dict[type[nn.Module] | str, _Entry] = {}
_known: dict[type[nn.Module], tuple[Known, ...]] = {}


def register_block(module_type: type[nn.Module] | str, *patterns: BlockPattern) -> None:
    """Let `fuse_` fuse modules of a type, and of others whose methods are the same code: subclasses that leave them as
    they are, and copies under other names.

    Layers may read their input later than the code says. What it writes in place before is an error, and in inference
    mode, where torch counts no writes, not seen.

    Args:
        module_type: the type, or "module.path.ClassName" for one that is not imported yet.
        patterns: what can be fused in it: `MLP`, `QKV`, `ResidualNorm`, `PostNorm`, `EmbeddingNorm`, `RMSNorm`,
            `PreNorm`. They replace those registered before.

    Raises:
        ConversionError: for what is not a type of module, or has no method of a pattern's name.

    Example:
        >>> import torch, comera
        >>> from comera.fusion import MLP, register_block
        >>> class FeedForward(torch.nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.up, self.act = torch.nn.Linear(width, 4 * width), torch.nn.ReLU()
        ...         self.down = torch.nn.Linear(4 * width, width)
        ...     def forward(self, x):
        ...         return self.down(self.act(self.up(x)))
        >>> register_block(FeedForward, MLP("forward", ups=("up",), activation="act", down="down"))
        >>> model = torch.nn.Sequential(FeedForward(64), FeedForward(64))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=4)))
        >>> comera.fuse_(model).fused("mlp")
        ('0', '1')
    """
    methods = None
    if not isinstance(module_type, str):
        if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
            raise ConversionError(f"expected a subclass of nn.Module to register, got {module_type!r}")
        for pattern in patterns:
            if not hasattr(module_type, pattern.method):
                name = module_type.__name__
                raise ConversionError(f"expected a method of {name}, got the name {pattern.method!r}")
        methods = {pattern.method: getattr(module_type, pattern.method) for pattern in patterns}
    _REGISTERED[module_type] = _Entry(patterns, methods)
    _known.clear()


def read_anew() -> None:
    """Look at the code of all modules again."""
    _known.clear()
    forget()


def patterns_of(module: nn.Module) -> tuple[BlockPattern, ...]:
    """The patterns that are registered for the type of a module, or for another one of the same code."""
    return tuple(each.pattern for each in known(type(module)) if each.reason is None)


def known(kind: type[nn.Module]) -> tuple[Known, ...]:
    """The patterns for a type of module, including those whose code has been replaced."""
    found = _known.get(kind)
    if found is None or not all(each.code.is_current() for each in found):
        found = _known[kind] = _find(kind)
    return found


def _find(kind: type[nn.Module]) -> tuple[Known, ...]:
    for registered in (kind, f"{kind.__module__}.{kind.__qualname__}"):
        if (entry := _REGISTERED.get(registered)) is not None:
            return tuple(_checked(kind, pattern, entry) for pattern in entry.patterns)
    best: tuple[Known, ...] = ()
    for registered, entry in list(_REGISTERED.items()):
        best = max(best, tuple(_copied(kind, registered, entry)), key=len)
    return best


def _checked(kind: type[nn.Module], pattern: BlockPattern, entry: _Entry) -> Known:
    """A pattern for the type that it was registered for."""
    code = code_of(kind, pattern.method, whole=pattern.whole)
    if entry.methods is None:
        return Known(pattern, code, False, code.changed_whole if pattern.replaced else code.changed)
    same = entry.methods[pattern.method] is getattr(kind, pattern.method, None)
    return Known(pattern, code, True, None if same else f"its {pattern.method} is not the one that was registered")


def _copied(kind: type[nn.Module], registered: type[nn.Module] | str, entry: _Entry) -> Iterator[Known]:
    """The patterns of a registered type that are for the code of another one, too."""
    for pattern in entry.patterns:
        code = code_of(kind, pattern.method, whole=pattern.whole)
        known_names = code.names | (original(kind, pattern.method).names if code.changed else set())
        named = all(name.partition(".")[0] in known_names for name in pattern.names)
        other = registered
        if named and isinstance(registered, str):
            path, _, name = registered.rpartition(".")
            other = getattr(resolved(path, kind.__module__), name, "")
        if named and isinstance(other, type):
            reference = _checked(other, pattern, entry)
            if reference.reason is None and code.content == reference.code.content:
                yield Known(pattern, code, reference.own)
            elif code.changed and original(kind, pattern.method).content == original(other, pattern.method).content:
                yield Known(pattern, code, False, code.changed)


def resolved(path: str, user: str) -> ModuleType | None:
    """A module of a library by its name. It is imported for another module of that library alone."""
    if path not in sys.modules and path.partition(".")[0] == user.partition(".")[0]:
        with suppress(ImportError):
            import_module(path)
    return sys.modules.get(path)
