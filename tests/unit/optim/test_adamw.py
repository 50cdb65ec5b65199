"""AdamW: what holds whichever kernel takes the step (tests/unit/kernels/test_adamw.py compares the kernels)."""

import pytest
import torch
from torch import nn

from comera.optim import AdamW


@pytest.mark.parametrize("kernels", ["all", "none"])
@pytest.mark.parametrize("fused", [True, False])
def test_each_step_gives_parameters_a_new_version(kernels: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMERA_KERNELS", kernels)
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamW([parameter], lr=0.1, fused=fused)
    for _ in range(3):
        before = parameter._version
        parameter.grad = torch.ones(3)
        optimizer.step()
        assert parameter._version > before
