"""Inductor's kernels of compiled steps, counted by benchmarks/gpu_inductor.py: run alone, as it registers a device."""

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import comera
from comera.optim import AdamW, param_groups
from comera.trainer import TrainStep

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_fake
import gpu_roofline
from roofline import Counter

with warnings.catch_warnings():  # which importing Inductor gives
    warnings.simplefilter("ignore", DeprecationWarning)
    import gpu_inductor

gpu_inductor.state_h100()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).tanh().exp() + 1


def test_pointwise_operations_and_their_mean_are_one_kernel() -> None:
    with gpu_roofline.stood_in():
        lowered, _ = gpu_inductor.lower((Scaled(), torch.zeros(8, 64), loss_of), "fp32")
    assert (lowered.launches, lowered.extern) == ([1, 1], 0)
    forward, backward = lowered.costs
    matrix = 8 * 64 * 4
    assert forward.nbytes == 2 * matrix + 4  # reads x and the scale, writes the loss
    assert backward.nbytes == 3 * matrix + 4  # reads these and the gradient of the loss, writes that of the scale


def test_a_compressed_step_launches_fewer_kernels_than_operations() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    comera.tensorize_(model, ratio=4)
    made = model, torch.zeros(8, 64), loss_of
    with gpu_roofline.stood_in():
        lowered, rest = gpu_inductor.lower(made, "fp32")
        with gpu_fake.on_gpu(made) as (fake, batch, _):
            step = TrainStep(fake, loss_of, AdamW(param_groups(fake, lr=1e-3), fused=True), max_grad_norm=1.0)
            step([batch])
            with Counter(gpu_roofline.H100) as counter:
                step([batch])
    eager = {name: cost.calls for name, cost in counter.costs.items()}
    products = sum(eager.get(f"aten.{name}", 0) for name in ("mm", "bmm", "addmm", "baddbmm"))
    assert 0 < lowered.extern <= products
    assert 0 < len(lowered.kernels) < sum(eager.values()) - products - rest.calls
    assert sum(cost.flops for cost in lowered.costs) == sum(cost.flops for cost in counter.costs.values())
