"""Mistakes of earlier implementations in rank adaptation that must not come back."""

import torch
from torch import nn

from comera.nn.embedding import TTMEmbedding
from comera.nn.linear import TTLinear
from comera.nn.size import model_size
from comera.optim.param_groups import param_groups
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage
from comera.rank.prune import prune_
from comera.rank.size import SizeTable, unpruned_size
from comera.tt.spec import TTMSpec, TTSpec

TT = TTSpec(6, 10, (3, 2), (5, 2), (1, 3, 5, 2, 1))


def test_a_forward_writes_no_mask_into_the_parameters() -> None:
    layer = TTLinear(TT)
    with torch.no_grad():
        layer.tt.rank_params[1][0] = 0.005
    before = [p.detach().clone() for p in layer.parameters()]
    layer(torch.ones(2, 6)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), before, strict=True))
    assert layer.tt.rank_params[1][0] == 0.005


def test_the_size_of_a_table_counts_its_column_modes() -> None:
    table = TTMEmbedding(TTMSpec(12, 12, (3, 4), (6, 2), (1, 7, 1)))
    assert unpruned_size(table.tt) == 3 * 6 * 7 + 7 * 4 * 2 == sum(core.numel() for core in table.tt.cores)
    assert SizeTable([table.tt]).surrogate().item() == unpruned_size(table.tt)


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
