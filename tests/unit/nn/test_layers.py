"""TTLinear, TTMEmbedding and TTMProjection against dense layers with the materialised weight, in float64."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from comera.errors import IdError, SpecError
from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMProjection
from comera.nn.linear import BTTLinear, CompressedLinear, TTLinear
from comera.nn.tensor_train import CompressedLayer, TensorTrain
from comera.tt.spec import BTTSpec, TTMSpec, TTSpec

F64 = torch.float64
TT_SPEC = TTSpec(12, 10, (4, 3), (2, 5), (1, 3, 4, 2, 1))
TTM_SPEC = TTMSpec(11, 5, (4, 3), (2, 3), (1, 4, 1))
BTT_SPEC = BTTSpec(12, 10, (3, 4), (2, 5), ((2, 0), (1, 4), (0, 1)))
LINEAR = pytest.mark.parametrize(("kind", "spec"), [(TTLinear, TT_SPEC), (BTTLinear, BTT_SPEC)], ids=["tt", "btt"])


def exact(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@LINEAR
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(12,), (0, 12), (1, 12), (2, 3, 12)])
def test_linear_equals_dense(
    kind: type[CompressedLinear], spec: TTSpec | BTTSpec, shape: tuple[int, ...], bias: bool
) -> None:
    layer = kind(spec, bias, dtype=F64)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    x = torch.randn(shape, dtype=F64)
    assert layer.weight.shape == (10, 12)
    exact(layer(x), F.linear(x, layer.weight, layer.bias))
    assert ("bias" in dict(layer.named_parameters())) == bias


@pytest.mark.parametrize("padding_idx", [None, 0, 7, -1])
def test_embedding_equals_dense(padding_idx: int | None) -> None:
    layer = TTMEmbedding(TTM_SPEC, padding_idx, dtype=F64)
    ids = torch.tensor([[0, 7, 10], [10, 10, 3]])
    exact(layer(ids), F.embedding(ids, layer.weight))
    if padding_idx is not None:
        assert layer.weight[padding_idx].abs().max() == 0
        assert layer.padding_idx == padding_idx % 11


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 7, -1])
@pytest.mark.parametrize("last", [True, False])
def test_embedding_bag_equals_dense(mode: Literal["sum", "mean"], padding_idx: int | None, last: bool) -> None:
    layer = TTMEmbeddingBag(TTM_SPEC, mode, padding_idx, last, dtype=F64)
    table = layer.weight.detach()
    dense = nn.EmbeddingBag(11, 5, mode=mode, padding_idx=padding_idx, include_last_offset=last, _weight=table)
    ids, offsets = torch.tensor([0, 7, 10, 10, 10, 3, 7]), torch.tensor([0, 3, 3, 7])
    exact(layer(ids, offsets), dense(ids, offsets))
    exact(layer(ids.view(7, 1)), dense(ids.view(7, 1)))
    if mode == "sum":
        weights = torch.randn(7, dtype=F64)
        exact(layer(ids, offsets, weights), dense(ids, offsets, weights))
    assert (layer.mode, layer.include_last_offset) == (mode, last)
    assert (layer.num_embeddings, layer.embedding_dim) == (11, 5)


def test_embedding_bag_has_no_largest() -> None:
    with pytest.raises(ValueError, match="expected mode 'sum' or 'mean', got 'max'"):
        TTMEmbeddingBag(TTM_SPEC, "max")  # type: ignore[arg-type]


def test_embedding_refuses_ids_outside() -> None:
    with pytest.raises(IdError, match="11"):
        TTMEmbedding(TTM_SPEC)(torch.tensor([3, 11]))


@pytest.mark.parametrize("padding_idx", [None, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_projection_equals_dense(bias: bool, padding_idx: int | None) -> None:
    layer = TTMProjection(TTM_SPEC, bias, padding_idx, dtype=F64)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    x = torch.randn(2, 3, 5, dtype=F64)
    exact(layer(x), F.linear(x, layer.weight, layer.bias))


def test_gradients_of_a_tied_pair_equal_those_of_the_materialised_weight() -> None:
    embedding = TTMEmbedding(TTM_SPEC, padding_idx=4, dtype=F64)
    head = TTMProjection(embedding.tt, padding_idx=4)
    assert head.bias is not None
    ids, target = torch.tensor([1, 4, 10, 1]), torch.tensor([4, 2, 0, 9])
    parameters = [*embedding.tt.parameters(), head.bias]

    def loss(rows: torch.Tensor, project: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(project(torch.tanh(rows)), target)

    def dense(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, embedding.weight, head.bias)

    got = torch.autograd.grad(loss(embedding(ids), head), parameters)
    want = torch.autograd.grad(loss(F.embedding(ids, embedding.weight), dense), parameters)
    for a, b in zip(got, want, strict=True):
        exact(a, b)


@LINEAR
def test_a_given_bias_is_kept_as_the_same_object(kind: type[CompressedLinear], spec: TTSpec | BTTSpec) -> None:
    bias = nn.Parameter(torch.ones(10))
    assert kind(spec, bias).bias is bias


def test_layers_that_share_blocks_get_the_gradient_of_both() -> None:
    layer = BTTLinear(BTT_SPEC, dtype=F64)
    tied, x = BTTLinear(layer.tt, bias=False), torch.randn(3, 12, dtype=F64)
    got = torch.autograd.grad((layer(x) * tied(x)).sum(), layer.tt.cores)
    want = torch.autograd.grad((F.linear(x, layer.weight, layer.bias) * F.linear(x, tied.weight)).sum(), layer.tt.cores)
    exact(torch.cat([g.flatten() for g in got]), torch.cat([g.flatten() for g in want]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TTLinear(TTM_SPEC), "TTLinear needs a TTSpec"),
        (lambda: TTLinear(BTT_SPEC), "TTLinear needs a TTSpec"),
        (lambda: BTTLinear(TensorTrain(TT_SPEC, init_std=1.0)), "BTTLinear needs a BTTSpec"),
        (lambda: TTMEmbedding(BTT_SPEC), "TTMEmbedding needs a TTMSpec"),
        (lambda: BTTLinear(BTT_SPEC, nn.Parameter(torch.zeros(9))), r"a bias of shape \(10,\).*got \(9,\)"),
        (lambda: TTMEmbedding(TT_SPEC), "TTMEmbedding needs a TTMSpec"),
        (lambda: TTMProjection(TensorTrain(TT_SPEC, init_std=1.0)), "TTMProjection needs a TTMSpec"),
        (lambda: TTLinear(TT_SPEC, nn.Parameter(torch.zeros(9))), r"a bias of shape \(10,\).*got \(9,\)"),
        (lambda: TTMEmbedding(TTM_SPEC, 11), "padding_idx must be an id of the table's 11 rows, got 11"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


@pytest.mark.parametrize(
    "layer", [TTLinear(TT_SPEC), BTTLinear(BTT_SPEC), TTMEmbedding(TTM_SPEC, 3), TTMProjection(TTM_SPEC, False, 3)]
)
def test_rank_zero_gives_the_constant_bias(layer: CompressedLayer) -> None:
    spec = layer.tt.spec.with_ranks(0)
    layer.tt.set_(spec, [torch.zeros(shape) for shape in spec.core_shapes])
    x = torch.tensor([1, 2]) if isinstance(layer, TTMEmbedding) else torch.randn(2, layer.in_features)
    assert layer(x).abs().max() == 0


def test_default_std_is_that_of_the_dense_layers() -> None:
    big = TTSpec(64, 64, (8, 8), (8, 8), (1, 8, 32, 8, 1))
    assert TTLinear(big).weight.std().item() == pytest.approx(1 / (3 * 64) ** 0.5, rel=0.02)
    assert BTTLinear(BTTSpec(64, 64, (8, 8), (8, 8), 2)).weight.std().item() == pytest.approx(
        1 / (3 * 64) ** 0.5, rel=0.02
    )
    table = TTMSpec(64, 64, (8, 8), (8, 8), (1, 64, 1))
    assert TTMEmbedding(table).weight.std().item() == pytest.approx(1.0, rel=0.02)


def test_layers_print_their_sizes_and_their_chain() -> None:
    assert "in_features=12, out_features=10, bias=True" in repr(TTLinear(TT_SPEC))
    assert "in_features=12, out_features=10, bias=True" in repr(BTTLinear(BTT_SPEC))
    assert "BTT 3·4 / 2·5 ranks 0 to 4, mean 1.33, 80 of 120 elements" in repr(BTTLinear(BTT_SPEC))
    assert "11, 5, padding_idx=3" in repr(TTMEmbedding(TTM_SPEC, 3))
    assert "out_features=11, bias=False, padding_idx=3" in repr(TTMProjection(TTM_SPEC, False, 3))
    assert "11, 5, padding_idx=3, mode='mean', include_last_offset=True" in repr(
        TTMEmbeddingBag(TTM_SPEC, "mean", 3, include_last_offset=True)
    )
    assert "TTM 4·3 × 2·3 ranks 4" in repr(TTMEmbedding(TTM_SPEC))
