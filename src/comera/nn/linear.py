"""TTLinear: a linear layer whose weight is a tensor train."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from comera.errors import SpecError
from comera.fusion.qkv import SharedInput
from comera.nn.tensor_train import CompressedLayer, TensorTrain
from comera.ops.linear import Weight, tt_linears
from comera.tt.spec import TTSpec


class TTLinear(CompressedLayer):
    """Drop-in for `nn.Linear`: y = x W + bias with W a tensor train.

    tt: the chain, or a TTSpec from which one is made with the std that `nn.Linear` would have had.
    bias: True (zeros), False, or a Parameter of shape (out_features,) to keep (so that a tied bias stays tied).
    Input (..., in_features) -> output (..., out_features), dtype of the input (or of autocast).
    Raises SpecError for a chain of another format or a bias of another shape.
    """

    dense_type: type[nn.Module] = nn.Linear
    bias: nn.Parameter | None
    shared_input: SharedInput | None = None
    """Where `fuse_` found layers with the same input; computes all of them at once."""

    def __init__(
        self,
        tt: TensorTrain | TTSpec,
        bias: bool | nn.Parameter = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(tt, TTSpec):  # nn.Linear draws U(-1/sqrt(in), 1/sqrt(in)): std 1/sqrt(3 in)
            tt = TensorTrain(tt, init_std=1 / math.sqrt(3 * tt.in_features), dtype=dtype, device=device)
        if not isinstance(tt, TensorTrain) or not isinstance(tt.spec, TTSpec):
            raise SpecError(f"TTLinear needs a TTSpec or a TensorTrain with one, got {getattr(tt, 'spec', tt)}")
        self.tt = tt
        self._add_bias(bias, tt.spec.out_features)

    @property
    def spec(self) -> TTSpec:
        """Modes and ranks of the weight."""
        assert isinstance(self.tt.spec, TTSpec)
        return self.tt.spec

    @property
    def in_features(self) -> int:
        """Size of the input's last axis."""
        return self.spec.in_features

    @property
    def out_features(self) -> int:
        """Size of the output's last axis."""
        return self.spec.out_features

    @property
    def weight(self) -> Tensor:
        """The materialised weight (out_features, in_features), made anew at each access: for inspection only."""
        return self.tt.dense().t()

    def forward(self, x: Tensor) -> Tensor:
        if self.shared_input is not None and self.shared_input.takes(self):
            return self.shared_input.forward(self, x)
        return tt_linears(x, [self.as_weight()])[0]

    def as_weight(self) -> Weight:
        """What the products of this layer are made from."""
        tt = self.tt
        return Weight(self.spec, tt.tensors[0], self.bias, tt.effective_cores, tt.halves if tt.together else None)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
