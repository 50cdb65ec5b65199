"""Training steps on tensors that say they are on a GPU and have no values: run alone, as it registers a device.

Reading a value on the host, which would wait for the GPU, raises in torch's fake tensors, and so do operands of several
devices; a copy between devices, which waits too, raises here. Fake tensors of CUDA itself have no backward without a
driver, so the device has another name: where the code asks for "cuda" it is to choose a kernel or a random state.
The masks of transformers read one value in a forward, dense or compressed, and not on fake tensors: a test says where.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, masking_utils

import comera
from comera.recipes.dlrm.model import DLRM, DLRMConfig
from comera.trainer import TrainStep

STEPS = 4
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
backend = backend_registration._DummyBackendModule()
backend.get_amp_supported_dtype = lambda: [torch.bfloat16]  # asked for by an autocast that is off, too
backend_registration._setup_privateuseone_for_python_backend("gpu", backend)


class ToTheGPU(TorchFunctionMode):
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


class OneDevice(TorchDispatchMode):
    """Raises where an operation has tensors, or makes one, of another device than the GPU."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        devices = {each.device.type for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)}
        assert devices <= {"gpu"}, f"{function} has tensors on {sorted(devices)}"
        return result


def bert() -> tuple[nn.Module, Any]:
    model = BertForSequenceClassification(BertConfig(vocab_size=512, **SIZES))
    ids = torch.zeros(4, 16, dtype=torch.int64)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0]}


def llama() -> tuple[nn.Module, Any]:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **SIZES, use_cache=False))
    ids = torch.zeros(4, 16, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def dlrm() -> tuple[nn.Module, Any]:
    model = DLRM(DLRMConfig(dim=16, bottom=(64,), top=(64,)), (3000, 700, 20))
    model.reset_parameters()
    return model, {"dense": torch.zeros(8, 13), "ids": torch.zeros(8, 3, dtype=torch.int64), "y": torch.zeros(8)}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    if "x" in batch:
        return model(batch["x"]).square().mean()
    if "y" in batch:
        return nn.functional.binary_cross_entropy_with_logits(model(batch["dense"], batch["ids"]), batch["y"])
    return model(**batch).loss


def take_steps(made: tuple[nn.Module, Any], *, fused: bool, stage: str) -> None:
    """Real steps of a compressed model whose ranks adapt; then, of a fake copy of all that on the GPU, steps of which
    the first, which makes tables on that device, is not watched."""
    model, batch = made
    comera.tensorize_(model, ratio=3)
    if fused:
        comera.fuse_(model)
    optimizer = torch.optim.AdamW(comera.param_groups(model.train(), lr=1e-3), fused=True)  # as the trainer's
    controller = comera.RankController(model, late=comera.LateStage(target_size=0.5, steps=1000)).attach(optimizer)
    step = TrainStep(model, loss_of, optimizer, controller=controller, max_grad_norm=1.0)
    step([batch, batch])
    if stage == "late":
        controller.start_late()
        step([batch, batch])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with ToTheGPU():
            fake, batch = copy.deepcopy((step, batch))
        mode.allow_non_fake_inputs = False
        fake.device = torch.device("gpu:0")
        torch._C._set_only_lift_cpu_tensors(True)  # so torch.tensor(..., device="gpu") is a copy from the host
        fake_tensor.CONSTANT_NUMEL_LIMIT = 0  # of a single number, too
        for number in range(STEPS):
            with OneDevice() if number else nullcontext():
                result = fake([batch, batch])
            assert result.loss.device == result.grad_norm.device == fake.device
    assert fake.controller is not None
    assert fake.controller.stage == stage
    assert {each.device for each in fake.model.parameters()} == {fake.device}


@pytest.mark.parametrize("stage", ["early", "late"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [bert, llama, dlrm])
def test_a_step_reads_nothing_on_the_host(make: Callable[[], tuple[nn.Module, Any]], fused: bool, stage: str) -> None:
    take_steps(make(), fused=fused, stage=stage)


@pytest.mark.parametrize("make", [bert, llama])
def test_what_transformers_reads_on_the_host_is_in_its_masks(
    make: Callable[[], tuple[nn.Module, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: False)  # what fake tensors are taken for
    with pytest.raises(DataDependentOutputException) as raised:
        take_steps(made, fused=True, stage="early")
    assert any(Path(entry.path).name == "masking_utils.py" for entry in raised.traceback)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda _: None)
    monkeypatch.setattr(masking_utils, "_ignore_bidirectional_mask_sdpa", lambda *_, **__: True)
    take_steps(make(), fused=True, stage="early")  # and nothing else


class ReadsOnTheHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.mean() > 0 else -x


class CopiesFromTheHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones(()).to(x.device)


@pytest.mark.parametrize(
    ("module", "error", "said"),
    [
        (ReadsOnTheHost, DataDependentOutputException, "aten._local_scalar_dense"),
        (CopiesFromTheHost, AssertionError, "has tensors on"),
    ],
)
def test_a_module_that_waits_for_the_gpu_is_found(module: type[nn.Module], error: type[Exception], said: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), module())
    with pytest.raises(error, match=said):
        take_steps((model, {"x": torch.zeros(8, 64)}), fused=False, stage="early")
