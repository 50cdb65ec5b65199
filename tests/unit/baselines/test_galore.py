"""GaLore's optimizer against its formula in plain algebra, and its state as tensors."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comera.baselines import galore
from comera.baselines.galore import GaLore, galore_adamw
from comera.errors import ConfigError
from comera.trainer.config import TrainConfig

GAP, RANK, SCALE, LR, CORE_LR, EPS = 3, 2, 0.25, 0.02, 0.05, 1e-6
BETAS = (0.9, 0.99)
CONFIG = TrainConfig(steps=1, lr=LR, core_lr=CORE_LR, betas=BETAS)


def by_hand(weight: Tensor, grads: list[Tensor]) -> Tensor:
    """W after steps on these gradients: AdamW in the space of the leading singular vectors of every GAP-th gradient."""
    tall = weight.shape[0] >= weight.shape[1]
    basis, low = torch.zeros(()), []
    after = weight
    for k, grad in enumerate(grads):
        if k % GAP == 0:
            left, _, right = torch.linalg.svd(grad, full_matrices=False)
            basis = right[:RANK].T if tall else left[:, :RANK]
        low.append(grad @ basis if tall else basis.T @ grad)
        after = after - CORE_LR * SCALE * (adam(low) @ basis.T if tall else basis @ adam(low))
    return after


def adam(grads: list[Tensor]) -> Tensor:
    """Adam's last step on these gradients, at a rate of 1."""
    first = second = torch.zeros_like(grads[0])
    for grad in grads:
        first = BETAS[0] * first + (1 - BETAS[0]) * grad
        second = BETAS[1] * second + (1 - BETAS[1]) * grad**2
    corrected = (1 - BETAS[1] ** len(grads)) ** 0.5 / (1 - BETAS[0] ** len(grads))
    return first / (second.sqrt() + EPS) * corrected


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_projected_weights_follow_the_formula_and_the_rest_adamw(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*shape[::-1]), nn.LayerNorm(shape[0]))
    optimizer = GaLore(rank=RANK, update_proj_gap=GAP, scale=SCALE).apply_(model).optimizer(CONFIG)
    weight, *others = model.parameters()
    before = [p.detach().clone() for p in (weight, *others)]
    grads = [[torch.randn_like(p) for p in (weight, *others)] for _ in range(2 * GAP + 1)]
    for step in grads:
        for p, grad in zip((weight, *others), step, strict=True):
            p.grad = grad.clone()
        optimizer.step()
    expected = by_hand(before[0], [step[0] for step in grads])
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-5)
    for index, p in enumerate(others, 1):
        own = [step[index] for step in grads]
        expected = before[index] - LR * sum((adam(own[:k]) for k in range(1, len(own) + 1)), torch.zeros_like(p))
        torch.testing.assert_close(p.detach(), expected.detach(), rtol=1e-4, atol=1e-5)


def test_the_state_is_tensors_and_numbers_and_continues_exactly() -> None:
    def train(model: nn.Module, optimizer: Any, steps: range) -> None:
        for k in steps:
            model(torch.randn(5, 6, generator=torch.Generator().manual_seed(k))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    method = GaLore(rank=RANK, update_proj_gap=4)
    whole, part, again = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(3))
    part.load_state_dict(whole.state_dict())
    optimizers = [method.apply_(model).optimizer(CONFIG) for model in (whole, part, again)]
    train(whole, optimizers[0], range(11))
    train(part, optimizers[1], range(6))  # not at a new projection
    state = optimizers[1].state_dict()
    assert all(isinstance(value, Tensor | int) for values in state["state"].values() for value in values.values())
    again.load_state_dict(part.state_dict())
    optimizers[2].load_state_dict(state)
    train(again, optimizers[2], range(6, 11))
    for p, q in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_groups_ranks_and_bytes() -> None:
    model = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 48), nn.Linear(48, 16), nn.Linear(16, 4))
    total = sum(p.numel() for p in model.parameters())
    applied = GaLore().apply_(model)
    assert [row.note for row in applied.rows] == [f"gradient projected to rank {rank}" for rank in (4, 4, 1)]
    assert {(row.before, row.after, row.dense == row.stored) for row in applied.rows} == {("Linear", "Linear", True)}
    assert applied.dense_total == total
    optimizer = applied.optimizer(CONFIG)
    named = {group["name"]: group for group in optimizer.param_groups}
    assert list(named) == ["projected_1", "projected_4", "dense", "dense_no_decay"]
    assert [group["lr"] for group in named.values()] == [CORE_LR, CORE_LR, LR, LR]
    assert (named["projected_4"]["update_proj_gap"], named["projected_4"]["scale"]) == (200, 0.25)
    assert "rank" not in named["dense"]
    model(torch.arange(4)).square().mean().backward()
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert applied.state_bytes == sum(value.numel() * value.element_size() for value in held)
    with torch.device("meta"):
        big = nn.Sequential(nn.Linear(768, 3072), nn.Linear(512, 512))
    assert [row.note.split()[-1] for row in GaLore().apply_(big).rows] == ["128", "128"]
    assert [row.note.split()[-1] for row in GaLore(rank=600).apply_(big).rows] == ["600", "512"]


def test_a_frozen_weight_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = GaLore().apply_(model).optimizer(CONFIG)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_it_needs_no_bitsandbytes() -> None:
    galore_adamw.cache_clear()
    optimizer = galore_adamw()([nn.Parameter(torch.ones(2))], lr=0.1, no_deprecation_warning=True)
    assert type(optimizer).__name__ == "GaLoreAdamW"
    assert "galore_torch" not in sys.modules
    assert "bitsandbytes" not in sys.modules


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    galore_adamw.cache_clear()
    said = "method galore needs the package galore-torch, which"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "galore_torch", None)
        with pytest.raises(ConfigError, match=rf"{said} is not installed: pip install 'comera\[baselines\]'"):
            galore_adamw()
    with monkeypatch.context() as patch:
        patch.setattr(galore.importlib, "import_module", lambda name: object())
        with pytest.raises(ConfigError, match=f"{said} is not the expected one"):
            galore_adamw()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "_comera_galore_torch.adamw", raising=False)
        patch.setitem(sys.modules, "transformers.utils.versions", None)
        with pytest.raises(ConfigError, match=f"{said} lacks transformers"):
            galore_adamw()
    assert galore_adamw()


def test_settings_out_of_range_are_refused() -> None:
    for name, value in (("rank", 0), ("update_proj_gap", 0), ("scale", -1.0)):
        with pytest.raises(ConfigError, match=rf"galore\.{name} must be"):
            GaLore(**{name: value})  # type: ignore[arg-type]
