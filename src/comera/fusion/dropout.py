"""A drop-in for `nn.Dropout` with cheaper masks on a CPU (ops/dropout.py)."""

from torch import Tensor, nn

from comera.fusion.lazy import value_of
from comera.kernels.cpp.library import on_cpu
from comera.kernels.tracing import traced
from comera.ops.dropout import dropout

_FORWARD = nn.Dropout.forward


class Dropout(nn.Dropout):
    """Drop-in for `nn.Dropout`: elements are zeroed with probability p and the others scaled by 1/(1 - p).

    Any floating input -> its shape and dtype. Off the CPU, under torch.compile, and once somebody has replaced the
    forward of `nn.Dropout`, it is `nn.Dropout` itself.
    """

    def forward(self, input: Tensor) -> Tensor:
        input = value_of(input)
        cheap = on_cpu(input) and not self.inplace and 0 < self.p < 1
        if not self.training or not cheap or traced() or nn.Dropout.forward is not _FORWARD:
            return super().forward(input)
        return dropout(input, self.p)
