"""Results by name, compared to rounding."""

import torch
from torch import Tensor


def assert_near(found: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    """Each tensor within `tolerance` of the largest element of its own."""
    assert found.keys() == exact.keys()
    for name, one in found.items():
        size = max(float(exact[name].abs().max()), 1e-3)
        torch.testing.assert_close(one, exact[name], rtol=0, atol=tolerance * size, msg=lambda m, n=name: f"{n}: {m}")
