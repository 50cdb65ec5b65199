"""Estimates against what torch really saves, keeps and computes; the meter against a known allocation."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.contrib import AdaRankGrad, TensorGaLore
from comera.errors import ConfigError
from comera.fusion import fuse_
from comera.memory.estimate import MemoryEstimate, MemoryMeter, current_memory, estimate, peak_memory
from comera.memory.live import Heap, LiveMemory
from comera.nn.linear import BTTLinear, TTLinear
from comera.optim import SMMF
from comera.tt.spec import BTTSpec, TTSpec

BATCH, IN, HIDDEN, OUT = 6, 5, 7, 3


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parts_of_an_mlp_are_exact(device: str) -> None:
    with torch.device(device):
        model, x = MLP(), torch.randn(BATCH, IN)
    parts = estimate(model, lambda: model(x).square().sum())
    numbers = IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT
    assert parts.weights == parts.gradients == 4 * numbers
    # more than what the forward keeps, besides x: tanh's output, for itself and the last weight, and the last output
    assert parts.activations + parts.gradients > 4 * (BATCH * HIDDEN + BATCH * OUT)
    # forward and weight gradients of both layers, input gradient of the last one: 2 operations a multiply-add
    assert parts.flops == 2 * BATCH * (2 * IN * HIDDEN + 3 * HIDDEN * OUT)
    assert parts.total == parts.weights + parts.gradients + parts.optimizer + parts.activations + parts.fragmentation
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("adamw", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("momentum", lambda p: torch.optim.SGD(p, momentum=0.9)),
        ("adagrad", torch.optim.Adagrad),
        ("smmf", SMMF),
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


@pytest.mark.parametrize(("kind", "make"), [("adarankgrad", AdaRankGrad), ("tensor_galore", TensorGaLore)])
def test_projected_state_is_estimated_at_its_largest_ranks(kind: str, make: type[AdaRankGrad | TensorGaLore]) -> None:
    model, x = nn.Sequential(nn.Conv1d(32, 48, 3), nn.ReLU(), nn.Linear(62, 40)), torch.randn(80, 32, 64)
    estimated = estimate(model, lambda: model(x).square().sum(), optimizer=kind).optimizer
    optimizer = make([{"params": list(model.parameters()), **({"energy": 1.0} if make is AdaRankGrad else {})}])
    model(x).square().sum().backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert estimated == sum(value.nbytes for value in kept) < 0.7 * sum(8 * p.numel() for p in model.parameters())


def test_frozen_parameters_need_neither_gradient_nor_state() -> None:
    model = MLP()
    model.first.requires_grad_(False)
    x = torch.randn(BATCH, IN)
    parts = estimate(model, lambda: model(x).square().sum())
    assert parts.weights == 4 * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT)
    assert parts.gradients == 4 * (HIDDEN * OUT + OUT)
    assert parts.optimizer == 2 * parts.gradients + 4 * 2


def test_live_memory_follows_every_storage_until_it_is_freed() -> None:
    held = torch.ones(50)
    with LiveMemory([held]) as live:
        first = held * 2
        second = torch.cat([first, first[:10]])  # a view is no storage of its own
        del first
        third = second + 1
        del second, third
        last = held + 1
    assert (live.now, live.peak) == (last.nbytes, 4 * (60 + 60))
    live.restart()
    assert live.peak == live.now == last.nbytes


def test_sparse_gradients_are_their_indices_and_values() -> None:
    table, ids = nn.Embedding(1000, 8, sparse=True), torch.arange(5)
    with LiveMemory([table.weight]) as live:
        table(ids).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert 5 * 8 * 4 + 5 * 8 <= live.peak < 1000 * 8 * 4  # values and indices, not a whole table


def test_a_gap_is_not_taken_by_a_request_of_its_own_size() -> None:
    """glibc looks for room for the alignment, too, before it cuts what it found to size."""
    heap = Heap()
    first, second, third = (heap.take(nbytes) for nbytes in (10_000, 4_000, 6_000))
    full = heap.held
    assert full == 20_000 + 3 * 16
    heap.give(second, 4_000)
    assert heap.take(4_000) == full
    small = heap.take(3_000)
    assert small == second
    for start, nbytes in ((first, 10_000), (small, 3_000)):  # with what was left of the gap they are one
        heap.give(start, nbytes)
    assert heap.take(13_000) == first
    assert heap.held == full + 4_016
    heap.give(third, 6_000)
    large = heap.take(2**25 + 1)
    assert heap.held == full + 4_016 + 2**25 + 1
    heap.give(large, 2**25 + 1)
    assert heap.held == full + 4_016


def test_the_meta_device_stands_for_the_cpu() -> None:
    """Kernels included: the same live memory as on the CPU, where they run."""
    spec = TTSpec(64, 96, (8, 8), (8, 12), (1, 8, 12, 12, 1))
    found = []
    for device in ("cpu", "cpu", "meta"):  # the first makes tables that stay
        with torch.device(device):
            model = nn.Sequential(TTLinear(spec), nn.Dropout(0.1), BTTLinear(BTTSpec(96, 64, (8, 12), (8, 8), 1)))
            x = torch.randn(256, 64)
            fuse_(model)
            found.append(estimate(model, lambda model=model, x=x: model(x).square().mean()))  # type: ignore[misc]
    assert replace(found[2], fragmentation=0) == found[1]


def test_attention_without_dropout_makes_no_scores_on_the_meta_device() -> None:
    sizes = 1, 2, 512, 8
    weight = nn.Parameter(torch.empty(sizes, device="meta"))
    model = nn.ParameterList([weight])
    plain = 4 * 2 * 512 * 512

    def loss(dropout: float) -> Tensor:
        return F.scaled_dot_product_attention(weight, weight, weight, dropout_p=dropout).sum()

    assert estimate(model, lambda: loss(0.0)).activations < plain < estimate(model, lambda: loss(0.5)).activations


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
    sizes = {"weights": 2**20, "gradients": 2**21, "optimizer": 2**22, "activations": 2**30, "fragmentation": 2**23}
    parts = MemoryEstimate(**sizes, flops=5 * 10**9)
    rows = [line.split() for line in str(parts).splitlines()]
    assert rows == [
        ["weights", "1.0", "MB"],
        ["gradients", "2.0", "MB"],
        ["optimizer", "4.0", "MB"],
        ["activations", "1,024.0", "MB"],
        ["fragmentation", "8.0", "MB"],
        ["total", "1,039.0", "MB"],
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
