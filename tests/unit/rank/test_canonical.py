"""The canonical form of tensor trains: the same weight, from singular directions."""

import pytest
import torch
from torch import nn

from comera.nn.linear import BTTLinear, TTLinear
from comera.rank.budget import canonicalize_
from comera.rank.size import unpruned_ranks, unpruned_size
from comera.tt.decompose import singular_values
from comera.tt.spec import BTTSpec, TTSpec

from ...helpers.layers_to_round import OPTIMIZERS
from ...helpers.oracle import padded_weight


@pytest.mark.parametrize("kind", ["adamw-fused", "adagrad", "nadam"])
def test_a_canonical_train_is_the_same_weight_and_its_slices_are_singular_directions(kind: str) -> None:
    torch.manual_seed(0)
    layer = TTLinear(TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1)), dtype=torch.float64)
    train = layer.tt
    with torch.no_grad():
        train.rank_params[1].copy_(torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5, 0.3, 1.0, 0.005, 1.5]))
    optimizer = OPTIMIZERS[kind](layer.parameters())
    layer(torch.ones(1, 12, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    dense, ranks, size = train.dense().detach(), unpruned_ranks(train), unpruned_size(train)
    assert ranks == (3, 6, 3)
    canonicalize_([train], [optimizer])
    torch.testing.assert_close(train.dense(), dense, rtol=0, atol=1e-12)
    assert (unpruned_ranks(train), unpruned_size(train)) == (ranks, size)  # what was pruned still is
    assert train.rank_params[1].tolist() == [1.0] * 6 + [0.0] * 3
    fresh = OPTIMIZERS[kind](layer.parameters())
    assert repr([optimizer.state[p] for p in train.parameters()]) == repr([fresh.state[p] for p in train.parameters()])
    # Zeroing one gate makes an error of its singular value, independently of the others.
    for k, sigma in enumerate(singular_values(train.spec, train.effective_cores())):
        for j in range(ranks[k]):
            with torch.no_grad():
                train.rank_params[k][j] = 0.0
                assert float((train.dense() - dense).norm()) == pytest.approx(float(sigma[j]), rel=1e-9)
                train.rank_params[k][j] = 1.0


def test_canonical_blocks_are_the_same_weight_and_their_components_singular_directions() -> None:
    torch.manual_seed(0)
    train = BTTLinear(BTTSpec(9, 11, (2, 5), (2, 6), ((3, 0), (1, 4))), dtype=torch.float64).tt
    with torch.no_grad():
        train.rank_params[0].copy_(torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5, 0.3, 1.0, 0.005]))
    dense, size = train.dense().detach(), unpruned_size(train)
    canonicalize_([train])
    torch.testing.assert_close(train.dense(), dense, rtol=0, atol=1e-12)
    assert train.spec.rows_of_ranks == ((3, 0), (1, 4))
    assert train.rank_params[0].tolist() == [1, 1, 0, 0, 1, 1, 1, 0]  # the block of one component was pruned whole
    assert unpruned_size(train) == size
    whole = padded_weight(train.spec, train.effective_cores())
    errors = []
    for j in train.unpruned()[0].nonzero().flatten():
        with torch.no_grad():
            train.rank_params[0][j] = 0.0
            errors.append(float((padded_weight(train.spec, train.effective_cores()) - whole).norm()))
            train.rank_params[0][j] = 1.0
    sigma = singular_values(train.spec, train.effective_cores())[0]
    assert sorted(errors, reverse=True) == pytest.approx(sigma[:5].tolist(), rel=1e-9)


def test_devices_of_a_context_do_not_reach_into_canonical_blocks() -> None:
    model = nn.ModuleList([BTTLinear(BTTSpec(9, 11, (2, 5), (2, 6), ((3, 0), (1, 4))))])
    with torch.device("meta"):
        canonicalize_(layer.tt for layer in model)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
