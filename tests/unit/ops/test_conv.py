"""tt_conv against torch's convolutions with the dense kernel, in float64."""

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.oracle import signal_to_noise
from torch import Tensor

from comera.errors import SpecError
from comera.ops import conv as ops
from comera.ops.activations import ACTIVATIONS
from comera.ops.conv import tt_conv
from comera.tt.dense import absorb, materialize, merge
from comera.tt.format import clip_ranks
from comera.tt.shapes import tt_spec
from comera.tt.spec import TTSpec

F64 = torch.float64
DENSE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

# torch's own
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


@dataclass(frozen=True)
class Case:
    """A convolution of `channels` of each group to `outs`, and the sizes of its input."""

    name: str
    channels: int
    outs: int
    kernel: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int = 2
    order: int = 4
    settings: dict[str, Any] = field(default_factory=dict)
    spec: TTSpec = field(init=False)

    def __post_init__(self) -> None:
        features = self.channels * prod(self.kernel)
        spec = tt_spec(features, self.outs, order=self.order, rank=self.rank, kernel_size=self.kernel)
        object.__setattr__(self, "spec", spec)

    @property
    def groups(self) -> int:
        return self.settings.get("groups", 1)

    def operands(self, batch: tuple[int, ...] = (2,), dtype: torch.dtype = F64) -> list[Tensor]:
        """x, bias, cores and then gates, one of which in each vector of two or more is pruned."""
        generator = torch.Generator().manual_seed(0)
        shapes = [(*batch, self.groups * self.channels, *self.sizes), (self.outs,), *self.spec.core_shapes]
        leaves = [torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]
        for rank in self.spec.inner_ranks:
            leaves.append(torch.rand(rank, generator=generator, dtype=F64) + 0.5)
            leaves[-1][1:2] = 0.005
        return [leaf.to(dtype).requires_grad_() for leaf in leaves]

    def factored(self, x: Tensor, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        order = self.spec.order
        options: dict[str, Any] = {"kernel_size": self.kernel, "gates": tensors[order:], "threshold": 0.01}
        return tt_conv(x, self.spec, tensors[:order], bias, **options, **self.settings)

    def dense(self, x: Tensor, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        cores, gates = tensors[: self.spec.order], tensors[self.spec.order :]
        weight = materialize(self.spec, absorb(cores, [d * (d > 0.01) for d in gates]))
        return DENSE[len(self.kernel)](x, weight.t().reshape(self.outs, -1, *self.kernel), bias, **self.settings)


CASES = [
    Case("one dimension", 6, 8, (3,), (9,)),
    Case("two", 6, 8, (3, 3), (6, 5)),
    Case("three", 3, 5, (2, 1, 3), (3, 4, 5), order=3),
    Case("padded modes", 7, 11, (3, 2), (5, 6)),
    Case("more cores than channels", 1, 6, (5,), (8,), order=6),
    Case("one core a side", 4, 6, (3, 3), (5, 5), order=2),
    Case("the kernel in cores", 2, 6, (4, 5), (6, 7), order=6),
    Case("one position", 8, 6, (1, 1), (3, 4)),
    Case("rank 1", 6, 8, (3, 3), (5, 5), rank=1),
    Case("rank 0", 6, 8, (3, 3), (5, 5), rank=0),
    Case("full rank", 2, 8, (2, 2), (4, 5), rank=100),
    Case("stride", 6, 8, (3, 3), (7, 8), settings={"stride": (2, 3)}),
    Case("padding", 6, 8, (3, 4), (4, 3), settings={"padding": (1, 2)}),
    Case("same", 6, 8, (3, 4), (4, 5), settings={"padding": "same", "dilation": (2, 1)}),
    Case("valid", 6, 8, (3,), (5,), settings={"padding": "valid"}),
    Case("dilation", 6, 8, (3,), (12,), settings={"dilation": 3, "padding": 2, "stride": 2}),
    Case("groups", 5, 9, (3, 3), (5, 6), settings={"groups": 3, "padding": 1}),
    Case("groups of full rank", 3, 8, (2,), (5,), rank=100, settings={"groups": 2}),
    Case("depthwise", 1, 6, (3, 3), (5, 5), rank=1, settings={"groups": 6}),
]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def values_and_gradients(function: Any, operands: list[Tensor]) -> list[Tensor]:
    y = function(*operands)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=F64).to(y.dtype)
    return [y, *torch.autograd.grad(y, operands, dy, allow_unused=True, materialize_grads=True)]


def exact(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@each
@pytest.mark.parametrize("batch", [(), (0,), (1,), (2,)], ids=str)
def test_values_and_gradients_are_those_of_the_dense_kernel(case: Case, batch: tuple[int, ...]) -> None:
    operands = case.operands(batch)
    exact(values_and_gradients(case.factored, operands), values_and_gradients(case.dense, operands))
    x, _, *tensors = operands
    exact([case.factored(x, None, *tensors)], [case.dense(x, None, *tensors)])


@each
def test_gradcheck(case: Case) -> None:
    operands = case.operands()
    assert torch.autograd.gradcheck(case.factored, operands, fast_mode=True)
    assert torch.autograd.gradgradcheck(case.factored, operands, fast_mode=True)


@each
def test_memory_formats(case: Case) -> None:
    x, bias, *tensors = case.operands()
    strided = x.detach().transpose(1, -1).contiguous().transpose(1, -1)
    exact([case.factored(strided, bias, *tensors)], [case.dense(x, bias, *tensors)])
    if len(case.kernel) == 2:
        last = x.detach().contiguous(memory_format=torch.channels_last)
        exact([case.factored(last, bias, *tensors)], [case.dense(x, bias, *tensors)])
        assert case.factored(last, bias, *tensors).is_contiguous(memory_format=torch.channels_last)


@each
def test_a_traced_graph_computes_the_same(case: Case) -> None:
    operands = case.operands()
    torch._dynamo.reset()
    compiled = torch.compile(case.factored, backend="aot_eager", fullgraph=True)
    exact(values_and_gradients(compiled, operands), values_and_gradients(case.factored, operands))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_between_the_factors(activation: str) -> None:
    act, _ = ACTIVATIONS[activation]
    case = Case("", 5, 9, (3, 3), (5, 6), rank=100, settings={"groups": 3, "padding": 1})
    spec = replace(case.spec, activation=activation)
    x, bias, *tensors = case.operands()
    cores, rank = tensors[: spec.order], spec.ranks[spec.split]
    a_IR = merge(cores[: spec.split]).reshape(-1, rank)[: spec.in_features]
    b_RO = merge(cores[spec.split :]).reshape(rank, -1)[:, : spec.out_features]
    found = tt_conv(x, spec, cores, bias, kernel_size=(3, 3), padding=1, groups=3)
    for group, (own, outs) in enumerate(zip(x.chunk(3, 1), b_RO.chunk(3, 1), strict=True)):
        p = act(F.conv2d(own, a_IR.t().reshape(rank, 5, 3, 3), padding=1))
        y = torch.einsum("brhw,ro->bohw", p, outs) + bias[3 * group : 3 * group + 3, None, None]
        exact([found[:, 3 * group : 3 * group + 3]], [y])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = Case("", 16, 32, (3, 3), (6, 6), rank=8, settings={"padding": 1})
    operands = case.operands()
    operands[2:] = [(t / t.shape[0] ** 0.5).detach().requires_grad_() for t in operands[2:]]
    rounded = [t.detach().to(dtype).requires_grad_() for t in operands]
    wide = [t.detach().double().requires_grad_() for t in rounded]
    found, wanted = values_and_gradients(case.factored, rounded), values_and_gradients(case.dense, wide)
    assert all(one.dtype == dtype for one in found)
    assert min(signal_to_noise(one, other) for one, other in zip(found, wanted, strict=True)) >= 40


def test_autocast() -> None:
    case = Case("", 16, 32, (3, 3), (6, 6), rank=8, settings={"padding": 1})
    operands = case.operands(dtype=torch.float32)
    wide = [t.detach().double().requires_grad_() for t in operands]
    with torch.autocast("cpu", torch.bfloat16):
        y = case.factored(*operands)
    assert y.dtype == torch.bfloat16
    wanted = values_and_gradients(case.dense, wide)
    assert signal_to_noise(y, wanted[0]) >= 40
    gradients = torch.autograd.grad(y, operands, torch.ones_like(y))
    assert [g.dtype for g in gradients] == [torch.float32] * len(operands)


@pytest.mark.parametrize(("rank", "convolutions"), [(0, 1), (2, 2), (100, 1)])
def test_factors_are_taken_where_they_take_fewer_multiplications(
    rank: int, convolutions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def conv2d(*args: Any, **options: Any) -> Tensor:
        called.append(args)
        return F.conv2d(*args, **options)

    monkeypatch.setitem(ops._CONVOLUTIONS, 2, conv2d)
    case = Case("", 6, 8, (3, 3), (6, 5), rank=rank)
    case.factored(*case.operands())
    assert len(called) == convolutions


def test_what_does_not_fit() -> None:
    spec = TTSpec(54, 8, (6, 9), (2, 4), clip_ranks(3, (6, 9, 2, 4)))
    cores = [torch.randn(shape) for shape in spec.core_shapes]
    good: dict[str, Any] = {"kernel_size": (3, 3)}
    x = torch.randn(2, 6, 5, 5)
    with pytest.raises(SpecError, match="product divides the 54 input features"):
        tt_conv(x, spec, cores, kernel_size=(5, 5))
    with pytest.raises(SpecError, match="one to three sizes"):
        tt_conv(x, spec, cores, kernel_size=())
    with pytest.raises(SpecError, match="number of groups that divides its 8 output features"):
        tt_conv(x, spec, cores, **good, groups=3)
    with pytest.raises(SpecError, match=r"expected an input \(6, 2 sizes\)"):
        tt_conv(torch.randn(2, 5, 5, 5), spec, cores, **good)
    with pytest.raises(SpecError, match=r"got shape \(6, 5\)"):
        tt_conv(torch.randn(6, 5), spec, cores, **good)
    with pytest.raises(SpecError, match=r"bias of shape \(8,\)"):
        tt_conv(x, spec, cores, torch.zeros(7), **good)
    with pytest.raises(SpecError, match="cores of shapes"):
        tt_conv(x, spec, cores[:3], **good)
    with pytest.raises(TypeError, match="dtype of the cores"):
        tt_conv(x.double(), spec, cores, **good)
