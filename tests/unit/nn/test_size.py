"""The size of a model, and its ratios: one number for one thing, wherever it is read."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import comera
from comera.report.inspect import inspect
from comera.report.tables import times


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 500, bias=False)
        self.head.weight = self.embed.weight


UNTIED = comera.TensorizeConfig(comera.BTT(rank=1), comera.TTM(order=2, rank=8), tied="untie")
# what an untied head leaves: two tensor trains, or one beside the dense table
FORMATS = {
    "both": UNTIED,
    "the head alone": comera.TensorizeConfig(comera.BTT(rank=1), None, tied="untie"),
    "shared": comera.TensorizeConfig(comera.BTT(rank=1), comera.TTM(order=2, rank=8)),
}


@pytest.mark.parametrize("formats", FORMATS)
def test_the_ratio_is_the_same_wherever_it_is_read(formats: str, tmp_path: Path) -> None:
    model = Tied()
    dense = sum(p.numel() for p in model.parameters())
    report = comera.tensorize_(model, FORMATS[formats])
    size = comera.model_size(model)
    assert report.size == size
    assert size.dense_total == dense
    assert size.total == sum(p.numel() for p in model.parameters())
    assert size.ratio == dense / size.total

    comera.save_pretrained(model, tmp_path)
    fresh, empty = Tied(), Tied().to("meta")
    held = Tied()
    comera.tensorize_(held, FORMATS[formats])
    for loaded in (fresh, empty, held):
        comera.load_pretrained(loaded, tmp_path)
        assert comera.model_size(loaded) == size
    assert comera.model_size(copy.deepcopy(model)) == comera.model_size(pickle.loads(pickle.dumps(model))) == size

    text = inspect(tmp_path)
    assert f"{times(size.ratio)} smaller than dense" in text
    assert f"{times(size.tensorized_ratio)} smaller\n" in text
    rows = [row.split() for row in text.splitlines()]
    assert next(row for row in rows if row[:2] == ["all", "layers"])[2:4] == [f"{size.total:,}", times(size.ratio)]


def test_a_second_conversion_and_a_cut_keep_what_the_dense_model_was() -> None:
    model = Tied()
    dense = sum(p.numel() for p in model.parameters())
    comera.tensorize_(model, comera.TensorizeConfig(None, comera.TTM(order=2, rank=8), tied="untie"))
    report = comera.tensorize_(model, UNTIED)
    assert report.dense_total == dense
    comera.round_(model, 0.8)
    assert comera.model_size(model).dense_total == dense
    assert comera.model_size(torch.nn.Sequential(model, nn.Linear(3, 3))).dense_total == dense + 12
