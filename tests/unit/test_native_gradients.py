"""The norm and the scaling of many tensors against torch's."""

import pytest
import torch
from torch import nn

from comera import native
from comera.native import build
from comera.native.gradients import norm, scale_
from comera.train.step import TrainStep

pytestmark = pytest.mark.skipif(build._compiler() is None, reason="no C++ compiler")

SIZES = [[1], [0], [3, 0, 200_001, 65_536, 7], [31] * 300]


def tensors(sizes):
    torch.manual_seed(0)
    return [torch.randn(size) for size in sizes]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"{len(s)} tensors")
def test_norm_is_that_of_all_numbers(sizes):
    given = tensors(sizes)
    exact = torch.cat(given).double().norm()
    torch.testing.assert_close(norm(given).double(), exact, rtol=5e-7, atol=0)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"{len(s)} tensors")
def test_scaling_is_exact(sizes):
    given = tensors(sizes)
    expected = [t * 0.37 for t in given]
    scale_(given, 0.37)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_no_tensors_are_left_to_torch():
    assert not native.takes("gradients")


def test_what_is_no_number_stays_visible():
    assert norm([torch.ones(3), torch.tensor([1.0, float("nan")])]).isnan()
    assert norm([torch.tensor([1.0, float("inf")])]).isinf()


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e3])
def test_a_step_is_the_one_without_the_kernel(clip, monkeypatch):
    results = []
    for setting in ("gradients", "none"):
        monkeypatch.setenv("COMERA_KERNELS", setting)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2))
        step = TrainStep(
            model, lambda m, x: m(x).square().sum(), torch.optim.SGD(model.parameters(), lr=0.1), clip=clip
        )
        found = [step([torch.randn(4, 5)]) for _ in range(3)]
        results.append([*(r.grad_norm for r in found), *(r.loss for r in found), *model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)
