"""Mistakes of earlier implementations that conversion must not repeat."""

import copy

import pytest
import torch
from torch import Tensor, nn

import comera
from comera.convert import TT, TTM, TensorizeConfig, materialize_, tensorize_
from comera.errors import ConversionError
from comera.nn.linear import TTLinear
from comera.nn.tensor_train import named_trains

CONFIG = TensorizeConfig(linear=TT(order=4, rank=4), embedding=TTM(order=2, rank=4))


def test_no_bias_is_invented_for_a_bias_free_layer() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    tensorize_(model, CONFIG)
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())
    assert materialize_(model)[0].bias is None


def test_no_mask_is_written_into_parameters_by_a_forward() -> None:
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64))
    tensorize_(model, CONFIG)
    with torch.no_grad():
        for _, tt in named_trains(model):
            tt.rank_params[0][1] = 5e-3  # pruned, but not zero
    before = copy.deepcopy(model.state_dict())
    model(torch.tensor([1, 2])).sum().backward()
    model.eval()(torch.tensor([1, 2]))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("order", [2, 4, 6, 8])
def test_the_materialized_std_is_that_of_the_dense_layer(order: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(512, 256), nn.Linear(256, 512))
    with torch.no_grad():
        model[0].weight.mul_(0.02)
    want = [layer.weight.std().item() for layer in model]
    tensorize_(model, TensorizeConfig(TT(order=order, rank=16), TTM(order=order // 2, rank=16), min_ratio=0))
    assert [layer.weight.std().item() for layer in model] == pytest.approx(want, rel=0.1)


@pytest.mark.parametrize(("in_modes", "out_modes"), [((64,), (4, 4, 4)), ((4, 4, 2, 2), (64,)), ((8, 8), (4, 4, 2, 2))])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_any_number_of_cores_and_any_rank_trains(
    in_modes: tuple[int, ...], out_modes: tuple[int, ...], rank: int
) -> None:
    spec = TT(rank=1, in_modes=in_modes, out_modes=out_modes).spec(64, 64)
    model = nn.Sequential(TTLinear(spec.with_ranks(rank)))
    x = torch.randn(5, 64)
    out = model(x)
    out.square().sum().backward()
    assert model[0].bias.grad is not None
    for parameter in model[0].tt.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
    if rank == 0:
        assert torch.equal(out, model[0].bias.expand(5, 64))


def test_layers_are_not_found_by_substrings_of_their_names() -> None:
    model = nn.ModuleDict({"linear": nn.LayerNorm(64), "norm": nn.Linear(64, 64), "conv_bias": nn.Embedding(64, 64)})
    report = tensorize_(model, CONFIG)
    compressed = {row.name: row.after for row in report.rows if row.compressed}
    assert compressed == {"norm": "TTLinear", "conv_bias": "TTMEmbedding"}


@pytest.mark.parametrize("config", [5, TT(rank=4), {"linear": None}])
def test_what_is_no_configuration_is_refused_with_what_to_write(config: object) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ConversionError, match=r"expected a TensorizeConfig .* ratio=10 .*, got"):
        tensorize_(model, config)  # type: ignore[arg-type]
    assert type(model[0]) is nn.Linear


class Tied(nn.Module):
    def __init__(self, rows: int, *, bias: bool) -> None:
        super().__init__()
        self.e, self.h = nn.Embedding(rows, 128, padding_idx=0), nn.Linear(128, rows, bias=bias)
        self.h.weight = self.e.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.h(torch.tanh(self.e(ids)))


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
    assert logits[:, 0].all()  # it had been zero
    (logits * probe).sum().backward()
    weight = model.e.tt.dense()
    wanted = [p for p in model.parameters() if p.requires_grad]
    found = [p.grad for p in wanted]
    rows_ND = torch.tanh(weight[ids])
    exact = rows_ND @ weight.t() + (0 if model.h.bias is None else model.h.bias)
    torch.testing.assert_close(found, list(torch.autograd.grad((exact * probe).sum(), wanted)), rtol=1e-9, atol=1e-10)
