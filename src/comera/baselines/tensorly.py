"""Tensor-train layers of tensorly-torch, the library a user would otherwise take.

Its only tensor-train format of a linear layer is "blocktt", a TT-matrix: one core (r_{k-1}, out_k, in_k, r_k) per pair
of an input and an output mode. It gets the same modes and rank as ours; ranks do not adapt, and embeddings stay dense.
Its product is one `torch.einsum` over all cores, whose contraction order is good only if opt_einsum is installed:
without it, a layer takes several times as long."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import nn

from comera.baselines.common import Applied, Baseline, Package, adamw, convert_linear_, elements
from comera.convert import LINEAR, LayerRow
from comera.errors import check_fields, is_integer
from comera.tt.format import clip_ranks
from comera.tt.shapes import balanced_modes

_PACKAGE = Package("tensorly", "tltorch", "tensorly-torch", "pip install 'comera[baselines]'")


Form = Literal["factorized", "reconstructed"]


@dataclass(frozen=True)
class Tensorly(Baseline):
    """Tensor-train layers of tensorly-torch; core_lr is the learning rate of their cores.

    See `tensorly_`. Needs the extra `baselines`.
    """

    package = _PACKAGE

    order: int = 6
    """Modes of a layer, half of them for its inputs, half for its outputs."""
    rank: int = 30
    """TT-rank, clipped where the modes allow less."""
    implementation: Form = "factorized"
    """How a layer computes its product: core by core (the library's default), or with a dense weight
    reconstructed each time."""

    def __post_init__(self) -> None:
        ways = get_args(Form)
        checks = {
            "order": (is_integer(self.order, 2) and self.order % 2 == 0, "an even number >= 2"),
            "rank": (is_integer(self.rank), "an integer >= 1"),
            "implementation": (self.implementation in ways, f"one of {', '.join(ways)}"),
        }
        check_fields(self, "tensorly.", checks)

    def apply_(self, model: nn.Module, skip: Sequence[str] = ()) -> Applied:
        dense_total = elements(model.parameters())
        rows = tensorly_(model, self.rank, order=self.order, implementation=self.implementation, skip=skip)
        kind = library().FactorizedLinear
        cores = [p for layer in model.modules() if isinstance(layer, kind) for p in layer.weight.parameters()]
        return Applied(rows, dense_total, adamw(model, cores, "cores"))


def tensorly_(
    model: nn.Module, rank: int = 30, *, order: int = 6, implementation: Form = "factorized", skip: Sequence[str] = ()
) -> tuple[LayerRow, ...]:
    """Replace linear layers in place by `tltorch.FactorizedLinear`; returns what became of each. Biases are kept;
    random cores preserve the weight's standard deviation. Modes are balanced, and their product is exact. skip: glob
    patterns of names to leave dense. Raises ConversionError if there is nothing to replace, ConfigError if the library
    is not installed.

    Example:
        >>> import torch
        >>> from comera.baselines import tensorly_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> [(row.note, row.stored) for row in tensorly_(model, rank=8)]
        [('4·4·4 / 4·4·4 ranks 8-8', 1280)]
        >>> model(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """
    library()
    return convert_linear_(model, skip, lambda layer: _layer(layer, rank, order // 2, implementation), _note)


def library() -> Any:
    """The package tltorch. Raises ConfigError if it cannot be imported."""
    _PACKAGE.check()
    try:
        import tltorch
    except ModuleNotFoundError as error:
        raise _PACKAGE.error(f"lacks {error.name}") from error
    except ImportError as error:
        raise _PACKAGE.error(f"cannot be imported ({error})") from error
    return tltorch


def _layer(layer: nn.Linear, rank: int, pairs: int, implementation: str) -> Any:
    in_modes = balanced_modes(layer.in_features, pairs, max_padding=0)  # large modes outside, as in `tt_spec`
    out_modes = balanced_modes(layer.out_features, pairs, max_padding=0)[::-1]
    sizes = tuple(i * o for i, o in zip(in_modes, out_modes, strict=True))
    ranks = clip_ranks(rank, sizes)
    new = library().FactorizedLinear(
        in_modes,
        out_modes,
        bias=False,
        factorization="blocktt",
        rank=list(ranks),
        implementation=implementation,
        device=layer.weight.device,
        dtype=layer.weight.dtype,
    )
    # The library's own initialization misses the weight's standard deviation by orders of magnitude: it takes the
    # order of the matrix, two, for the number of cores. Var W = Π r_k · std^(2 · cores) corrects that.
    with torch.no_grad():
        target = (0.0 if layer.weight.is_meta else float(layer.weight.std(correction=0))) or LINEAR.std(layer)
        std = (target**2 / prod(ranks)) ** (1 / (2 * len(sizes)))
        for core in new.weight.factors:
            core.normal_(0, std)
    new.register_parameter("bias", layer.bias)
    return new


def _note(layer: Any) -> str:
    sides = layer.in_tensorized_features, layer.out_tensorized_features
    modes = " / ".join("·".join(map(str, side)) for side in sides)
    return f"{modes} ranks {'-'.join(map(str, layer.weight.rank[1:-1]))}"
