"""nn.EmbeddingBag through tensorize_, materialize_, save_pretrained and load_pretrained."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from comera.convert import TTM, TensorizeConfig, materialize_, tensorize_
from comera.errors import CheckpointError
from comera.nn import TTMEmbedding, TTMEmbeddingBag
from comera.pretrained import load_pretrained, save_pretrained

SMALL = TensorizeConfig(embedding=TTM(order=2, rank=4))
EXACT = TensorizeConfig(embedding=TTM(order=2, rank=999), init="decompose", min_ratio=0.0)
IDS, OFFSETS = torch.tensor([0, 7, 99, 3, 3, 7, 50]), torch.tensor([0, 3, 3, 7])


class Bags(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(100, 16, mode="mean", padding_idx=3, include_last_offset=True, dtype=torch.float64)
        self.sum = nn.EmbeddingBag(100, 16, mode="sum", padding_idx=3, sparse=True, dtype=torch.float64)
        self.rows = nn.Embedding(100, 16, padding_idx=3, dtype=torch.float64)
        if tied:
            self.sum.weight = self.rows.weight = self.mean.weight

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        weights = torch.linspace(-1, 1, ids.numel(), dtype=torch.float64)
        sums = self.mean(ids, offsets) + self.sum(ids, offsets[:-1], weights)
        return torch.cat([sums, self.sum(ids.view(1, -1)), self.rows(ids)])


@pytest.mark.parametrize("tied", [False, True])
def test_bags_compute_the_same_after_both_conversions(tied: bool) -> None:
    torch.manual_seed(0)
    model = Bags(tied=tied)
    dense = model(IDS, OFFSETS)
    tensorize_(model, EXACT)
    torch.testing.assert_close(model(IDS, OFFSETS), dense, rtol=1e-9, atol=1e-9)
    materialize_(model)
    torch.testing.assert_close(model(IDS, OFFSETS), dense, rtol=1e-9, atol=1e-9)
    assert (model.mean.weight is model.rows.weight) == tied


def test_settings_are_kept_both_ways() -> None:
    model = Bags().eval()
    report = tensorize_(model, SMALL)
    assert [type(layer) for layer in model.children()] == [TTMEmbeddingBag, TTMEmbeddingBag, TTMEmbedding]
    assert [row.after for row in report.rows] == ["TTMEmbeddingBag", "TTMEmbeddingBag", "TTMEmbedding"]
    settings = [(layer.mode, layer.padding_idx, layer.include_last_offset) for layer in (model.mean, model.sum)]
    assert settings == [("mean", 3, True), ("sum", 3, False)]
    materialize_(model)
    assert type(model.mean) is type(model.sum) is nn.EmbeddingBag
    settings = [(layer.mode, layer.padding_idx, layer.include_last_offset) for layer in (model.mean, model.sum)]
    assert settings == [("mean", 3, True), ("sum", 3, False)]
    assert (model.mean.sparse, model.sum.sparse) == (False, True)
    assert not model.sum.training
    assert model.mean.weight[3].abs().max() == 0


def test_bags_on_the_meta_device_are_converted_without_their_tables() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.EmbeddingBag(10_000_000, 64, mode="sum"))
    tensorize_(model, TensorizeConfig(embedding=TTM(order=4, rank=8)))
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    assert model(torch.tensor([[0, 9_999_999]])).shape == (1, 64)


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_comes_back_into_a_dense_and_into_a_converted_one(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(0)
    model = Bags(tied=tied)
    tensorize_(model, SMALL)
    save_pretrained(model, tmp_path)
    exact = model(IDS, OFFSETS)
    for converted in (False, True):
        other = Bags(tied=tied)
        if converted:
            tensorize_(other, SMALL)
        load_pretrained(other, tmp_path)
        assert isinstance(other.mean, TTMEmbeddingBag)
        assert torch.equal(other(IDS, OFFSETS), exact)


def test_a_bag_does_not_become_an_embedding(tmp_path: Path) -> None:
    model = nn.Sequential(nn.EmbeddingBag(100, 16, mode="sum"))
    tensorize_(model, SMALL)
    save_pretrained(model, tmp_path)
    with pytest.raises(CheckpointError, match="expected a tensor train for a Embedding 100 -> 16, got TTMEmbeddingBag"):
        load_pretrained(nn.Sequential(nn.Embedding(100, 16)), tmp_path)
