"""Tied weights: layers of one Parameter share one tensor train, are untied, or stay dense, as the report says."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from comera.convert import TT, TTM, TensorizeConfig, TensorizeReport, materialize_, tensorize_
from comera.convert.registry import converters, register_converter
from comera.errors import ConversionError
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import TTLinear
from comera.nn.tensor_train import named_trains

SMALL = TensorizeConfig(linear=TT(order=4, rank=4), embedding=TTM(order=2, rank=4))
IDS = torch.tensor([[1, 2, 0], [59, 0, 3]])


class Tied(nn.Module):
    """Embedding and output head on one weight; pad is the embedding's padding row."""

    def __init__(self, pad: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 32, padding_idx=pad)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, 60, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(ids)).tanh())


def notes(report: TensorizeReport) -> dict[str, str]:
    return {row.name: row.note for row in report.rows}


@pytest.mark.parametrize("pad", [None, 0])
@pytest.mark.parametrize("bias", [True, False])
def test_embedding_and_head_share_one_train_and_come_back(pad: int | None, bias: bool) -> None:
    torch.manual_seed(0)
    model = Tied(pad, bias).to(torch.float64)
    kept = model.head.bias
    report = tensorize_(model, SMALL)
    assert isinstance(model.embed, TTMEmbedding)
    assert isinstance(model.head, TTMProjection)
    assert model.embed.tt is model.head.tt
    assert model.head.bias is kept
    assert [name for name, _ in named_trains(model)] == ["embed.tt", "mix.tt"]
    assert notes(report)["head"] == "tied to embed"
    head = report.rows[-1]
    assert (head.after, head.dense, head.stored, head.ratio) == ("TTMProjection", 0, 0, None)
    assert report.total == sum(p.numel() for p in model.parameters())
    assert report.dense_total == sum(p.numel() for p in Tied(pad, bias).parameters())

    want = model(IDS)
    want.sum().backward()
    materialize_(model)
    assert model.head.weight is model.embed.weight
    assert model.head.bias is kept
    torch.testing.assert_close(model(IDS), want, rtol=1e-10, atol=1e-10)
    assert model.embed.padding_idx == pad
    if pad is not None:  # an output, too, so it is a row like the others
        assert model.embed.weight[pad].abs().max() > 0


def test_decomposed_ties_keep_the_function() -> None:
    torch.manual_seed(0)
    model = Tied(pad=0).to(torch.float64)
    want = model(IDS)
    tensorize_(model, TensorizeConfig(TT(order=2, rank=32), TTM(order=2, rank=99), init="decompose", min_ratio=0))
    torch.testing.assert_close(model(IDS), want, rtol=1e-9, atol=1e-9)


def test_untie_gives_each_its_own_train() -> None:
    model = Tied(pad=0)
    report = tensorize_(model, replace(SMALL, tied="untie"))
    assert isinstance(model.embed, TTMEmbedding)
    assert isinstance(model.head, TTLinear)
    assert len(list(named_trains(model))) == 3
    assert (notes(report)["embed"], notes(report)["head"]) == ("untied from head", "untied from embed")
    materialize_(model)
    assert model.head.weight is not model.embed.weight
    assert model.head.weight.shape == (60, 32)


@pytest.mark.parametrize("tied", ["share", "untie"])
@pytest.mark.parametrize(("dense", "other"), [("head", "embed"), ("embed", "head")])
def test_a_tied_layer_that_is_left_dense_keeps_the_dense_weight(dense: str, other: str, tied: str) -> None:
    model = Tied()
    weight = model.embed.weight
    report = tensorize_(model, replace(SMALL, overrides={dense: None}, tied=tied))
    assert model.get_submodule(dense).weight is weight
    assert not isinstance(model.get_submodule(other), (nn.Linear, nn.Embedding))
    assert notes(report)[other] == f"untied from {dense} (left dense)"
    assert notes(report)[dense] == "left dense as configured"
    assert report.total == sum(p.numel() for p in model.parameters())
    assert report.dense_total == sum(p.numel() for p in Tied().parameters())
    model(IDS).sum().backward()


def test_a_head_of_a_model_whose_linear_layers_stay_dense_follows_its_table() -> None:
    model, config = Tied(), replace(SMALL, linear=None)
    report = tensorize_(model, config)
    assert model.head.tt is model.embed.tt
    assert notes(report)["head"] == "tied to embed"
    assert report.total < report.dense_total
    untied = Tied()
    tensorize_(untied, replace(config, tied="untie"))
    assert isinstance(untied.head, nn.Linear)


def test_two_tied_linear_layers_share_one_train() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    report = tensorize_(model, SMALL)
    assert model[0].tt is model[1].tt
    assert model[2].tt is not model[0].tt
    assert notes(report)["1"] == "tied to 0"
    materialize_(model)
    assert model[0].weight is model[1].weight


def test_two_tied_embeddings_and_a_head_share_one_train() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(60, 32), "b": nn.Embedding(60, 32), "head": nn.Linear(32, 60)})
    model["b"].weight = model["head"].weight = model["a"].weight
    tensorize_(model, replace(SMALL, overrides={"b": TTM(order=3, rank=2), "head": TT(rank=3)}))
    assert model["a"].tt is model["b"].tt is model["head"].tt
    assert model["a"].spec.order == 3  # the embedding that an override names decides


def test_overrides_that_contradict_each_other_on_one_weight_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(60, 32), "b": nn.Embedding(60, 32)})
    model["b"].weight = model["a"].weight
    config = replace(SMALL, overrides={"a": TTM(rank=2), "b": TTM(rank=3)})
    with pytest.raises(ConversionError, match="share a weight, but the overrides give them"):
        tensorize_(model, config)
    assert isinstance(model["a"], nn.Embedding)
    tensorize_(model, replace(config, tied="untie"))
    assert model["a"].tt is not model["b"].tt


def test_requires_grad_of_the_tied_weight_is_kept() -> None:
    model = Tied()
    model.embed.weight.requires_grad_(False)
    tensorize_(model, SMALL)
    assert not any(p.requires_grad for p in model.embed.parameters())
    assert model.head.bias.requires_grad
    materialize_(model)
    assert not model.embed.weight.requires_grad


class Custom(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.table = weight


@pytest.mark.parametrize("tied", ["share", "untie"])
def test_a_weight_that_another_module_uses_is_shared_with_nobody(tied: str) -> None:
    model = nn.ModuleDict({"tied": Tied(), "own": nn.Linear(64, 64)})
    model["custom"] = Custom(model["tied"].embed.weight)
    report = tensorize_(model, replace(SMALL, tied=tied))
    if tied == "share":
        assert isinstance(model["tied"].embed, nn.Embedding)
        assert model["tied"].embed.weight is model["tied"].head.weight is model["custom"].table
        for name in ("tied.embed", "tied.head"):
            assert "custom (Custom.table) uses it and cannot be converted; tied='untie'" in notes(report)[name]
    else:
        assert isinstance(model["tied"].embed, TTMEmbedding)
        assert notes(report)["tied.embed"] == "untied from tied.head, custom"


def test_a_parameter_of_the_root_module_is_named_so() -> None:
    model = Tied()
    model.register_parameter("table", model.embed.weight)
    report = tensorize_(model, SMALL)
    assert "the model itself (Tied.table) uses it" in notes(report)["embed"]


def test_a_table_that_cannot_be_converted_keeps_its_tied_head_dense() -> None:
    model = Tied()
    model.embed.max_norm = 1.0
    report = tensorize_(model, SMALL)
    assert isinstance(model.head, nn.Linear)
    assert "max_norm" in notes(report)["embed"]
    assert "embed (Embedding.weight) uses it and cannot be converted" in notes(report)["head"]


def test_tables_with_different_padding_rows_stay_dense() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(60, 32, padding_idx=0), "b": nn.Embedding(60, 32), "c": nn.Linear(64, 64)})
    model["b"].weight = model["a"].weight
    report = tensorize_(model, SMALL)
    assert "different padding_idx" in notes(report)["a"]
    assert isinstance(model["b"], nn.Embedding)


class InFirst(nn.Module):
    """A linear layer that stores its weight as (in, out)."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.rows, self.cols = rows, cols
        self.weight = nn.Parameter(torch.randn(rows, cols))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_weights_that_are_tied_transposed_stay_dense_but_convert_alone() -> None:
    shape = replace(
        converters()[nn.Linear],
        shape=lambda layer: (layer.rows, layer.cols),
        std=lambda layer: 0.1,
        build=lambda layer: InFirst(layer.in_features, layer.out_features),
        in_first=True,
    )
    register_converter(InFirst, shape)
    try:
        model = nn.ModuleDict({"a": InFirst(64, 32), "b": nn.Linear(64, 32), "c": nn.Linear(64, 64)})
        model["b"] = nn.Linear(32, 64)
        model["b"].weight = model["a"].weight
        report = tensorize_(model, SMALL)
        assert "transposed to each other" in notes(report)["a"]
        config = TensorizeConfig(TT(order=2, rank=32), tied="untie", init="decompose", min_ratio=0)
        x = torch.randn(3, 64)
        want = model["a"](x)
        tensorize_(model, config)
        torch.testing.assert_close(model["a"](x), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(materialize_(model)["a"](x), want, rtol=1e-4, atol=1e-4)
        assert model["a"].weight.shape == (64, 32)
    finally:
        converters().pop(InFirst)


def test_ties_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Tied(pad=0)
    tensorize_(model, SMALL)
    model.to_empty(device="cpu")
    assert model.embed.tt is model.head.tt
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert model(IDS).isfinite().all()


def test_ties_survive_a_copy() -> None:
    model = Tied()
    tensorize_(model, SMALL)
    other = copy.deepcopy(model)
    assert other.embed.tt is other.head.tt
    assert other.embed.tt is not model.embed.tt
