"""A head tied to a table with a padding row: once it wrote into its logits, which are a view for exact vocabularies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import comera


class Tied(nn.Module):
    def __init__(self, rows: int, *, bias: bool) -> None:
        super().__init__()
        self.e, self.h = nn.Embedding(rows, 128, padding_idx=0), nn.Linear(128, rows, bias=bias)
        self.h.weight = self.e.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.h(torch.tanh(self.e(ids)))
        return logits


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("rows", "batch"), [(2048, 3), (2048, 400), (2039, 400)])
def test_a_tied_head_with_a_padding_row(rows: int, batch: int, bias: bool) -> None:
    torch.manual_seed(0)
    model = Tied(rows, bias=bias).double()
    comera.tensorize_(model, comera.TensorizeConfig(embedding=comera.TTM(rank=4)))
    dense = comera.materialize_(copy.deepcopy(model))
    assert dense.h.weight is dense.e.weight
    ids = torch.arange(batch) * 5 % rows  # the padding row among them
    probe = torch.randn(batch, rows, dtype=torch.float64)
    logits, exact = model(ids), dense(ids)
    torch.testing.assert_close(logits, exact, rtol=1e-10, atol=1e-12)
    if not bias:
        assert not logits[:, 0].any()
    (logits * probe).sum().backward()
    weight = model.e.tt.dense().index_fill(0, torch.tensor([0]), 0)
    wanted = [p for p in model.parameters() if p.requires_grad]
    found = [p.grad for p in wanted]
    rows_ND = torch.tanh(weight[ids])
    exact = rows_ND @ weight.t() + (0 if model.h.bias is None else model.h.bias)
    torch.testing.assert_close(found, list(torch.autograd.grad((exact * probe).sum(), wanted)), rtol=1e-9, atol=1e-10)
