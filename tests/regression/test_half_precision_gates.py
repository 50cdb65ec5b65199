"""Gates of a bfloat16 model move at small rates, and weight decay acts once per weight."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMProjection
from comera.nn.linear import TTLinear
from comera.optim.param_groups import param_groups
from comera.pretrained import WEIGHTS, load_pretrained, save_pretrained
from comera.tt.spec import TTMSpec, TTSpec

LINEAR, TABLE = TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1)), TTMSpec(12, 12, (3, 4), (3, 4), (1, 6, 1))


class Model(nn.Module):
    """Every layer that holds a tensor train."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bags = TTMEmbedding(TABLE), TTMEmbeddingBag(TABLE)
        self.linear, self.head = TTLinear(LINEAR), TTMProjection(self.table.tt)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.linear(self.table(ids) + self.bags(ids[:, None])))
        return logits


def gates(model: nn.Module) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if "rank_params" in name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_stay_in_float32_when_a_model_is_converted(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    assert {p.dtype for p in gates(model)} == {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if "rank_params" not in name} == {dtype}
    assert {p.dtype for p in gates(TTLinear(LINEAR, dtype=dtype))} == {torch.float32}
    assert {p.dtype for p in gates(model.double())} == {torch.float64}
    with torch.no_grad():
        model.linear.tt.rank_params[0].fill_(1.0001)
    assert (model.float().to(dtype).linear.tt.rank_params[0] == torch.tensor(1.0001)).all()  # never rounded on the way


def test_gates_of_a_bfloat16_model_move_at_a_small_rate() -> None:
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3, rank_lr=1e-3))
    target = torch.randn(12, 12)
    for _ in range(30):
        loss = (model(torch.arange(12)).float() - target).square().mean()
        loss.backward()
        assert {d.grad.dtype for d in gates(model) if d.grad is not None} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
    moved = torch.cat([(d.detach() - 1).abs() for d in gates(model)])
    assert (moved > 1e-3).float().mean() > 0.9


@pytest.mark.parametrize("rows", [1, 12, 600])
def test_layers_answer_in_their_dtype_with_gates_that_are_finer(rows: int) -> None:
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for d in gates(model):
            d.copy_(1 + 0.3 * torch.randn_like(d))
    half = Model().to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    exact = Model()
    exact.load_state_dict(half.state_dict())  # the cores' rounding apart
    ids = torch.randint(12, (rows,))
    y, wanted = half(ids), exact(ids)
    assert y.dtype == torch.bfloat16
    assert (y.float() - wanted).norm() < 0.02 * wanted.norm()
    y.sum().backward()
    wanted.sum().backward()
    for (name, p), q in zip(half.named_parameters(), exact.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.dtype == p.dtype
        assert (p.grad.float() - q.grad).norm() < 0.05 * q.grad.norm(), name


def test_files_with_gates_in_bfloat16_still_load(tmp_path: Path) -> None:
    model = Model().to(torch.bfloat16)
    save_pretrained(model, tmp_path)
    path = tmp_path / WEIGHTS
    with safe_open(path, framework="pt") as file:
        manifest = json.loads(file.metadata()["comera"])
    del manifest["checksum"]  # nor were there checksums
    tensors = {name: value.bfloat16() for name, value in load_file(path).items()}
    save_file(tensors, path, {"comera": json.dumps(manifest)})
    loaded = load_pretrained(Model().to(torch.bfloat16), tmp_path)
    assert {p.dtype for p in gates(loaded)} == {torch.float32}
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("modes", [((12,), (12,)), ((3, 4), (4, 3)), ((3, 2, 2), (2, 2, 3))])
def test_weight_decay_acts_once_per_weight(modes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    order = len(modes[0]) + len(modes[1])
    spec = TTSpec(12, 12, *modes, (1, *[2] * (order - 1), 1))
    model = nn.ModuleList([TTLinear(spec, bias=False), nn.Linear(12, 12, bias=False)])
    model[1].weight.data.copy_(model[0].tt.dense().t())
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2, weight_decay=0.5))
    for _ in range(100):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    torch.testing.assert_close(model[0].tt.dense().t(), model[1].weight, rtol=2e-3, atol=1e-6)
