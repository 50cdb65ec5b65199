"""Tests here need a CUDA device: they are skipped without one, and fail instead when REQUIRE_GPU=1."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def device() -> torch.device:
    if not torch.cuda.is_available():
        reason = "needs a CUDA device, torch sees none"
        if os.environ.get("REQUIRE_GPU") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return torch.device("cuda")
