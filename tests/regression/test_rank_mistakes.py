"""Mistakes of earlier implementations in rank adaptation that must not come back."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMProjection
from comera.nn.linear import TTLinear
from comera.nn.size import model_size
from comera.optim.param_groups import param_groups
from comera.pretrained import WEIGHTS, load_pretrained, save_pretrained
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage
from comera.rank.prune import prune_
from comera.trainer.loop import fit
from comera.tt.spec import TTMSpec, TTSpec

from ..unit.trainer.test_loop import CONFIG, Tiny, records

TT = TTSpec(6, 10, (3, 2), (5, 2), (1, 3, 5, 2, 1))


def test_parameter_groups_do_not_depend_on_names() -> None:
    model = nn.ModuleDict({"rank_params_of_cores": nn.Linear(3, 3), "dense": TTLinear(TT), "tt": nn.LayerNorm(3)})
    groups = {g["name"]: g["params"] for g in param_groups(model, lr=1e-3, rates="flat")}
    assert [len(groups[name]) for name in ("cores", "ranks", "dense", "dense_no_decay")] == [4, 3, 1, 4]
    assert groups["dense"][0] is model["rank_params_of_cores"].weight


def test_masked_ranks_are_really_cut() -> None:
    layer = TTLinear(TT)
    stored = model_size(layer).bytes
    with torch.no_grad():
        layer.tt.rank_params[1][1:] = 0.0
    prune_(layer)
    assert model_size(layer).bytes < stored / 2
    assert [p.untyped_storage().nbytes() // 4 for p in layer.tt.parameters()] == [
        p.numel() for p in layer.tt.parameters()
    ]


def test_ranks_1_and_0_adapt_and_prune_without_crashing() -> None:
    for ranks in (1, 0):
        layer = TTLinear(TT.with_ranks(ranks))
        optimizer = torch.optim.AdamW(param_groups(layer, lr=1e-3))
        controller = RankController(layer, early=EarlyStage(ridge=0.1)).attach(optimizer)
        layer(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        assert not controller.prune_().changed
        assert layer.spec == TT.with_ranks(ranks)


def test_a_loss_that_is_still_held_does_not_break_the_backward_after_pruning() -> None:
    # its graph keeps each parameter's gradient node alive, which remembers the shape from before
    layer = TTLinear(TT)
    loss = layer(torch.ones(2, 6)).sum()
    loss.backward()
    with torch.no_grad():
        layer.tt.rank_params[1][0] = 0.0
    prune_(layer)
    layer.zero_grad()
    layer(torch.ones(2, 6)).sum().backward()
    assert loss.grad_fn is not None
    assert [tuple(core.grad.shape) for core in layer.tt.cores] == list(layer.spec.core_shapes)


def test_a_pruned_gate_is_not_pushed_by_the_size() -> None:
    layer = TTLinear(TT)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    RankController(layer, early=EarlyStage(size_weight=10.0)).attach(optimizer)
    with torch.no_grad():
        layer.tt.rank_params[1][0] = 0.01
    layer(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert layer.tt.rank_params[1][0] == torch.tensor(0.01)


# --- gates of half precision ------------------------------------------------------------------------------------------


LINEAR, TABLE = TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1)), TTMSpec(12, 12, (3, 4), (3, 4), (1, 6, 1))


class Model(nn.Module):
    """Every layer that holds a tensor train."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bags = TTMEmbedding(TABLE), TTMEmbeddingBag(TABLE)
        self.linear, self.head = TTLinear(LINEAR), TTMProjection(self.table.tt)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.linear(self.table(ids) + self.bags(ids[:, None])))


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


# --- rates of a resumed run -------------------------------------------------------------------------------------------


SPECTRAL = replace(CONFIG, rates="spectral", weight_decay=1.0, steps=8)


class Elsewhere(Tiny):
    """The same model before it is loaded, with other cores."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.model:
            if isinstance(layer, TTLinear):
                with torch.no_grad():
                    layer.tt.cores[0].mul_(5)


class Stopping(Tiny):
    """Is interrupted after six steps."""

    def after_step(self, step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("task", [Tiny, Elsewhere])
def test_a_resumed_run_goes_on_at_the_rates_that_it_began_with(task: type[Tiny], tmp_path: Path) -> None:
    fit(Tiny(), SPECTRAL, tmp_path / "whole")
    assert fit(Stopping(), SPECTRAL, tmp_path / "run").stopped == "interrupted"
    fit(task(), SPECTRAL, tmp_path / "run", resume=True)
    losses = [[line["loss"] for line in records(tmp_path / each, "train")] for each in ("run", "whole")]
    assert losses[0] == losses[1]
