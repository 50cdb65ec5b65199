"""A device that torch takes for a GPU, in a process without one: fake tensors are on it, which have no values.

Fake tensors of CUDA itself have no backward without a driver, so the device has another name, "gpu". Importing this
registers it for the whole process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration

from comera.ops import block_product

_module = backend_registration._DummyBackendModule()
_module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]  # an autocast that is off asks
backend_registration._setup_privateuseone_for_python_backend("gpu", _module)
# the meta device has no such kernel, though CUDA has
torch.library.impl("aten::_fused_adamw_.tensor_lr", "Meta")(lambda *_, **__: None)


@contextmanager
def on_gpu(value: Any) -> Iterator[Any]:
    """A copy of a value, its tensors fake ones on the GPU; inside, all tensors are fake."""
    kept_places = block_product._kept_places
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def in_mode(spec: Any, device: torch.device, _: object) -> Any:
            with mode:  # which Dynamo leaves while it traces
                return kept_places(spec, device, mode)

        with _ToTheGPU():
            copied = copy.deepcopy(value)
        mode.allow_non_fake_inputs = False
        torch._C._set_only_lift_cpu_tensors(True)  # so torch.tensor(..., device="gpu") is a copy from the host
        fake_tensor.CONSTANT_NUMEL_LIMIT = 0  # of a single number, too
        with patch.object(block_product, "_kept_places", in_mode):
            yield copied


class _ToTheGPU(TorchFunctionMode):
    """What `copy.deepcopy` copies is fake, and on the GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.clone:  # of a parameter
            return torch.empty_like(args[0], device="gpu", requires_grad=False)
        if function is not torch.Tensor.__deepcopy__:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = torch.empty_like(tensor, device="gpu")
        return memo[id(tensor)]
