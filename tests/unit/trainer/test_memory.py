"""Estimates against what torch really saves, keeps and computes; the meter against a known allocation."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.errors import ConfigError
from comera.nn.linear import TTLinear
from comera.trainer.memory import MemoryEstimate, MemoryMeter, current_memory, estimate, peak_memory
from comera.tt.spec import TTSpec

BATCH, IN, HIDDEN, OUT = 6, 5, 7, 3


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parts_of_an_mlp_are_exact(device: str) -> None:
    with torch.device(device):
        model, x = MLP(), torch.randn(BATCH, IN)
    parts = estimate(model, lambda: model(x).square().sum())
    numbers = IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT
    assert parts.weights == parts.gradients == 4 * numbers
    # kept: x for the first weight, tanh's output for itself and the last weight (once), the output for the square
    assert parts.activations == 4 * (BATCH * IN + BATCH * HIDDEN + BATCH * OUT)
    # forward and weight gradients of both layers, input gradient of the last one: 2 operations a multiply-add
    assert parts.flops == 2 * BATCH * (2 * IN * HIDDEN + 3 * HIDDEN * OUT)
    assert parts.total == parts.weights + parts.gradients + parts.optimizer + parts.activations
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("adamw", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("momentum", lambda p: torch.optim.SGD(p, momentum=0.9)),
        ("adagrad", torch.optim.Adagrad),
    ],
)
def test_optimizer_state_is_that_of_the_real_one(kind: str, make: type[torch.optim.Optimizer]) -> None:
    model, x = MLP(), torch.randn(BATCH, IN)
    parts = estimate(model, lambda: model(x).square().sum(), optimizer=kind)
    optimizer = make(model.parameters())  # type: ignore[call-arg]
    model(x).square().sum().backward()
    optimizer.step()
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    assert parts.optimizer == sum(v.numel() * v.element_size() for v in kept)


def test_frozen_parameters_need_neither_gradient_nor_state() -> None:
    model = MLP()
    model.first.requires_grad_(False)
    x = torch.randn(BATCH, IN)
    parts = estimate(model, lambda: model(x).square().sum())
    assert parts.weights == 4 * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT)
    assert parts.gradients == 4 * (HIDDEN * OUT + OUT)
    assert parts.optimizer == 2 * parts.gradients + 4 * 2


def test_a_saved_view_counts_its_storage_once() -> None:
    model = nn.Linear(4, 4, bias=False)
    x = torch.randn(8, 4)

    def loss() -> Tensor:
        y: Tensor = model(x)
        return (y[:, :2] * y[:, 2:]).sum() + y.exp().sum()  # views of y, and exp's own output

    assert estimate(model, loss).activations == 4 * (8 * 4 + 8 * 4 + 8 * 4)


def test_a_large_compressed_layer_is_estimated_without_memory() -> None:
    spec = TTSpec(4096, 4096, (16, 16, 16), (16, 16, 16), (1, 8, 8, 8, 8, 8, 1))
    with torch.device("meta"):
        model, x = TTLinear(spec, bias=False), torch.randn(1 << 20, 4096)
    before = current_memory()
    parts = estimate(model, lambda: F.mse_loss(model(x), x))
    assert current_memory() - before < 2**28
    assert parts.weights == 4 * (spec.numel + spec.rank_numel)
    assert parts.activations > 4 * x.numel()  # 16 GB, never there


def test_the_table_names_every_part() -> None:
    parts = MemoryEstimate(weights=2**20, gradients=2**21, optimizer=2**22, activations=2**30, flops=5 * 10**9)
    rows = [line.split() for line in str(parts).splitlines()]
    assert rows == [
        ["weights", "1.0", "MB"],
        ["gradients", "2.0", "MB"],
        ["optimizer", "4.0", "MB"],
        ["activations", "1,024.0", "MB"],
        ["total", "1,031.0", "MB"],
        ["FLOPs", "5.00", "G"],
    ]


def test_unknown_optimizer_is_refused() -> None:
    model = MLP()
    with pytest.raises(ConfigError, match=r"expected an optimizer out of adamw.*got 'lion'"):
        estimate(model, lambda: model(torch.randn(BATCH, IN)).sum(), optimizer="lion")


def test_the_meter_sees_an_allocation_that_is_gone_again() -> None:
    meter = MemoryMeter.start()
    block = torch.ones(64 * 2**20 // 4)  # 64 MB, written, so that it is resident
    del block
    assert meter.added >= 60 * 2**20
    assert meter.peak == peak_memory()
    assert current_memory() < meter.peak
