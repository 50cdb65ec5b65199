"""TensorTrain: parameters, pure masking, replacing its numbers, the meta device."""

import copy

import pytest
import torch
from torch import nn

from comera.errors import SpecError
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import TTLinear
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.tt.dense import absorb, materialize
from comera.tt.spec import TTMSpec, TTSpec

TT_SPEC = TTSpec(12, 10, (4, 3), (2, 5), (1, 3, 4, 2, 1))
TTM_SPEC = TTMSpec(11, 6, (4, 3), (2, 3), (1, 4, 1))


def train(spec: TTSpec | TTMSpec = TT_SPEC, **options: object) -> TensorTrain:
    return TensorTrain(spec, init_std=0.5, dtype=torch.float64, **options)


def test_parameters_are_cores_and_rank_parameters_of_the_spec() -> None:
    tt = train()
    assert [tuple(core.shape) for core in tt.cores] == list(TT_SPEC.core_shapes)
    assert [d.tolist() for d in tt.rank_params] == [[1.0] * r for r in TT_SPEC.inner_ranks]
    assert all(p.dtype == torch.float64 and p.requires_grad for p in tt.parameters())


def test_the_same_generator_draws_the_same_cores() -> None:
    a, b = (train(generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.cores, b.cores, strict=True))


def test_inactive_slices_are_exactly_zero_and_nothing_is_written() -> None:
    tt = train()
    with torch.no_grad():
        tt.rank_params[1].copy_(torch.tensor([0.5, 1e-2, -3.0, 2.0]))  # the threshold itself is inactive
    before = copy.deepcopy(tt.state_dict())
    kept = [d.clone() for d in tt.rank_params]
    kept[1][1:3] = 0
    assert tt.unpruned()[1].tolist() == [True, False, False, True]
    assert torch.equal(tt.dense(), materialize(TT_SPEC, absorb(list(tt.cores), kept)))
    assert all(torch.equal(value, tt.state_dict()[key]) for key, value in before.items())


def test_inactive_rank_parameters_get_no_gradient() -> None:
    tt = train()
    with torch.no_grad():
        tt.rank_params[0][1] = 0.0
    tt.dense().square().sum().backward()
    grad = tt.rank_params[0].grad
    assert grad is not None
    assert (grad != 0).tolist() == [True, False, True]


def test_set_keeps_parameter_objects_and_copies() -> None:
    tt = train()
    objects = list(tt.parameters())
    smaller = TT_SPEC.with_ranks(1)
    cores = [torch.randn(shape) for shape in smaller.core_shapes]
    tt.dense().sum().backward()
    tt.set_(smaller, cores, [torch.full((r,), 2.0) for r in smaller.inner_ranks])
    assert all(a is b for a, b in zip(objects, tt.parameters(), strict=True))
    assert all(p.grad is None and p.dtype == torch.float64 for p in tt.parameters())
    cores[0].zero_()
    assert tt.cores[0].abs().min() > 0
    torch.testing.assert_close(tt.dense().abs().max() > 0, torch.tensor(True))


def test_set_refuses_other_shapes_and_orders() -> None:
    tt = train()
    with pytest.raises(SpecError, match="expected cores and gates of shapes"):
        tt.set_(TT_SPEC, [torch.zeros(1)] * 4)
    other = TTSpec(12, 10, (12,), (10,), (1, 3, 1))
    with pytest.raises(SpecError, match="expected cores and gates"):
        tt.set_(other, [torch.zeros(s) for s in other.core_shapes])
    assert tt.spec == TT_SPEC


def test_from_numbers_draws_nothing() -> None:
    cores = [torch.randn(shape, dtype=torch.float64) for shape in TT_SPEC.core_shapes]
    state = torch.get_rng_state()
    tt = TensorTrain.from_tensors(TT_SPEC, cores, init_std=0.1, threshold=0.2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(tt.dense(), materialize(TT_SPEC, cores), rtol=1e-12, atol=0)
    assert (tt.init_std, tt.threshold, tt.cores[0].device.type) == (0.1, 0.2, "cpu")
    assert tt.cores[0].data_ptr() != cores[0].data_ptr()


def test_meta_then_to_empty_then_reset_gives_the_wanted_std() -> None:
    spec = TTSpec(64, 64, (8, 8), (8, 8), (1, 8, 16, 8, 1))
    layer = TTLinear(TensorTrain(spec, init_std=0.3, device="meta"))
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu").reset_parameters()
    assert layer.bias is not None
    assert layer.bias.abs().max() == 0
    assert layer.weight.std().item() == pytest.approx(0.3, rel=0.02)


def test_named_trains_gives_a_shared_chain_once() -> None:
    embedding = TTMEmbedding(TTM_SPEC)
    model = nn.ModuleDict({"embed": embedding, "lin": TTLinear(TT_SPEC), "head": TTMProjection(embedding.tt)})
    assert [name for name, _ in named_trains(model)] == ["embed.tt", "lin.tt"]
