"""A drop-in for `nn.Dropout` with cheaper masks on a CPU (ops/dropout.py)."""

from torch import Tensor, nn

from comera.kernels.cpp.library import on_cpu
from comera.kernels.tracing import traced
from comera.ops.dropout import dropout


class Dropout(nn.Dropout):
    """Drop-in for `nn.Dropout`: elements are zeroed with probability p and the others scaled by 1/(1 - p).

    Any floating input -> its shape and dtype. Off the CPU, and under torch.compile, it is `nn.Dropout` itself.
    """

    def forward(self, input: Tensor) -> Tensor:
        cheap = on_cpu(input) and not self.inplace and 0 < self.p < 1
        if not self.training or not cheap or traced():
            return super().forward(input)
        return dropout(input, self.p)
