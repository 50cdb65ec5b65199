"""TTConv: a convolution whose weight is a tensor train."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from comera.errors import SpecError
from comera.nn.inputs import of_another_kind
from comera.nn.tensor_train import CompressedLayer, TensorTrain
from comera.ops.conv import tt_conv
from comera.tt.spec import TTSpec

_DENSE: dict[int, Callable[..., _ConvNd]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_PASSED = ("kernel_size", "stride", "padding", "dilation", "groups")
_SETTINGS = (
    *_PASSED,
    "in_channels",
    "out_channels",
    "padding_mode",
    "transposed",
    "output_padding",
    "_reversed_padding_repeated_twice",
)


class TTConv(CompressedLayer):
    """Drop-in for `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`: y = conv(x, W) + bias with W a tensor train.

    Args:
        tt: the tensor train, or a TTSpec from which one is made with the std that torch's convolutions would have. Its
            input features are the input channels of a group times the kernel's positions, the latter last, as
            `tt_spec(..., kernel_size=...)` chooses them; its output features are the output channels.
        kernel_size: one to three sizes: the dimensions of the convolution.
        stride, padding, dilation, groups, padding_mode: as torch's convolutions take them.
        bias: True (zeros), False, or a Parameter of shape (out_channels,) to keep, so that a tied bias stays tied.

    Input (batch, in_channels, *positions) or (in_channels, *positions), in any memory format -> output with
    out_channels, in the input's dtype or autocast's. The settings of a dense convolution are attributes here, too.

    Raises:
        SpecError: for a tensor train of another format, one that does not fit the kernel, or a bias of another shape.
        ValueError: for settings that torch refuses.

    Example:
        >>> import torch
        >>> from comera.nn import TTConv
        >>> from comera.tt import tt_spec
        >>> spec = tt_spec(64 * 9, 128, order=4, rank=16, kernel_size=(3, 3))
        >>> print(spec)
        TT 64·9 / 8·16 ranks 16-16-16
        >>> layer = TTConv(spec, (3, 3), stride=2, padding=1)
        >>> layer(torch.randn(7, 64, 32, 32)).shape, layer.weight.shape
        (torch.Size([7, 128, 16, 16]), torch.Size([128, 64, 3, 3]))

    Source: docs/method.md §4.
    """

    bias: nn.Parameter | None
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str
    _reversed_padding_repeated_twice: list[int]

    def __init__(
        self,
        tt: TensorTrain | TTSpec,
        kernel_size: Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool | nn.Parameter = True,
        padding_mode: str = "zeros",
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(tt, TTSpec):  # torch draws U(-1/sqrt(in), 1/sqrt(in)): std 1/sqrt(3 in)
            tt = TensorTrain(tt, init_std=1 / math.sqrt(3 * tt.in_features), dtype=dtype, device=device)
        if not isinstance(tt, TensorTrain) or not isinstance(tt.spec, TTSpec):
            raise SpecError(f"TTConv needs a TTSpec or a TensorTrain with one, got {getattr(tt, 'spec', tt)}")
        self.tt = tt
        ins, outs = tt.spec.shape
        if len(kernel_size) not in _DENSE or ins % max(1, math.prod(kernel_size)):
            raise SpecError(
                f"TTConv needs a kernel of one to three sizes whose product divides the {ins} input features of "
                f"{tt.spec}, got {tuple(kernel_size)}"
            )
        channels = groups * ins // math.prod(kernel_size)
        kind = _DENSE[len(kernel_size)]
        settings = (channels, outs, tuple(kernel_size), stride, padding, dilation, groups, False, padding_mode)
        dense = kind(*settings, device="meta")  # torch checks and completes them
        self.dense_type = type(dense)
        for name in _SETTINGS:
            setattr(self, name, getattr(dense, name))
        self._add_bias(bias, outs)

    @classmethod
    def like(cls, dense: Any, tt: TensorTrain) -> TTConv:
        """The layer around `tt` with the settings of the dense one that it replaces, and its bias."""
        settings = {name: getattr(dense, name) for name in (*_PASSED, "padding_mode")}
        return cls(tt, bias=False if dense.bias is None else dense.bias, **settings)

    @property
    def spec(self) -> TTSpec:
        """Modes and ranks of the weight."""
        assert isinstance(self.tt.spec, TTSpec)
        return self.tt.spec

    @property
    def _dense_shape(self) -> tuple[int, ...]:
        return self.out_channels, self.in_channels // self.groups, *self.kernel_size

    def _dense(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.tt.dense(tensors).t().reshape(self._dense_shape).contiguous()

    @property
    def settings(self) -> dict[str, Any]:
        """What `tt_conv` takes besides the input, the weight and the bias."""
        settings = {name: getattr(self, name) for name in _PASSED}
        if self.padding_mode == "zeros":
            return settings
        return {**settings, "padding": 0, "margins": (self._reversed_padding_repeated_twice, self.padding_mode)}

    def forward(self, input: Tensor) -> Tensor:
        """y = conv(x, W) + bias."""
        if (output := of_another_kind(self, input)) is not None:
            return output  # type: ignore[no-any-return]
        cores, gates = self.tt.tensors
        return tt_conv(input, self.spec, cores, self.bias, gates=gates, threshold=self.tt.threshold, **self.settings)

    def extra_repr(self) -> str:
        text: str = _ConvNd.extra_repr(self)  # type: ignore[arg-type]  # it has the attributes
        return text
