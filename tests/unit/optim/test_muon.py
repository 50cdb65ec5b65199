"""Muon: orthogonalized momentum for dense weights and cores, AdamW for the rest."""

from copy import deepcopy
from math import sqrt

import pytest
import torch
from torch import Tensor, nn

import comera
from comera.errors import ConfigError
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.optim import AdamW, Muon
from comera.optim.core_matrices import as_matrices, from_matrices
from comera.optim.core_rates import ADAM, MUON, core_rates
from comera.optim.muon import orthogonalized
from comera.rank.prune import prune_
from comera.tt.shapes import btt_spec, tt_spec, ttm_spec
from comera.tt.spec import BTTSpec, Spec

from ...helpers.next_token_net import network, train

RAGGED = BTTSpec(12, 10, (3, 4), (2, 5), ((1, 4), (2, 3), (0, 1)))
SPECS = [
    tt_spec(48, 64, order=2, rank=6),
    tt_spec(64, 48, order=6, rank=9),
    tt_spec(97, 61, order=5, rank=4),
    btt_spec(48, 64, rank=3),
    RAGGED,
]
FORMATS = [
    comera.BTT(rank=2, blocks=(2, 4)),
    comera.BTT(rank=3),
    comera.TT(order=2, rank=8),
    comera.TT(order=5, rank=6),
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("spec", [*SPECS, ttm_spec(40, 60, order=3, rank=5)], ids=str)
def test_a_core_is_its_matrices_and_back(spec: Spec) -> None:
    for k, shape in enumerate(spec.core_shapes):
        core = drawn(*shape, seed=k)
        matrices = as_matrices(spec, k, core[None])[0]
        assert matrices.square().sum() == pytest.approx(float(core.square().sum()))
        assert torch.equal(from_matrices(spec, k, matrices[None])[0], core)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_norm_of_a_weight_is_at_most_the_product_of_those_of_the_matrices(spec: Spec) -> None:
    train = TensorTrain(spec, init_std=0.1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrices = [as_matrices(spec, k, core.detach()[None])[0] for k, core in enumerate(train.cores)]
    bound = torch.stack([torch.linalg.matrix_norm(each, 2).amax() for each in matrices]).prod()
    norm = torch.linalg.matrix_norm(train.dense().detach(), 2)
    assert norm <= bound * (1 + 1e-9)
    if isinstance(spec, BTTSpec):  # block-diagonal matrices and a permutation between them
        first, second = (torch.block_diag(*each) for each in matrices)
        inputs, outputs = spec.blocks
        places = torch.arange(first.shape[1]).view(inputs, outputs, -1).movedim(0, 1).flatten()
        whole = (first[:, places] @ second)[: spec.in_features, : spec.out_features]
        torch.testing.assert_close(whole, train.dense().detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 5, 7), (3, 12, 4), (2, 9, 9), (1, 1, 6), (2, 64, 8)])
def test_orthogonalized_matrices_keep_their_directions(shape: tuple[int, int, int]) -> None:
    x = drawn(*shape).float()
    (found,) = orthogonalized([x])
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    inner = u.mT @ found @ vh.mT  # diagonal: the singular values after the iteration
    values = inner.diagonal(dim1=1, dim2=2)
    assert values.min() > 0.3
    assert values.max() < 1.3
    torch.testing.assert_close(inner, torch.diag_embed(values), rtol=0, atol=1e-4)


def test_matrices_of_one_shape_are_orthogonalized_together_as_alone() -> None:
    batches = [drawn(*shape, seed=k).float() for k, shape in enumerate([(2, 6, 4), (3, 4, 6), (1, 6, 4), (1, 5, 5)])]
    batches.append(torch.zeros(2, 6, 4))
    for together, batch in zip(orthogonalized(batches), batches, strict=True):
        (alone,) = orthogonalized([batch])
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
        assert together.shape == batch.shape
    assert not orthogonalized(batches)[-1].any()


@pytest.mark.filterwarnings("ignore:.*CUDA initialization")
def test_dense_weights_move_as_by_the_muon_of_torch() -> None:
    """To the precision of torch's iteration, which is in bfloat16."""
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=False)
    other = deepcopy(layer)
    ours = Muon(layer, lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.Muon(other.parameters(), lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    before = layer.weight.detach().clone()
    for step in range(5):
        layer.weight.grad = drawn(40, 24, seed=step).float()
        other.weight.grad = layer.weight.grad.clone()
        ours.step()
        theirs.step()
    moved, expected = layer.weight - before, other.weight - before
    assert (moved - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_step_moves_the_weight_no_further_than_a_dense_one(spec: Spec) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tt = TensorTrain(spec, init_std=0.1, generator=torch.Generator().manual_seed(0))

    model, lr = Held(), 1e-3
    rates = core_rates(model.tt, MUON)
    assert rates is not None
    optimizer = Muon(model, lr=lr)
    before = model.tt.dense().detach().double()
    for k, core in enumerate(model.tt.cores):
        core.grad = drawn(*core.shape, seed=k).float()
    optimizer.step()
    moved = torch.linalg.matrix_norm(model.tt.dense().detach().double() - before, 2)
    allowed = lr * MUON.step(*spec.shape)
    assert 0 < moved < 1.3 * allowed  # singular values of the iteration reach 1.2
    for group in optimizer.param_groups:
        if group["orthogonal"]:
            (core,) = group["params"]
            (k,) = (k for k, each in enumerate(model.tt.cores) if each is core)
            assert group["lr"] == pytest.approx(lr * rates[k])


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_step_of_one_core_takes_its_share_of_a_dense_one(spec: Spec) -> None:
    allowed = 1e-3 * MUON.step(*spec.shape) / sqrt(spec.order)
    for k in range(spec.order):
        holder = nn.Module()
        holder.tt = TensorTrain(spec, init_std=0.1, generator=torch.Generator().manual_seed(0))
        before = holder.tt.dense().detach().double()
        optimizer = Muon(holder, lr=1e-3)
        core = holder.tt.cores[k]
        core.grad = drawn(*core.shape, seed=k).float()
        optimizer.step()
        moved = torch.linalg.matrix_norm(holder.tt.dense().detach().double() - before, 2)
        assert 0 < moved < 1.25 * allowed  # singular values of the iteration reach 1.2


@pytest.mark.parametrize("form", [None, *FORMATS], ids=str)
def test_it_learns_and_leaves_tables_and_excluded_layers_to_adamw(form: comera.BTT | comera.TT | None) -> None:
    model = network(form)
    optimizer = Muon(model, lr=2e-2, exclude=["3"])
    losses = train(model, optimizer, 40)
    assert losses[-1] < 0.3 * losses[0]
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, reach in (("1.tt", MUON), ("3.tt", ADAM)) if form else ():
        tensor_train = dict(named_trains(network(form)))[name]
        for core, multiple in zip(model.get_submodule(name).cores, core_rates(tensor_train, reach), strict=True):
            assert rates[core] == pytest.approx(2e-2 * multiple)
    by_adamw = {p for group in optimizer.param_groups if not group["orthogonal"] for p in group["params"]}
    moved_alike = {p for p in model[1].parameters() if p.ndim >= 2}
    assert not by_adamw & moved_alike
    assert by_adamw >= {*model[0].parameters(), *model[2].parameters(), *model[3].parameters()}
    assert all(set(optimizer.state[p]) == {"step", "momentum"} for p in moved_alike)
    assert all("exp_avg_sq" in optimizer.state[p] for p in by_adamw)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_moment_is_cut_with_its_core_and_a_loaded_state_goes_on_to_the_bit(form: comera.BTT | comera.TT) -> None:
    model = network(form)
    optimizer = Muon(model, lr=2e-2)
    train(model, optimizer, 5)
    with torch.no_grad():
        for _, tensor_train in named_trains(model):
            for gate in tensor_train.rank_params:
                gate[::3] = 0
    prune_(model, [optimizer])
    for _, tensor_train in named_trains(model):
        assert all(optimizer.state[core].get("momentum", core).shape == core.shape for core in tensor_train.cores)
    state, weights = deepcopy(optimizer.state_dict()), deepcopy(model.state_dict())
    losses = train(model, optimizer, 4, first=5)
    other = network(form)
    other.load_state_dict(weights)
    resumed = Muon(other, lr=1e-3)
    resumed.load_state_dict(state)
    assert train(other, resumed, 4, first=5) == losses


def test_the_head_that_a_model_names_is_left_to_adamw() -> None:
    class Named(nn.Sequential):
        def get_output_embeddings(self) -> nn.Module:
            return self[3]

    model = Named(*network(None))
    optimizer = Muon(model, lr=1e-3)
    (orthogonal,) = (group["params"] for group in optimizer.param_groups if group["orthogonal"])
    assert orthogonal == [model[1].weight]


def test_gradients_may_be_missing_and_ranks_zero() -> None:
    model = network(FORMATS[0])
    optimizer = Muon(model, lr=1e-2)
    model[1].bias.grad = torch.ones_like(model[1].bias)
    before = deepcopy(model.state_dict())
    optimizer.step()
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["1.bias"]
    empty = nn.Sequential(nn.Linear(8, 8))
    comera.tensorize_(empty, comera.TensorizeConfig(comera.TT(order=2, rank=2)))
    with torch.no_grad():
        for _, tensor_train in named_trains(empty):
            for gate in tensor_train.rank_params:
                gate.zero_()
    optimizer = Muon(empty, lr=1e-2)
    prune_(empty, [optimizer])
    empty(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert torch.isfinite(empty(torch.ones(2, 8))).all()


def test_a_group_that_is_added_later_is_updated_as_by_adamw() -> None:
    model, added = network(None), nn.Parameter(torch.ones(4, 4))
    optimizer, adamw = Muon(model), torch.optim.AdamW([expected := nn.Parameter(torch.ones(4, 4))], betas=(0.9, 0.95))
    optimizer.add_param_group({"params": [added], "lr": 1e-2, "weight_decay": 0.0})
    adamw.param_groups[0] |= {"lr": 1e-2, "weight_decay": 0.0}
    for parameter, each in ((added, optimizer), (expected, adamw)):
        parameter.square().sum().backward()
        each.step()
    assert torch.equal(added, expected)


def test_errors_say_what_to_do() -> None:
    model = network(None)
    with pytest.raises(ConfigError, match=r"momentum must be in \[0, 1\), got 1.5"):
        Muon(model, momentum=1.5)
    with pytest.raises(ConfigError, match="no layer's name matches 'classifer'"):
        Muon(model, exclude=["classifer"])
    with pytest.raises(ConfigError, match="lr must be a finite number"):
        Muon(model, lr=-1.0)
    model[1].weight.full_tensor = None  # as of a DTensor
    with pytest.raises(ConfigError, match=r"1 parameters are sharded, such as '1.weight': use AdamW"):
        Muon(model)


def test_a_gradient_scaler_unscales_matrices_too_and_skips_steps_with_infinite_gradients() -> None:
    plain, scaled = network(FORMATS[0]), network(FORMATS[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ours, theirs = Muon(plain, lr=1e-2), Muon(scaled, lr=1e-2)
    ids = torch.arange(40)
    for _ in range(3):
        plain(ids).square().mean().backward()
        ours.step()
        scaler.scale(scaled(ids).square().mean()).backward()
        scaler.step(theirs)
        scaler.update()
        ours.zero_grad()
        theirs.zero_grad()
    for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        for key, value in ours.state[p].items():  # the scale is no part of the moments
            torch.testing.assert_close(value, theirs.state[q][key])
    before = deepcopy((scaled.state_dict(), theirs.state_dict()["state"]))
    scaler.scale(scaled(ids).square().mean() * float("inf")).backward()
    scaler.step(theirs)
    after = scaled.state_dict(), theirs.state_dict()["state"]
    assert all(torch.equal(before[0][name], value) for name, value in after[0].items())
    for place, state in after[1].items():
        assert all(torch.equal(before[1][place][key], value) for key, value in state.items())


def test_it_is_adamw_where_nothing_is_a_matrix() -> None:
    one, two = (nn.Sequential(nn.Embedding(40, 8), nn.LayerNorm(8)) for _ in range(2))
    two.load_state_dict(one.state_dict())
    ids = torch.arange(20)
    for model, optimizer in (
        (one, Muon(one, lr=1e-2, weight_decay=0.1)),
        (two, AdamW(comera.param_groups(two, lr=1e-2, weight_decay=0.1), betas=(0.9, 0.95), fused=True)),
    ):
        for _ in range(4):
            optimizer.zero_grad()
            (model(ids) * drawn(20, 8).float()).sum().backward()
            optimizer.step()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q)
