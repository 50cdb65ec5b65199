"""The norm and the scaling of many tensors against torch's."""

import pytest
import torch
from torch import nn

from comera.kernels import select
from comera.kernels.cpp import compiler
from comera.kernels.cpp.gradients import are_plain, clip_
from comera.trainer.step import TrainStep

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

SIZES = [[1], [0], [3, 0, 200_001, 65_536, 7], [31] * 300]


def tensors(sizes):
    torch.manual_seed(0)
    return [torch.randn(size) for size in sizes]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"{len(s)} tensors")
def test_norm_is_that_of_all_elements(sizes):
    given = tensors(sizes)
    before = [t.clone() for t in given]
    exact = torch.cat(given).double().norm()
    for limit in (0.0, float(exact) + 1):
        norm = clip_(given, limit)
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm.double(), exact, rtol=5e-7, atol=0)
    assert all(map(torch.equal, given, before))


@pytest.mark.parametrize("sizes", [sizes for sizes in SIZES if sum(sizes)], ids=lambda s: f"{len(s)} tensors")
def test_what_is_larger_is_scaled_to_the_limit(sizes):
    given, torchs = tensors(sizes), [nn.Parameter(t) for t in tensors(sizes)]
    for p in torchs:
        p.grad = p.detach().clone()
    versions = [t._version for t in given]
    torch.testing.assert_close(clip_(given, 0.1), nn.utils.clip_grad_norm_(torchs, 0.1), rtol=2e-6, atol=0)
    for one, other in zip(given, torchs, strict=True):
        torch.testing.assert_close(
            one, other.grad, rtol=2e-6, atol=0
        )  # torch's norm of 200,000 elements is off by 1e-6
    assert all(t._version > version for t, version in zip(given, versions, strict=True))
    torch.testing.assert_close(clip_(given, 0.0), torch.tensor(0.1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"{len(s)} tensors")
def test_the_same_bits_with_any_threads(sizes):
    results = []
    for threads in (1, 2, 3, 7, 2):
        torch.set_num_threads(threads)
        given = tensors(sizes)
        results.append([clip_(given, 0.1), *given])
    assert all(all(map(torch.equal, result, results[0])) for result in results)


def test_plain_are_contiguous_float32_on_the_cpu():
    plain = [torch.ones(2, 3), nn.Parameter(torch.ones(0)), torch.ones(5)[1:3], torch.tensor(1.0)]
    assert are_plain(plain)
    assert are_plain([])
    others = [
        torch.ones(2, 3).t(),
        torch.ones(1).expand(4),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        nn.Buffer(torch.ones(2)).as_subclass(type("Own", (torch.Tensor,), {})),
    ]
    assert not any(are_plain([*plain, other]) for other in others)


def test_no_tensors_are_left_to_torch():
    assert not select.supports("gradients")


def test_nan_and_inf_stay_visible():
    given = [torch.ones(3), torch.tensor([1.0, float("nan")])]
    assert clip_(given, 1.0).isnan()
    given = [torch.ones(3), torch.tensor([1.0, float("inf")])]
    assert clip_(given, 1.0).isinf()
    assert given[1][1].isnan()


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e3])
def test_a_step_is_the_one_without_the_kernel(clip, monkeypatch):
    results = []
    for setting in ("gradients", "none"):
        monkeypatch.setenv("COMERA_KERNELS", setting)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2))
        step = TrainStep(
            model, lambda m, x: m(x).square().sum(), torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=clip
        )
        found = [step([torch.randn(4, 5)]) for _ in range(3)]
        results.append([*(r.grad_norm for r in found), *(r.loss for r in found), *model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)
