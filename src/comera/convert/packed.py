"""Which parameters that modules hold and read themselves can be compressed: one table, by type of module.

Experts are modules whose forward reads the matrix of one expert, `self.gate_up_proj[e]`, or the parameter as a whole.
Those of transformers are known by the mark that its `use_experts_implementation` leaves on them, which says that their
forward is of that kind; others by type. They are compressed only where a configuration has a format for experts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from comera.convert.converter import Converter
from comera.errors import ConversionError
from comera.nn.packed import HELD, Layout, plain_type

_REMARK = "its matrices are materialized in each forward, because the module multiplies by them itself"


@dataclass(frozen=True)
class PackedConverter:
    """Which parameters of one type of module hold matrices that its forward reads by name.

    layouts: module -> how each of these parameters holds them, by its name. experts: whether they are matrices of
    experts, with the format of a configuration for these; else they get that of linear layers. refusal: module -> why
    this one cannot be converted, or None.

    Example:
        >>> import torch, comera
        >>> from comera.convert import EXPERTS, register_converter
        >>> class Experts(torch.nn.Module):  # its 3-dimensional parameters are (experts, out, in)
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.randn(8, 64, 32) / 32**0.5)
        ...     def forward(self, x, expert):
        ...         return torch.nn.functional.linear(x, self.weight[expert])
        >>> register_converter(Experts, EXPERTS)
        >>> model = torch.nn.Sequential(Experts())
        >>> report = comera.tensorize_(model, comera.TensorizeConfig(experts=comera.BTT(rank=1)))
        >>> [(row.name, row.dense, row.stored) for row in report.rows]
        [('0.weight', 16384, 4352)]
        >>> model[0](torch.randn(5, 32), 3).shape
        torch.Size([5, 64])
    """

    layouts: Callable[[Any], Mapping[str, Layout]]
    experts: bool = False
    refusal: Callable[[Any], str | None] = lambda module: None


def _stacks(module: nn.Module, in_first: bool) -> dict[str, Layout]:
    """Layouts of all parameters with three dimensions, of which the first is the expert."""
    found = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.ndim == 3:
            experts, *sizes = parameter.shape
            ins, outs = sizes if in_first else sizes[::-1]
            found[name] = Layout(tuple(parameter.shape), ins, outs, experts, in_first)
    return found


def _heads(module: Any) -> dict[str, Layout]:
    """XLNet's: (d_model, heads, d_head), of which `o` is applied from heads to d_model."""
    found = {}
    for name in ("q", "k", "v", "o", "r"):
        parameter = module._parameters.get(name)
        if parameter is not None:
            width, inner = parameter.shape[0], math.prod(parameter.shape[1:])
            sizes = (inner, width) if name == "o" else (width, inner)
            found[name] = Layout(tuple(parameter.shape), *sizes, in_first=name != "o")
    return found


def _matrices(module: nn.Module) -> dict[str, Layout]:
    """Matrices (out, in): of nn.MultiheadAttention one for queries, keys and values, or one each; of nn.LSTM, nn.GRU
    and nn.RNN those of each layer and direction."""
    own = {name: p.shape for name, p in module._parameters.items() if p is not None and p.ndim == 2}
    return {name: Layout(tuple(shape), shape[1], shape[0]) for name, shape in own.items()}


def _refuse_parallel(module: Any) -> str | None:
    parallel = getattr(module, "_is_expert_parallel", False)
    return "its experts are spread over processes: convert first" if parallel else None


EXPERTS = PackedConverter(lambda module: _stacks(module, False), experts=True, refusal=_refuse_parallel)
"""The converter of modules whose parameters with three dimensions are (experts, out, in)."""
EXPERTS_IN_FIRST = PackedConverter(lambda module: _stacks(module, True), experts=True, refusal=_refuse_parallel)
"""The same for (experts, in, out)."""

_CONVERTERS: dict[type[nn.Module], PackedConverter] = {
    nn.MultiheadAttention: PackedConverter(_matrices),
    nn.LSTM: PackedConverter(_matrices),
    nn.GRU: PackedConverter(_matrices),
    nn.RNN: PackedConverter(_matrices),
}

_FOREIGN: Mapping[tuple[str, str], PackedConverter] = {
    ("transformers.models.jetmoe.modeling_jetmoe", "JetMoeParallelExperts"): EXPERTS,
    ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts"): EXPERTS_IN_FIRST,
    ("transformers.models.xlnet.modeling_xlnet", "XLNetRelativeAttention"): PackedConverter(_heads),
}


def register_packed(module_type: type[nn.Module], converter: PackedConverter) -> None:
    """Let `tensorize_` convert parameters of modules of exactly this type: see `register_converter`."""
    _CONVERTERS[module_type] = converter


def packed_converter(module: nn.Module) -> PackedConverter | None:
    """How to convert a module's own parameters, or None."""
    kind = plain_type(module)
    found = _CONVERTERS.get(kind) or _FOREIGN.get((kind.__module__, kind.__name__))
    if found is None and "_is_expert_parallel" in vars(module) and "is_transposed" in vars(module):
        found = EXPERTS_IN_FIRST if module.is_transposed else EXPERTS
    return found


def packed_leaves(module: nn.Module) -> dict[str, Converter]:
    """How each parameter of a module is converted that holds matrices for its forward; by name."""
    kind = packed_converter(module)
    if kind is None:
        return {}
    return {name: _converter(layout, kind) for name, layout in kind.layouts(module).items()}


def dense_names(compressed: Sequence[str]) -> list[str]:
    """The names of a parameter, then those of its modules, from those that it has as a compressed one."""
    pairs = [f".{name}".rsplit(f".{HELD}.", 1) for name in compressed]
    return [f"{module}.{leaf}"[1:] if module else leaf for module, leaf in pairs] + [m[1:] for m, _ in pairs]


def _converter(layout: Layout, kind: PackedConverter) -> Converter:
    def build(layer: Any) -> nn.Module:
        raise ConversionError("a parameter is not built as a layer")

    return Converter(
        shape=lambda module: (layout.in_features, layout.out_features),
        std=lambda module: 1 / math.sqrt(3 * layout.in_features),
        build=build,
        refusal=kind.refusal,
        remark=_REMARK,
        layout=layout,
    )
