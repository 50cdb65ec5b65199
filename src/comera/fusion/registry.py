"""The blocks that `fuse_` knows: one registry, by type of module or by its code, of what it can replace in them."""

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from inspect import Parameter, Signature, signature
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from comera.errors import ConversionError
from comera.fusion.merge_cache import MergeCache
from comera.fusion.same_code import same_code
from comera.nn.adapted import Adapted
from comera.nn.linear import TTLinear


class BlockPattern(ABC):
    """How one type of module holds a part that can be fused, by the names of its submodules.

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
    """What the part is, for the report: "mlp", "qkv", "residual norm", "embedding norm", "norm", "pre-norm"."""
    method: str
    """The method of the module that computes the part."""
    whole: bool = True
    """Whether the part depends on what the method calls, too: functions of its file and methods of its class."""

    @abstractmethod
    def obstacle(self, module: nn.Module) -> str | None:
        """Why the part of this module cannot be fused; None if it can."""

    def fused_kind(self, module: nn.Module) -> str:
        """What is fused in this module, where that depends on its layers."""
        return self.kind

    @abstractmethod
    def run(self, module: nn.Module, cache: MergeCache, *args: Any, **kwargs: Any) -> Any:
        """What the method returns, computed as one operation."""

    def run_plain(self, module: "nn.Module | StandIn", *args: Any, **kwargs: Any) -> Any:
        """What the method of the module's own class returns; also for what stands in for the module."""
        return getattr(own_type(module), self.method)(module, *args, **kwargs)


class Fused:
    """A fused method, as an attribute of the module instance in place of its class's method.

    It refers to the module, the pattern and the cache, so in a copy or a pickle of the model it refers to the copies.
    """

    def __init__(self, module: nn.Module, pattern: BlockPattern, cache: MergeCache) -> None:
        self.module, self.pattern, self.cache = module, pattern, cache
        own = signature(MethodType(getattr(type(module), pattern.method), module))  # callers look at it
        plain = [p.replace(annotation=Parameter.empty) for p in own.parameters.values()]
        self.__signature__ = Signature(plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(given, Tensor) and given.is_nested for given in (*args, *kwargs.values())):
            return self.pattern.run_plain(self.module, *args, **kwargs)  # it has no shape to ask for
        return self.pattern.run(self.module, self.cache, *args, **kwargs)


class StandIn:
    """Stands in for a module during one call of its forward, with some of its attributes replaced.

    So the model's own code runs as it is, and nothing of this call outlives it or is seen by another thread.
    """

    def __init__(self, module: nn.Module, replaced: Mapping[str, Any]) -> None:
        vars(self).update(replaced, _module=module)

    @property
    def forward(self) -> Any:
        """The module's. Layers of transformers look for one at the type of what they are called with."""
        return self._module.forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def own_type(module: nn.Module | StandIn) -> type[nn.Module]:
    """The type of a module, or of that for which it stands in."""
    while isinstance(module, StandIn):
        module = module._module
    return type(module)


def passed_on(input: Tensor) -> Tensor:
    """In place of a layer whose work another one does: its input."""
    return input


_REGISTERED: dict[type[nn.Module] | str, tuple[BlockPattern, ...]] = {}
_found: WeakKeyDictionary[type[nn.Module], tuple[BlockPattern, ...]] = WeakKeyDictionary()  # what was looked for
_WORD = re.compile("[A-Z][a-z0-9]*")


def register_block(module_type: type[nn.Module] | str, *patterns: BlockPattern) -> None:
    """Let `fuse_` fuse modules of a type, and of others whose methods are the same code: subclasses that leave them as
    they are, and copies under a name that ends with the same word.

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
    if not isinstance(module_type, str):
        if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
            raise ConversionError(f"expected a subclass of nn.Module to register, got {module_type!r}")
        for pattern in patterns:
            if not hasattr(module_type, pattern.method):
                name = module_type.__name__
                raise ConversionError(f"expected a method of {name}, got the name {pattern.method!r}")
    _REGISTERED[module_type] = patterns
    _found.clear()


def patterns_of(module: nn.Module) -> tuple[BlockPattern, ...]:
    """The patterns that are registered for the type of a module, else for one that computes by the same code."""
    kind = type(module)
    if kind not in _found:
        _found[kind] = _find(kind)
    return _found[kind]


def _find(kind: type[nn.Module]) -> tuple[BlockPattern, ...]:
    for registered in (kind, f"{kind.__module__}.{kind.__qualname__}"):
        if registered in _REGISTERED:
            return _REGISTERED[registered]
    best: tuple[BlockPattern, ...] = ()
    for registered, patterns in list(_REGISTERED.items()):
        if (other := _like(kind, registered)) is not None:
            same = tuple(each for each in patterns if same_code(kind, other, each.method, whole=each.whole))
            best = max(best, same, key=len)
    return best


def _like(kind: type[nn.Module], registered: type[nn.Module] | str) -> type | None:
    """A registered type, where its name ends with the same word. Modules of transformers are imported for another one
    of transformers alone."""
    path, _, name = (registered if isinstance(registered, str) else registered.__name__).rpartition(".")
    if _WORD.findall(name)[-1:] != _WORD.findall(kind.__name__)[-1:]:
        return None
    if isinstance(registered, type):
        return registered
    if path not in sys.modules and path.partition(".")[0] == kind.__module__.partition(".")[0]:
        with suppress(ImportError):
            import_module(path)
    return getattr(sys.modules.get(path), name, None)


def layers_obstacle(
    module: nn.Module, names: tuple[str, ...], kinds: tuple[type[nn.Module], ...] = (TTLinear,)
) -> str | None:
    """Why these layers of a module, all of one of these kinds, cannot be computed without being called one by one; None
    if they can."""
    first = type(submodule(module, names[0]))
    expected = first if first in kinds else kinds[0]
    for name in names:
        layer = submodule(module, name)
        if isinstance(layer, Adapted):
            return f"{name} has an adapter"
        if type(layer) is not expected:
            return f"{name} is a {type(layer).__name__}, not a {expected.__name__}"
        if isinstance(layer, TTLinear) and layer.spec.activation:
            return f"{name} has an activation between its factors"
        if is_hooked(layer):
            return f"{name} has hooks"
        if in_fp8(layer):
            return f"{name} computes in FP8"
        if reason := around_obstacle(module, name):
            return reason
    return None


def around_obstacle(module: nn.Module, name: str) -> str | None:
    """Why what is around a layer, such as "intermediate" of "intermediate.dense", must be called; None if not."""
    around = name.rpartition(".")[0]
    return f"{around} has hooks" if around and is_hooked(submodule(module, around)) else None


def replaced_obstacle(module: nn.Module, pattern: BlockPattern) -> str | None:
    """Why this pattern must leave the method of a module alone that somebody else has replaced; None if nobody has."""
    return f"its {pattern.method} was replaced by someone else" if is_replaced(module, pattern.method) else None


def is_replaced(module: nn.Module, method: str) -> bool:
    """Whether somebody else has replaced a method of a module."""
    own = vars(module).get(method)
    return own is not None and not isinstance(own, Fused)


def checkpoints(module: nn.Module) -> bool:
    """Whether a module of transformers is to checkpoint itself, which is a part of its plain forward."""
    return module.training and bool(getattr(module, "gradient_checkpointing", False))


def submodule(module: nn.Module, name: str) -> Any:
    """`module.get_submodule(name)`, which takes several times as long."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def in_fp8(layer: nn.Module) -> bool:
    """Whether a layer computes in FP8 (`fp8_`), which only its own forward does."""
    return isinstance(layer, TTLinear) and layer.fp8 is not None


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody else looks at the calls of a module, which a fused block would not make."""
    if is_replaced(module, "forward"):
        return True
    if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    return any(not _is_cache(hook) for hook in module._forward_pre_hooks.values())


def _is_cache(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), MergeCache)
