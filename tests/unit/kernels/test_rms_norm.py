"""The residual norm kernel as RMSNorm: against float64, for both outputs and all gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from comera.kernels import select
from comera.kernels.cpp import residual_norm as kernels

pytestmark = pytest.mark.skipif(
    select.unavailable_reason() is not None, reason=f"no C++ kernels: {select.unavailable_reason()}"
)
SHAPES = [(5, 1), (40, 3), (1, 7), (6, 33), (3, 768), (2, 3, 100), (1, 5000), (17,), (0, 8), (4, 0), (300, 192)]


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


def run(given: list[Any], dy: Tensor, ds: Tensor | None, eps: float, offset: float) -> dict[str, Tensor]:
    """s, y and all gradients by the kernel. given: z or None, x, weight or None."""
    z, x, weight = given
    y, made, mean, rstd = kernels.residual_norm(z, x, weight, None, None, 0.0, eps, offset, True)
    s = x if z is None else made
    grads = kernels.residual_norm_backward(dy, s, mean, rstd, weight, None, 0.0, offset, True, ds)
    assert [t.numel() for t in (mean, grads[1], grads[3])] == [0, 0, 0]
    assert rstd.shape == x.shape[:-1]
    found = {"s": s, "y": y, "dx": grads[0]}
    return found if weight is None else found | {"dweight": grads[2]}


def reference(given: list[Any], dy: Tensor, ds: Tensor | None, eps: float, offset: float) -> dict[str, Tensor]:
    """The same in float64 by torch's autograd."""
    z, x, weight = (None if t is None else t.double().requires_grad_() for t in given)
    assert x is not None
    s = x if z is None else x + z
    y = s / (s.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * (offset + weight)
    wanted = [t for t in (x, weight) if t is not None]
    outs = (y,) if ds is None else (y, s)
    grads = torch.autograd.grad(outs, wanted, [dy.double(), *([] if ds is None else [ds.double()])])
    return {"s": s, "y": y} | dict(zip(("dx", "dweight"), grads, strict=False))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize(("weighted", "offset"), [(True, 0.0), (True, 1.0), (False, 0.0)])
def test_values_and_gradients(shape: tuple[int, ...], summed: bool, weighted: bool, offset: float) -> None:
    torch.manual_seed(len(shape) + sum(shape))
    z, x, dy, ds = (torch.randn(shape) + 0.5 for _ in range(4))
    given = [z if summed else None, x, torch.randn(shape[-1]) if weighted else None]
    settings = dy, ds if summed else None, 1e-2, offset
    found, exact = run(given, *settings), reference(given, *settings)
    assert found.keys() == exact.keys()
    rows = shape[:-1]
    for name, one in found.items():
        atol = 1e-5 * (torch.Size(rows).numel() ** 0.5 if name == "dweight" else 1)
        torch.testing.assert_close(
            one.double(), exact[name].detach(), rtol=1e-5, atol=atol, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1.0])
def test_eps_is_added_to_the_mean_of_squares(eps: float) -> None:
    given, dy = [None, 1e-3 * torch.randn(4, 33), torch.randn(33)], torch.randn(4, 33)
    found, exact = run(given, dy, None, eps, 0.0), reference(given, dy, None, eps, 0.0)
    for name, one in found.items():
        torch.testing.assert_close(one.double(), exact[name].detach(), rtol=1e-4, atol=1e-6 * float(one.abs().max()))


def test_rows_of_zeros_are_normed_to_zeros() -> None:
    found = run([None, torch.zeros(3, 9), torch.ones(9)], torch.ones(3, 9), None, 1e-6, 0.0)
    assert not found["y"].any()
    torch.testing.assert_close(found["dx"], torch.full((3, 9), 1e3))
    assert not found["dweight"].any()


def test_other_layouts() -> None:
    z, x, dy, ds = (torch.randn(40, 30, 20).transpose(0, 2) for _ in range(4))
    weight = torch.randn(80)[::2]
    found = run([z, x, weight], dy, ds, 1e-6, 1.0)
    plain = [t.contiguous() for t in (z, x, weight)]
    for name, one in run(plain, dy.contiguous(), ds.contiguous(), 1e-6, 1.0).items():
        assert torch.equal(found[name], one)


@pytest.mark.parametrize("cols", [768, 100])
def test_threads_do_not_change_what_belongs_to_rows(cols: int) -> None:
    z, x, dy, ds = (torch.randn(600, cols) for _ in range(4))
    weight, results = torch.randn(cols), []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        results.append(run([z, x, weight], dy, ds, 1e-6, 0.0))
    for one in results[1:]:
        assert all(torch.equal(one[name], results[0][name]) for name in ("s", "y", "dx"))
        torch.testing.assert_close(one["dweight"], results[0]["dweight"], rtol=1e-4, atol=1e-4)
    assert torch.equal(results[1]["dweight"], results[2]["dweight"])
