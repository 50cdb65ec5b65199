"""Training steps on tensors that say they are on a GPU and have no values: run alone, as it registers a device.

Reading a value on the host, which would wait for the GPU, raises in torch's fake tensors, and so do operands of several
devices; a copy between devices, which waits too, raises here. Compiled steps are one graph each way, by Dynamo and
AOTAutograd, whose operations run under the same watch; recorded steps launch the same again.
The device is that of benchmarks/gpu_fake.py: where the code asks for "cuda" it is to choose a kernel or a random state.
The masks of transformers read one value in a forward, dense or compressed, and not on fake tensors: a test says where.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Generator, Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import DataDependentOutputException, is_fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, masking_utils

import comera
from comera.graphs.cuda import CudaRecorder
from comera.graphs.picture import Picture
from comera.recipes.dlrm.model import DLRM, DLRMConfig
from comera.trainer import TrainStep

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_fake import on_gpu

STEPS = 4  # of recorded ones two are replayed
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


class OneDevice(TorchDispatchMode):
    """Raises where an operation has tensors, or makes one, of another device than the GPU."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        devices = {each.device.type for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)}
        assert devices <= {"gpu"}, f"{function} has tensors on {sorted(devices)}"
        return result


class Launches(OneDevice):
    """All that a CUDA graph knows of a step: operations in order, with their constants, and with the memory of their
    tensors: that which was there before, by its address, that which they make, by number.

    alive: memory that they made and that is not freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Any] = []
        self.alive: dict[int, tuple[int, ref[torch.UntypedStorage]]] = {}
        self._before: dict[int, torch.UntypedStorage] = {}  # held, so that no other gets the address of one
        self._count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(Tensor, self._place, (args, kwargs))
        assert not any(isinstance(each, Generator) for each in tree_leaves(given)), f"{function} has its own generator"
        result = super().__torch_dispatch__(function, types, args, kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._before:
                self._add(tensor.untyped_storage())
        if function.namespace != "profiler":
            self.launched.append((str(function), given, tree_map_only(Tensor, self._place, result)))
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.alive:
            self._count += 1
            self.alive[key] = self._count, ref(storage, lambda _: self.alive.pop(key))

    def _place(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata in self.alive:
            place = f"made {self.alive[storage._cdata][0]}"
        else:
            self._before[storage._cdata] = storage
            place = f"at {storage._cdata}"
        return place, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


class Recorder:
    """In place of CUDA graphs. A replay takes the step again, and what it launches must be what was captured."""

    warm_ups = CudaRecorder.warm_ups

    def __init__(self) -> None:
        self.replays = 0

    def warm_up(self, step: Callable[[], Any], *, watch: bool) -> tuple[Any, str]:
        with OneDevice() if watch else nullcontext():
            return step(), ""

    def capture(self, step: Callable[[], Any], picture: Picture) -> Callable[[], Any]:
        captured = Launches()
        with captured:
            result = step()
        results = {each.untyped_storage()._cdata for each in tree_leaves(result)}
        assert captured.alive.keys() == results, "a tensor outlives the step in the memory of graphs"

        def replay() -> Any:
            self.replays += 1
            again = Launches()
            with again:
                result = step()
            for now, then in zip(again.launched, captured.launched, strict=True):
                assert now == then
            return result

        return replay


class Compiler:
    """In place of Inductor, for the graphs of forward and backward: runs their operations, on one device."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0
        self.backend = aot_autograd(fw_compiler=self.compile, bw_compiler=self.compile)

    def compile(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1

        def run(*given: Any) -> Any:
            self.runs += 1
            with OneDevice():
                return graph(*given)

        return make_boxed_func(run)


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


def take_steps(
    made: tuple[nn.Module, Any],
    *,
    fused: bool,
    stage: str,
    compiler: Compiler | None = None,
    whole: bool = True,
    recorder: Recorder | None = None,
) -> None:
    """Real steps of a compressed model whose ranks adapt; then, of a fake copy of all that on the GPU, steps of which
    the first, which makes tables on that device, is not watched. whole: whether the loss is compiled with the model."""
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
    with on_gpu((step, batch)) as (fake, batch):
        mode = "compile" if compiler and whole else "graph" if recorder else "eager"
        options = {"controller": fake.controller, "max_grad_norm": 1.0, "mode": mode, "recorder": recorder}
        if compiler and not whole:
            fake.model.compile(backend=compiler.backend, fullgraph=True)
        fake = TrainStep(fake.model, loss_of, fake.optimizer, backend=compiler and compiler.backend, **options)
        for number in range(STEPS):
            with OneDevice() if number and not (compiler or recorder) else nullcontext():  # which watch themselves
                result = fake([batch, batch])
            assert result.loss.device == result.grad_norm.device == fake.device == torch.device("gpu:0")
    assert fake.mode == mode, fake.mode
    assert fake.controller is not None
    assert fake.controller.stage == stage
    assert {each.device for each in fake.model.parameters()} == {fake.device}


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fake tensors, which have no data."""
    address = Tensor.data_ptr
    monkeypatch.setattr(Tensor, "data_ptr", lambda t: t.untyped_storage()._cdata if is_fake(t) else address(t))


@pytest.mark.parametrize("stage", ["early", "late"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [bert, llama, dlrm])
def test_a_step_reads_nothing_on_the_host(make: Callable[[], tuple[nn.Module, Any]], fused: bool, stage: str) -> None:
    take_steps(make(), fused=fused, stage=stage)


@pytest.mark.parametrize(
    ("make", "whole", "stage"), [(bert, True, "late"), (llama, False, "early"), (dlrm, True, "late")]
)
def test_a_compiled_step_is_one_graph(make: Callable[[], tuple[nn.Module, Any]], whole: bool, stage: str) -> None:
    compiler = Compiler()
    take_steps(make(), fused=whole, stage=stage, compiler=compiler, whole=whole)
    assert (compiler.graphs, compiler.runs) == (2, 2 * 2 * STEPS)  # forward and backward of two batches


@pytest.mark.parametrize(("make", "stage"), [(bert, "late"), (llama, "early"), (dlrm, "early"), (dlrm, "late")])
@pytest.mark.usefixtures("addresses")
def test_a_recorded_step_is_the_same_again(make: Callable[[], tuple[nn.Module, Any]], stage: str) -> None:
    recorder = Recorder()
    take_steps(make(), fused=True, stage=stage, recorder=recorder)
    assert recorder.replays == STEPS - Recorder.warm_ups


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


class CountsSteps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = iter(range(100))

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.counts)


class CopiesFromTheHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones(()).to(x.device)


@pytest.mark.parametrize(
    ("module", "mode", "error", "said"),
    [
        (ReadsOnTheHost, "eager", DataDependentOutputException, "aten._local_scalar_dense"),
        (CopiesFromTheHost, "eager", AssertionError, "has tensors on"),
        (CopiesFromTheHost, "compile", AssertionError, "has tensors on"),
        (CopiesFromTheHost, "graph", AssertionError, "has tensors on"),
        (CountsSteps, "graph", AssertionError, "aten.mul"),
    ],
)
@pytest.mark.usefixtures("addresses")
def test_a_module_that_waits_for_the_gpu_is_found(
    module: type[nn.Module], mode: str, error: type[Exception], said: str
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), module())
    by = {"compiler": Compiler() if mode == "compile" else None, "recorder": Recorder() if mode == "graph" else None}
    with pytest.raises(error, match=said):
        take_steps((model, {"x": torch.zeros(8, 64)}), fused=False, stage="early", **by)
