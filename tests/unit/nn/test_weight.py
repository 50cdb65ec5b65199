"""`layer.weight` of compressed layers: reading, differentiating, and never a write that is lost."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import comera
from comera.errors import WeightError
from comera.nn import CompressedLayer, TensorTrain, TTLinear, TTMEmbedding, TTMProjection
from comera.tt.shapes import tt_spec, ttm_spec


@pytest.fixture
def materialized(monkeypatch: pytest.MonkeyPatch) -> list[TensorTrain]:
    """The trains that were materialized, in order."""
    seen: list[TensorTrain] = []
    real = TensorTrain.dense
    monkeypatch.setattr(TensorTrain, "dense", lambda self, *rest: seen.append(self) or real(self, *rest))
    return seen


def layers(dtype: torch.dtype = torch.float64) -> list[CompressedLayer]:
    torch.manual_seed(0)
    table = TTMEmbedding(ttm_spec(50, 12, order=2, rank=3), padding_idx=4, dtype=dtype)
    head = TTMProjection(table.tt, padding_idx=4)
    return [TTLinear(tt_spec(24, 20, order=4, rank=3), dtype=dtype), table, head]


@pytest.fixture(params=[0, 1, 2], ids=["linear", "embedding", "head"])
def layer(request: pytest.FixtureRequest) -> CompressedLayer:
    return layers()[request.param]


def dense(layer: CompressedLayer) -> Tensor:
    if isinstance(layer, TTLinear):
        return layer.tt.dense().t()
    return layer.tt.dense().index_fill(0, torch.tensor([4]), 0)


def test_reading_what_it_is_like_makes_nothing(layer: CompressedLayer, materialized: list[TensorTrain]) -> None:
    weight, like = layer.weight, torch.empty(20, 24) if isinstance(layer, TTLinear) else torch.empty(50, 12)
    for each in (weight, weight.data, weight.detach()):
        assert isinstance(each, Tensor)
        assert (each.dtype, each.device, each.layout) == (torch.float64, torch.device("cpu"), torch.strided)
        assert (each.shape, each.size(0), len(each), each.ndim, each.dim()) == (
            like.shape, like.shape[0], like.shape[0], 2, 2,
        )  # fmt: skip
        assert (each.numel(), each.nelement(), each.stride(), each.is_contiguous()) == (
            like.numel(), like.numel(), like.stride(), True,
        )  # fmt: skip
        assert (each.is_cuda, each.is_meta, each.is_sparse, each.is_quantized) == (False,) * 4
        assert each.is_floating_point()
        assert not each.is_complex()
        assert (each.element_size(), each.itemsize, each.nbytes) == (8, 8, 8 * like.numel())
    assert weight.requires_grad
    assert not weight.data.requires_grad
    with torch.no_grad():
        assert layer.weight.requires_grad
    assert not layer.requires_grad_(False).weight.requires_grad
    assert materialized == []


def test_values_are_those_of_the_tensor_train(layer: CompressedLayer, materialized: list[TensorTrain]) -> None:
    exact = dense(layer)
    materialized.clear()
    weight = layer.weight
    for found in (weight + 0, weight.data.clone(), weight.detach().numpy().copy(), weight.t().t() * 1, weight.tolist()):
        torch.testing.assert_close(
            torch.as_tensor(found, dtype=torch.float64), exact.detach(), rtol=0, atol=0, check_stride=False
        )
    assert len(materialized) == 1  # once for all uses
    assert str(exact.detach())[:40] in str(weight)
    assert weight[0, 0].item() == exact[0, 0].item()
    assert torch.equal(weight[1:3, ::2], exact[1:3, ::2])
    assert weight.data_ptr() == weight.data_ptr() != 0


def test_gradients_reach_the_cores_whatever_uses_the_weight(layer: CompressedLayer) -> None:
    class Theirs(torch.autograd.Function):
        """Of a library that knows nothing of us."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return dy @ weight, dy.t() @ x

    uses: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, w: F.linear(x, w),
        lambda x, w: x @ w.T.contiguous(),
        lambda x, w: torch.einsum("bi,oi->bo", x, w.float().double()),
        lambda x, w: torch.stack([F.linear(x, row[None])[:, 0] for row in w], 1),
        lambda x, w: Theirs.apply(x, w),
        lambda x, w: torch.utils.checkpoint.checkpoint(F.linear, x, w, use_reentrant=False),
        lambda x, w: F.linear(F.embedding(torch.arange(len(x)), w), w),
    ]
    for use in uses:
        grads = []
        for weight in (layer.weight, dense(layer)):
            x = torch.randn(5, weight.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            x.requires_grad_()
            wanted = list(layer.tt.parameters()) + ([x] if use is not uses[-1] else [])
            grads.append(torch.autograd.grad(use(x, weight).square().sum(), wanted))
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)


def test_it_is_differentiable_twice() -> None:
    layer = TTLinear(tt_spec(6, 4, order=2, rank=2), dtype=torch.float64)
    parameters = list(layer.tt.parameters())

    def weight(*tensors: Tensor) -> Tensor:
        for p, tensor in zip(parameters, tensors, strict=True):
            p.data = tensor.data
        return torch.func.functional_call(
            _Reads(layer), {f"layer.tt.{n}": t for (n, _), t in zip(layer.tt.named_parameters(), tensors, strict=True)}
        )

    given = [p.detach().clone().requires_grad_() for p in parameters]
    assert torch.autograd.gradcheck(weight, given)
    assert torch.autograd.gradgradcheck(weight, given)


class _Reads(nn.Module):
    def __init__(self, layer: TTLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *_: Any) -> Tensor:
        return self.layer.weight.square()


def test_a_backward_after_an_update_raises() -> None:
    layer = layers()[0]
    loss = layer.weight.square().sum()
    with torch.no_grad():
        layer.tt.cores[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("scale", ["mul_", "div_"])
def test_a_product_with_a_number_scales_the_layer(layer: CompressedLayer, scale: str) -> None:
    before = layer.weight.detach().clone()
    with torch.no_grad():
        result = getattr(layer.weight, scale)(4)  # as RWKV does for evaluation
    torch.testing.assert_close(layer.weight, getattr(before, scale)(4), rtol=0, atol=0)
    torch.testing.assert_close(result.detach(), layer.weight.detach(), rtol=0, atol=0)


def test_a_product_with_a_number_needs_no_grad_as_for_a_parameter() -> None:
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        layers()[0].weight.mul_(4)


WRITES: dict[str, Callable[[CompressedLayer], object]] = {
    "data.fill_": lambda layer: layer.weight.data.fill_(0),
    "data +=": lambda layer: layer.weight.data.__iadd__(torch.ones(layer.weight.shape)),
    "+= in a statement": lambda layer: exec("layer.weight.data += 1", {"layer": layer}),
    "+= on the weight": lambda layer: exec("layer.weight += 1", {"layer": layer}),
    "data = ": lambda layer: setattr(layer.weight, "data", torch.zeros(layer.weight.shape)),
    "grad = ": lambda layer: setattr(layer.weight, "grad", torch.zeros(layer.weight.shape)),
    "copy_": lambda layer: layer.weight.copy_(torch.zeros(layer.weight.shape)),
    "detach copy_": lambda layer: layer.weight.detach().copy_(torch.zeros(layer.weight.shape)),
    "normal_": lambda layer: nn.init.normal_(layer.weight),
    "xavier_uniform_": lambda layer: nn.init.xavier_uniform_(layer.weight),
    "trunc_normal_": lambda layer: nn.init.trunc_normal_(layer.weight),
    "orthogonal_": lambda layer: nn.init.orthogonal_(layer.weight),
    "row": lambda layer: layer.weight.data[0].zero_(),
    "item": lambda layer: layer.weight.__setitem__((0, 0), 1.0),
    "items": lambda layer: layer.weight.data.__setitem__(torch.tensor([1]), 1.0),
    "transposed": lambda layer: layer.weight.data.t()[0].mul_(2),
    "unbind": lambda layer: layer.weight.data.unbind()[1].add_(1),
    "out=": lambda layer: torch.zeros(layer.weight.shape, out=layer.weight),
    "foreach": lambda layer: torch._foreach_mul_([layer.weight], 2.0),
    "set_": lambda layer: layer.weight.set_(torch.zeros(3, dtype=torch.float64)),
    "in numpy": lambda layer: layer.weight.detach().numpy().__setitem__(0, 1.0),
    "apply_": lambda layer: layer.weight.data.apply_(abs),
    "assigned": lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(layer.weight.shape))),
    "assigned tensor": lambda layer: setattr(layer, "weight", torch.zeros(layer.weight.shape)),
    "assigned another": lambda layer: setattr(layer, "weight", layers()[0].weight),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_raises_and_changes_nothing(layer: CompressedLayer, write: str) -> None:
    before = copy.deepcopy(layer.state_dict())
    error = ValueError if write == "in numpy" else WeightError
    with torch.no_grad(), pytest.raises(error, match=r"read-only|materialize_"):
        WRITES[write](layer)
    with pytest.raises((RuntimeError, ValueError)):  # torch refuses some of them itself
        WRITES[write](layer)
    torch.testing.assert_close(dict(layer.state_dict()), dict(before), rtol=0, atol=0)


def test_freezing_the_weight_freezes_the_cores(layer: CompressedLayer) -> None:
    layer.weight.requires_grad_(False)
    assert not any(p.requires_grad for p in layer.tt.parameters())
    layer.weight.requires_grad = True
    assert all(p.requires_grad for p in layer.tt.parameters())
    layer.requires_grad_(False)
    for own in (layer.weight.detach(), layer.weight[0]):
        assert own.requires_grad_().requires_grad
        assert not layer.weight.requires_grad


def test_marks_are_those_of_the_parameters(layer: CompressedLayer) -> None:
    assert not hasattr(layer.weight, "_is_hf_initialized")
    layer.weight._is_hf_initialized = True
    assert layer.weight._is_hf_initialized
    assert all(p._is_hf_initialized for p in layer.tt.parameters())
    layer.tt.cores[0]._is_hf_initialized = False
    assert not getattr(layer.weight, "_is_hf_initialized", False)


@pytest.mark.parametrize("call", [lambda weight: weight.register_hook(print), lambda weight: weight.retain_grad()])
def test_a_hook_that_no_gradient_would_reach_raises(layer: CompressedLayer, call: Callable[[Tensor], None]) -> None:
    with pytest.raises(WeightError, match=r"expected a parameter, got the weight of a compress.*layer\.tt\.cores"):
        call(layer.weight)
    (2 * layer.weight).register_hook(print)  # of what one's own code makes of it


def test_a_tie_to_the_same_tensor_train_may_be_made_again() -> None:
    _, table, head = layers()
    head.weight = table.weight
    assert head.tt is table.tt
    with pytest.raises(TypeError, match="cannot assign"):
        nn.Linear(12, 50).weight = table.weight


def test_copies_and_pickles_are_plain_tensors(layer: CompressedLayer) -> None:
    buffer = io.BytesIO()
    torch.save(layer.weight, buffer)
    buffer.seek(0)
    for made in (copy.deepcopy(layer.weight), pickle.loads(pickle.dumps(layer.weight)), torch.load(buffer)):
        assert type(made) is Tensor
        torch.testing.assert_close(made.detach(), dense(layer).detach(), rtol=0, atol=0, check_stride=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_autocast(layer: CompressedLayer, dtype: torch.dtype, compute: torch.dtype) -> None:
    layer = copy.deepcopy(layer).to(dtype)
    exact = dense(layer).detach()
    with torch.autocast("cpu", dtype=compute):
        weight = layer.weight
        assert weight.dtype == dtype
        torch.testing.assert_close(weight.clone(), exact, rtol=0, atol=0, check_stride=False)
        y = F.linear(torch.ones(3, weight.shape[1], dtype=dtype), weight)
        assert y.dtype == (dtype if dtype == torch.float64 else compute)
        y.float().sum().backward()
        model = comera.materialize_(nn.Sequential(copy.deepcopy(layer)))
    torch.testing.assert_close(model[0].weight.detach(), exact, rtol=0, atol=0, check_stride=False)
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in layer.tt.parameters())


def test_torch_compile_reads_it(layer: CompressedLayer, materialized: list[TensorTrain]) -> None:
    def use(x: Tensor) -> Tensor:
        x = x.to(layer.weight.dtype)
        assert isinstance(layer.weight, Tensor)
        return F.linear(x, layer.weight) + layer.weight.shape[0]

    x = torch.randn(3, layer.weight.shape[1])
    compiled = torch.compile(use, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), use(x))
    grads = [torch.autograd.grad(f(x).square().sum(), list(layer.tt.parameters())) for f in (compiled, use)]
    torch.testing.assert_close(*grads)


def test_a_transformer_in_eval_uses_dense_weights_of_attention_alone(materialized: list[TensorTrain]) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)
    comera.tensorize_(encoder, comera.TensorizeConfig(linear=comera.TT(order=4, rank=4)))
    plain = comera.materialize_(copy.deepcopy(encoder)).train()
    encoder.eval()
    trains = [m.tt for m in encoder.modules() if isinstance(m, TTLinear)]
    assert trains
    x, mask = torch.randn(3, 7, 32), torch.zeros(3, 7, dtype=torch.bool)
    mask[1, 5:] = True
    for arguments in ({}, {"src_key_padding_mask": mask}):
        materialized.clear()
        with torch.no_grad():
            found, exact = encoder(x, **arguments), plain(x, **arguments)
        kept = ~mask if arguments else torch.ones_like(mask)
        torch.testing.assert_close(found[kept], exact[kept], rtol=1e-4, atol=1e-5)
        # nn.MultiheadAttention multiplies by its weights itself, in every forward
        attention = [module for layer in encoder.layers for module in layer.self_attn.modules()]
        assert set(materialized) == {module for module in attention if isinstance(module, TensorTrain)}
