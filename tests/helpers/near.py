"""Results compared to rounding, and to the bit."""

from collections.abc import Sequence

import torch
from torch import Tensor


def assert_near(found: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    """Each tensor within `tolerance` of the largest element of its own."""
    assert found.keys() == exact.keys()
    for name, one in found.items():
        size = max(float(exact[name].abs().max()), 1e-3)
        torch.testing.assert_close(one, exact[name], rtol=0, atol=tolerance * size, msg=lambda m, n=name: f"{n}: {m}")


def assert_within(found: Tensor, exact: Tensor, share: float, least: float = 0.0) -> None:
    """Of float32, and within a share of the largest element of what is exact, or of `least`."""
    assert (found.shape, found.dtype) == (exact.shape, torch.float32)
    largest = max(least, float(exact.detach().abs().max())) if exact.numel() else 0.0
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=share * largest)


def assert_all_equal(found: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """To the bit."""
    assert len(found) == len(exact)
    assert all(torch.equal(one, other) for one, other in zip(found, exact, strict=True))
