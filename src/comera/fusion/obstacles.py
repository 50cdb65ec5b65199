"""What stands in the way of a fused block: why layers must be called one by one, or a module left alone."""

from typing import Any

from torch import nn

from comera.fusion.merge_cache import MergeCache
from comera.fusion.registry import BlockPattern, Fused, known, own_type, patterns_of
from comera.fusion.same_code import code_of
from comera.nn.adapted import Adapted
from comera.nn.linear import TTLinear


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
        if reason := call_obstacle(layer):
            return f"{name} {reason}"
        if in_fp8(layer):
            return f"{name} computes in FP8"
        if reason := around_obstacle(module, name):
            return reason
    return None


def around_obstacle(module: nn.Module, name: str) -> str | None:
    """Why what is around a layer, such as "intermediate" of "intermediate.dense", must be called; None if not."""
    around = name.rpartition(".")[0]
    if not around:
        return None
    outer = submodule(module, around)
    if is_hooked(outer):
        return f"{around} has hooks"
    if patterns_of(outer) or any(each.own for each in known(own_type(module))):
        return None
    return f"{around} is a {type(outer).__name__}, whose code is not known"


def replaced_obstacle(module: nn.Module, pattern: BlockPattern) -> str | None:
    """Why this pattern must leave a module's method alone: in this instance it was replaced by other code, or a method
    that it calls. None if neither was."""
    for each in known(own_type(module)):
        if type(each.pattern) is type(pattern):
            for name in each.code.helpers & vars(module).keys():
                if not any(path.partition(".")[0] == name for path in pattern.names) and is_replaced(module, name):
                    return f"its {name} was replaced by someone else"
    return f"its {pattern.method} was replaced by someone else" if is_replaced(module, pattern.method) else None


def is_replaced(module: nn.Module, method: str) -> bool:
    """Whether a method of a module was replaced by other code than ours."""
    own = vars(module).get(method)
    return own is not None and not isinstance(own, Fused)


def checkpoints(module: nn.Module) -> bool:
    """Whether a module of transformers checkpoints itself, which only its plain forward does."""
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
    """Whether a module has hooks or another forward, so that its calls are observed; a fused block makes none."""
    if is_replaced(module, "forward"):
        return True
    if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = module._forward_pre_hooks.values()
    return any(not isinstance(getattr(hook, "__self__", None), MergeCache) for hook in hooks)


def call_obstacle(module: nn.Module) -> str | None:
    """Why a module of a known type must still be called: it has hooks, or the forward of its class is not the one that
    its library ships. None if it need not be called."""
    if is_hooked(module):
        return "has hooks"
    changed = code_of(type(module), "forward", whole=False).changed_whole
    return f"computes otherwise: {changed}" if changed else None
