"""TTLinear and BTTLinear: linear layers whose weight is a tensor train, or a block tensor train."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from comera.errors import SpecError
from comera.nn.inputs import of_another_kind
from comera.nn.tensor_train import CompressedLayer, TensorTrain
from comera.ops.block_product import BTTWeight, btt_linears
from comera.ops.fp8 import Recipe
from comera.ops.linear import Contraction, tt_linear
from comera.ops.low_rank import LowRankFactors
from comera.tt.spec import BTTSpec, TTSpec

__all__ = ["BTTLinear", "CompressedLinear", "TTLinear"]


class CompressedLinear(CompressedLayer):
    """Base class of `TTLinear` and `BTTLinear`. spec_type: the format of its tensor train."""

    dense_type: type[nn.Module] = nn.Linear
    spec_type: ClassVar[type[TTSpec | BTTSpec]]
    bias: nn.Parameter | None

    def __init__(
        self,
        tt: TensorTrain | TTSpec | BTTSpec,
        bias: bool | nn.Parameter = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(tt, self.spec_type):  # nn.Linear draws U(-1/sqrt(in), 1/sqrt(in)): std 1/sqrt(3 in)
            tt = TensorTrain(tt, init_std=1 / math.sqrt(3 * tt.in_features), dtype=dtype, device=device)
        if not isinstance(tt, TensorTrain) or not isinstance(tt.spec, self.spec_type):
            kind, needed = type(self).__name__, self.spec_type.__name__
            raise SpecError(f"{kind} needs a {needed} or a TensorTrain with one, got {getattr(tt, 'spec', tt)}")
        self.tt = tt
        self._add_bias(bias, tt.spec.out_features)

    @property
    def in_features(self) -> int:
        """Size of the input's last axis."""
        return self.tt.spec.shape[0]

    @property
    def out_features(self) -> int:
        """Size of the output's last axis."""
        return self.tt.spec.shape[1]

    @property
    def _dense_shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def _dense(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.tt.dense(tensors).t().contiguous()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class TTLinear(CompressedLinear):
    """Drop-in for `nn.Linear`: y = x W + bias with W a tensor train (docs/method.md §1).

    Args:
        tt: the tensor train, or a TTSpec from which one is made with the std that `nn.Linear` would have.
        bias: True (zeros), False, or a Parameter of shape (out_features,) to keep, so that a tied bias stays tied.

    Input (..., in_features) -> output (..., out_features), in the input's dtype or autocast's.

    fp8: how the products with the input are scaled to float8, None for products in the input's dtype; `fp8_` sets it.
    It is not in the state_dict.
    contraction: "planned", the fastest for the number of rows, or always "low_rank", (x A) B; `plan_memory` chooses. It
    is not in the state_dict.

    Raises:
        SpecError: for a tensor train of another format or a bias of another shape.

    Example:
        >>> import torch
        >>> from comera.nn import TTLinear
        >>> from comera.tt import TTSpec
        >>> layer = TTLinear(TTSpec(12, 10, (3, 4), (5, 2), (1, 3, 4, 2, 1)))
        >>> layer(torch.randn(7, 12)).shape
        torch.Size([7, 10])
    """

    spec_type = TTSpec
    fp8: Recipe | None = None
    contraction: Contraction = "planned"

    @property
    def spec(self) -> TTSpec:
        """Modes and ranks of the weight."""
        assert isinstance(self.tt.spec, TTSpec)
        return self.tt.spec

    def forward(self, input: Tensor, factors: LowRankFactors | None = None) -> Tensor:
        """y = x W + bias. factors: A and B of W where they are merged already, as `fuse_` arranges it."""
        if (output := of_another_kind(self, input, factors)) is not None:
            return output  # type: ignore[no-any-return]
        cores, gates = self.tt.tensors
        return tt_linear(
            input,
            self.spec,
            cores,
            self.bias,
            gates=gates,
            threshold=self.tt.threshold,
            factors=factors,
            fp8=self.fp8,
            contraction=self.contraction,
        )

    def extra_repr(self) -> str:
        fp8 = f", fp8={self.fp8}" if self.fp8 else ""
        return super().extra_repr() + fp8 + (", contraction=low_rank" if self.contraction == "low_rank" else "")


class BTTLinear(CompressedLinear):
    """Drop-in for `nn.Linear`: y = x W + bias with W a block tensor train (docs/method.md §1).

    Args:
        tt: the block tensor train, or a BTTSpec from which one is made with the std that `nn.Linear` would have.
        bias: as for `TTLinear`.

    Input (..., in_features) -> output (..., out_features), in the input's dtype or autocast's.

    Raises:
        SpecError: for a tensor train of another format or a bias of another shape.

    Example:
        >>> import torch
        >>> from comera.nn import BTTLinear
        >>> from comera.tt import BTTSpec
        >>> layer = BTTLinear(BTTSpec(12, 10, in_modes=(3, 4), out_modes=(5, 2), block_ranks=1))
        >>> layer(torch.randn(7, 12)).shape
        torch.Size([7, 10])
    """

    spec_type = BTTSpec

    @property
    def spec(self) -> BTTSpec:
        """Blocks and ranks of the weight."""
        assert isinstance(self.tt.spec, BTTSpec)
        return self.tt.spec

    @property
    def operands(self) -> BTTWeight:
        """What a product takes besides the input."""
        cores, gates = self.tt.tensors
        return BTTWeight(self.spec, cores, self.bias, gates, self.tt.threshold)

    def forward(self, input: Tensor) -> Tensor:
        """y = x W + bias."""
        if (made := of_another_kind(self, input)) is not None:
            return made  # type: ignore[no-any-return]
        (output,) = btt_linears(input, [self.operands])
        return output
