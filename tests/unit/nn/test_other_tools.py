"""Compressed layers under torch.jit.trace, torch.jit.script, torch.fx and the ONNX exporter of TorchScript, and with
sparse and nested inputs: as dense layers do, or an error that says why not and what to do."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import comera
from comera.errors import WeightError
from comera.nn.conv import TTConv
from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMProjection
from comera.nn.linear import BTTLinear, TTLinear
from comera.tt.shapes import tt_spec
from comera.tt.spec import BTTSpec, TTMSpec, TTSpec

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\..*` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(?s).*legacy TorchScript-based ONNX export:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Constant folding - Only steps=1:UserWarning"),
]
TT = TTSpec(12, 10, (4, 3), (2, 5), (1, 3, 4, 2, 1))
PADDED = TTSpec(11, 9, (4, 3), (2, 5), (1, 3, 4, 2, 1))
BTT = BTTSpec(11, 9, in_modes=(3, 4), out_modes=(2, 5), block_ranks=2)
RAGGED = BTTSpec(12, 10, (3, 4), (2, 5), ((2, 0), (1, 4), (0, 1)))
TTM = TTMSpec(37, 5, (8, 5), (3, 2), (1, 4, 1))
DEEP = TTMSpec(300, 12, (8, 7, 6), (3, 2, 2), (1, 4, 3, 1))
PLAIN = TTMSpec(30, 8, (30, 1), (1, 8), (1, 4, 1))


def rows(count: int, features: int, *more: int) -> Tensor:
    return torch.randn(count, *more, features, generator=torch.Generator().manual_seed(count))


def ids(count: int, table: int, *more: int) -> Tensor:
    return torch.arange(count * 3).view(count, 3) * 7 % table


class Attention(nn.Module):
    """A module whose parameters are compressed, and which reads them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        comera.tensorize_(self, comera.TensorizeConfig(comera.TT(order=4, rank=3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def active() -> TTLinear:
    return TTLinear(comera.TT(order=4, rank=3, activation="silu").spec(12, 10))  # type: ignore[arg-type]


LAYERS: dict[str, tuple[Any, Any]] = {
    "TT": (lambda: TTLinear(TT), lambda n: rows(n, 12)),
    "TT, 3 dimensions": (lambda: TTLinear(PADDED, bias=False), lambda n: rows(n, 11, 2)),
    "TT with an activation": (active, lambda n: rows(n, 12)),
    "BTT": (lambda: BTTLinear(BTT), lambda n: rows(n, 11, 2)),
    "BTT of many ranks": (lambda: BTTLinear(RAGGED, bias=False), lambda n: rows(n, 12)),
    "convolution": (
        lambda: TTConv(tt_spec(4 * 9, 10, order=4, rank=3, kernel_size=(3, 3)), (3, 3)),
        lambda n: rows(n, 5, 4, 6),
    ),
    "head": (lambda: TTMProjection(TTM, padding_idx=3), lambda n: rows(n, 5, 2)),
    "head of plain low rank": (lambda: TTMProjection(PLAIN), lambda n: rows(n, 8)),
    "table": (lambda: TTMEmbedding(TTM, padding_idx=0), lambda n: ids(n, 37)),
    "deep table": (lambda: TTMEmbedding(DEEP), lambda n: ids(n, 300)),
    "table of plain low rank": (lambda: TTMEmbedding(PLAIN), lambda n: ids(n, 30)),
    "bags": (lambda: TTMEmbeddingBag(TTM), lambda n: ids(n, 37)),
    "means": (lambda: TTMEmbeddingBag(DEEP, "mean", padding_idx=7), lambda n: ids(n, 300)),
    "attention": (Attention, lambda n: rows(n, 16, 3)),
}  # fmt: skip
warns = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # torch's own attention, dense or not
each = pytest.mark.parametrize("name", [pytest.param(name, marks=[warns] * (name == "attention")) for name in LAYERS])


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layer, inputs = LAYERS[name][0](), LAYERS[name][1]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return nn.Sequential(layer), inputs


def test_the_list_has_every_layer() -> None:
    kinds = {type(made(name)[0][0]) for name in LAYERS}
    assert kinds >= {TTLinear, BTTLinear, TTConv, TTMProjection, TTMEmbedding, TTMEmbeddingBag}


@each
@pytest.mark.parametrize("kernels", ["all", "none"])
def test_a_traced_program_is_right_for_other_sizes(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMERA_KERNELS", kernels)
    model, inputs = made(name)
    traced = torch.jit.trace(model, inputs(5))
    for count in (5, 2, 9):
        torch.testing.assert_close(traced(inputs(count)), model(inputs(count)), rtol=1e-4, atol=1e-5)
    stored = io.BytesIO()
    torch.jit.save(traced, stored)
    stored.seek(0)
    torch.testing.assert_close(torch.jit.load(stored)(inputs(3)), model(inputs(3)), rtol=1e-4, atol=1e-5)


@each
def test_a_traced_program_has_the_gradients(name: str) -> None:
    model, inputs = made(name)
    parameters = list(model.parameters())
    traced = torch.jit.trace(model, inputs(5))
    found, exact = (torch.autograd.grad(run(inputs(4)).square().sum(), parameters) for run in (traced, model))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@each
def test_onnx_of_torchscript(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model, inputs = made(name)
    path, sizes = tmp_path / "model.onnx", {"x": {0: "batch"}, "y": {0: "batch"}}
    names = {"input_names": ["x"], "output_names": ["y"]}
    torch.onnx.export(model, (inputs(5),), str(path), dynamo=False, dynamic_axes=sizes, **names)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for count in (5, 2, 9):
        (found,) = session.run(["y"], {"x": inputs(count).numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(inputs(count)), rtol=1e-4, atol=1e-5)


@each
def test_fx_keeps_a_layer_as_one_call(name: str) -> None:
    model, inputs = made(name)
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(inputs(4)), model(inputs(4)), rtol=0, atol=0)


def test_script_says_what_to_do() -> None:
    for name in LAYERS:
        with pytest.raises(WeightError, match=r"torch\.jit\.trace.*materialize_"):
            torch.jit.script(made(name)[0])


LINEAR = ["TT", "TT with an activation", "BTT of many ranks"]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("name", [*LINEAR, "head of plain low rank"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_inputs(name: str, layout: torch.layout) -> None:
    model, inputs = made(name)
    x = inputs(6) * (torch.arange(6) % 2).unsqueeze(1)
    parameters = list(model.parameters())
    found, exact = model(x.to_sparse(layout=layout)), model(x)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    pairs = zip(*(torch.autograd.grad(y.square().sum(), parameters) for y in (found, exact)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*LINEAR, "head of plain low rank", "table", "deep table"])
def test_jagged_inputs(name: str) -> None:
    model, inputs = made(name)
    parts = [inputs(3), inputs(1), inputs(5)]
    parts = [part if part.is_floating_point() else part[:, 0] for part in parts]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    found = model(x)
    assert found.shape[1] == x.shape[1]  # the same jagged dimension, so that the two could be added
    for row, part in zip(found.unbind(), parts, strict=True):
        torch.testing.assert_close(row, model(part), rtol=1e-4, atol=1e-5)
    torch.nested.to_padded_tensor(found, 0.0).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_jagged_bags() -> None:
    for name in ("bags", "means"):
        model, _ = made(name)
        parts = [torch.arange(count) * 5 % 37 for count in (3, 1, 4)]
        found = model(torch.nested.nested_tensor(parts, layout=torch.jagged))
        exact = torch.cat([model(part[None]) for part in parts])
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("name", LINEAR)
def test_nested_inputs_of_the_first_kind(name: str) -> None:
    model, inputs = made(name)
    parts = [inputs(3), inputs(1)]
    found = model(torch.nested.nested_tensor(parts))
    for row, part in zip(found.unbind(), parts, strict=True):
        torch.testing.assert_close(row, model(part), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean:torch.jit.TracerWarning")
def test_fused_models_under_other_tools() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 8))
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=3)))
    comera.fuse_(model)
    many, few = rows(500, 24), rows(7, 24)
    exact = [comera.materialize_(copy.deepcopy(model))(x) for x in (many, few)]
    program = torch.jit.trace(model, (many,), check_trace=False)
    for x, expected in zip((many, few), exact, strict=True):
        torch.testing.assert_close(program(x), expected, rtol=1e-4, atol=1e-5)
    jagged = torch.nested.nested_tensor([many, few], layout=torch.jagged)
    for found, expected in zip(model(jagged).unbind(), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_fx_of_a_compressed_layer_alone_says_what_to_do() -> None:
    layer = TTLinear(TT)
    with pytest.raises(WeightError, match=r"trace torch.nn.Sequential"):
        torch.fx.symbolic_trace(layer)
    torch.testing.assert_close(torch.fx.symbolic_trace(nn.Sequential(layer))(rows(3, 12)), layer(rows(3, 12)))


class Twice(nn.Module):
    def forward(self, core: Tensor) -> Tensor:
        return 2 * core


@pytest.mark.parametrize("cores", ["0", "1", "01"])
def test_parametrizations_of_some_cores(cores: str) -> None:
    layer, x = BTTLinear(BTT, bias=False), rows(3, 11)
    expected = layer(x) * 2 ** len(cores)
    for name in cores:
        parametrize.register_parametrization(layer.tt.cores, name, Twice())
    torch.testing.assert_close(layer(x), expected)


HOOKED = {
    "prune": lambda cores: prune.l1_unstructured(cores, "1", amount=0.9),
    "spectral_norm": lambda cores: nn.utils.spectral_norm(cores, "1"),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.*` is deprecated:FutureWarning")
@pytest.mark.parametrize("hook", HOOKED)
def test_hooks_that_nothing_calls_are_refused(hook: str) -> None:
    layer = TTLinear(TT)
    HOOKED[hook](layer.tt.cores)
    with pytest.raises(WeightError, match=r"forward hooks on the list of them.*parametrizations work on cores"):
        layer(rows(3, 12))


@each
def test_a_pruned_weight_says_what_can_be_pruned(name: str) -> None:
    if name == "attention":
        pytest.skip("has no weight of its own")
    model, inputs = made(name)
    before = model(inputs(3))
    with pytest.raises(WeightError, match=r"parametrize a core, as in parametrizations.spectral_norm"):
        prune.l1_unstructured(model[0], "weight", amount=0.5)
    assert not model[0]._forward_pre_hooks
    torch.testing.assert_close(model(inputs(3)), before, rtol=0, atol=0)
