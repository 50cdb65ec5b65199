"""y = act(x A) B + bias: an activation between the factors of a tensor train."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers.oracle import operands
from tests.helpers.specs import tt
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from comera.adapters import TTAdapter, adapt_, merge_adapters_
from comera.convert import TT, TTM, TensorizeConfig, materialize_, tensorize_
from comera.errors import ConversionError, RankError, SpecError
from comera.export import serving_copy
from comera.fusion import MLP, QKV, fuse_, register_block
from comera.memory import recompute_
from comera.nn import TTLinear
from comera.ops.activations import ACTIVATIONS
from comera.ops.linear import tt_linear
from comera.optim import param_groups
from comera.pretrained import load_pretrained, save_pretrained
from comera.rank import EarlyStage, LateStage, RankController, canonicalize_, prune_, round_
from comera.tt import init_cores
from comera.tt.activations import SECOND_MOMENTS
from comera.tt.decompose import tt_svd
from comera.tt.dense import merge
from comera.tt.spec import TTSpec, spec_from_dict

SPECS = [
    tt((6,), (10,), 3),
    tt((3, 4), (5, 2), 3),
    tt((3, 4), (7,), 1, pad_in=1),
    tt((2, 3, 2), (3, 2, 2), 2, pad_in=1, pad_out=1),
    tt((4, 3), (2, 5), 0),
    tt((2, 2, 3), (5, 3), 4),
]


def oracle(spec: TTSpec, x: Tensor, bias: Tensor | None, cores: Sequence[Tensor], gates: Sequence[Tensor]) -> Tensor:
    """By the dense factors."""
    absorbed = [*(core * d for core, d in zip(cores, gates, strict=False)), cores[-1]]
    rank, (rows, cols) = spec.ranks[spec.split], spec.padded_shape
    a_IR = merge(absorbed[: spec.split]).reshape(rows, rank)[: spec.in_features]
    b_RO = merge(absorbed[spec.split :]).reshape(rank, cols)[:, : spec.out_features]
    act, _ = ACTIVATIONS[spec.activation or ""]
    y = act(x @ a_IR) @ b_RO
    return y if bias is None else y + bias


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 3), (40,)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_factors(
    spec: TTSpec, activation: str, lead: Sequence[int], bias: bool
) -> None:
    spec = replace(spec, activation=activation)
    x, b, *cores = operands(spec, lead, bias=bias)
    gates = [torch.rand(rank, dtype=torch.float64).add_(0.5).requires_grad_() for rank in spec.inner_ranks]
    inputs = [t for t in (x, b, *cores, *gates) if t is not None]
    want, found = oracle(spec, x, b, cores, gates), tt_linear(x, spec, cores, b, gates=gates)
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)
    dy = torch.randn_like(want)
    wanted = torch.autograd.grad(want, inputs, dy, allow_unused=True, materialize_grads=True)
    for one, other in zip(torch.autograd.grad(found, inputs, dy), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("spec", SPECS[:4], ids=str)
def test_gradcheck(spec: TTSpec) -> None:
    spec = replace(spec, activation="silu")
    x, bias, *cores = operands(spec, (3,))
    function = lambda x, bias, *cores: tt_linear(x, spec, cores, bias)  # noqa: E731
    assert torch.autograd.gradcheck(function, (x, bias, *cores), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x, bias, *cores), fast_mode=True)


def test_inputs_that_are_not_contiguous() -> None:
    spec = replace(SPECS[1], activation="gelu")
    _, bias, *cores = operands(spec, (3,))
    x = torch.randn(12, 5, dtype=torch.float64).t()
    found, want = tt_linear(x, spec, cores, bias), tt_linear(x.contiguous(), spec, cores, bias)
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)


# --- layers ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attend(x))

    def attend(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


CONFIG = TensorizeConfig(TT(order=4, rank=6, activation="silu"))


def blocks(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(16), Block(16)).to(dtype)
    tensorize_(model, CONFIG)
    return model


X = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_layers_say_so() -> None:
    model = nn.Sequential(nn.Linear(32, 64))
    report = tensorize_(model, CONFIG)
    assert str(report.rows[0].spec).endswith(" silu")
    assert "silu" in str(report)
    assert "silu" in repr(model)
    assert isinstance(model[0], TTLinear)
    assert TT(rank=4).spec(32, 64).activation is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("order", [2, 4, 6])
@pytest.mark.parametrize("std", [0.02, 0.1])
def test_outputs_start_with_the_std_of_a_dense_layer(activation: str, order: int, std: float) -> None:
    spec = TT(order=order, rank=32, activation=activation).spec(256, 512)
    cores = init_cores(spec, std, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.randn(400, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = tt_linear(x, spec, cores).std()
    assert float(found) == pytest.approx(std * 16, rel=0.2)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_second_moments(name: str) -> None:
    z = torch.linspace(-10, 10, 200_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2)
    found = (ACTIVATIONS[name][0](z).square() * density).sum() / density.sum()
    assert float(found) == pytest.approx(SECOND_MOMENTS[name], abs=1e-5)
    assert set(SECOND_MOMENTS) == set(ACTIVATIONS)


def test_a_folder_keeps_the_activation(tmp_path: Path) -> None:
    model = blocks()
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(nn.Sequential(Block(16), Block(16)).double(), tmp_path)
    assert loaded[0].q.spec == model[0].q.spec
    assert torch.equal(loaded(X), model(X))
    spec = model[0].q.spec
    assert spec_from_dict(spec.to_dict()) == spec
    plain = replace(spec, activation=None)
    assert "activation" not in plain.to_dict()  # as in folders of before
    assert spec_from_dict(plain.to_dict()) == plain


def test_transformers_own_folder_keeps_the_activation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 60}
    model = BertModel(BertConfig(num_hidden_layers=1, **small))  # type: ignore[arg-type]
    tensorize_(model, replace(CONFIG, embedding=None))
    model.save_pretrained(tmp_path)
    ids = torch.arange(10)[None]
    want = model.eval()(ids).last_hidden_state
    for loaded in (BertModel.from_pretrained(tmp_path), load_pretrained(BertModel(model.config), tmp_path)):
        assert loaded.pooler.dense.spec == model.pooler.dense.spec
        assert torch.equal(loaded.eval()(ids).last_hidden_state, want)


def test_a_ratio_chooses_its_ranks() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    report = tensorize_(model, TensorizeConfig(TT(order=4, activation="relu")), ratio=4)
    assert report.ratio >= 4
    assert {row.spec.activation for row in report.rows if row.spec} == {"relu"}


def test_ranks_fall_in_the_early_stage() -> None:
    model = blocks()
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2))
    ranks = RankController(model, early=EarlyStage(size_weight=10.0)).attach(optimizer)
    before = ranks.size()
    for _ in range(160):
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        ranks.observe(loss.detach())
        optimizer.step()
    assert ranks.size() < before
    assert ranks.prune_().after == ranks.size()


def test_torch_attention_keeps_its_output_layer_dense() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2), "up": nn.Linear(16, 64)})
    report = tensorize_(model, CONFIG)
    note = next(row.note for row in report.rows if row.name == "attention.out_proj")
    assert "multiplies by its weight" in note
    assert type(model["up"]) is TTLinear


def test_pruned_slices_go_without_a_trace() -> None:
    model = blocks()
    with torch.no_grad():
        for gates in model[0].q.tt.rank_params:
            gates[2:] = 0
    want = model(X)
    report = prune_(model)
    assert report.after < report.before
    torch.testing.assert_close(model(X), want, rtol=1e-10, atol=1e-10)
    assert model[0].q.spec.activation == "silu"


def test_recomputation_keeps_low_rank_activations_alone() -> None:
    model, other = blocks(), copy.deepcopy(blocks())
    recompute_(other)
    x = torch.randn(40, 16, dtype=torch.float64)[None]
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    parameters = list(zip(model.parameters(), other.parameters(), strict=True))
    wanted = torch.autograd.grad(model(x).square().sum(), [one for one, _ in parameters])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = other(x).square().sum()
    outside = sum(kept)
    for found, want in zip(torch.autograd.grad(loss, [own for _, own in parameters]), wanted, strict=True):
        assert torch.equal(found, want)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept.clear()
        model(x).square().sum()
    assert outside < sum(kept) / 10


def test_it_compiles_whole() -> None:
    model = blocks()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), model(X), rtol=1e-10, atol=1e-10)


def test_fused_blocks_leave_it_to_the_layers() -> None:
    register_block(Block, QKV(("q", "k", "v")), MLP("mlp", ups=("up",), activation="act", down="down"))
    model = blocks(torch.float32)
    x = X.float()
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    report = fuse_(model)
    assert {row.reason for row in report.left_alone} == {"q has an activation between its factors"}
    assert not report.fused("mlp")
    assert report.fused("activation")  # the one between the layers
    assert report.merged == 10
    for found, wanted in zip(torch.autograd.grad(model(x).square().sum(), list(model.parameters())), want, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_adapters_stand_beside_it_and_are_not_merged() -> None:
    model = blocks()
    want = model(X)
    adapt_(model, TTAdapter(rank=2), targets="*.q")
    assert torch.equal(model(X), want)
    with pytest.raises(ConversionError, match="no dense weight"):
        merge_adapters_(model, materialize=True)


# --- what it has not -------------------------------------------------------------------------------------------------


def test_what_needs_a_weight_is_refused() -> None:
    model = blocks()
    state = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ConversionError, match=r"silu\(x A\) B, .*no dense weight, at 0\.q\.tt"):
        materialize_(model)
    with pytest.raises(SpecError, match="no dense weight"):
        model[0].q.tt.dense()
    assert model[0].q.weight.shape == (16, 16)  # which costs nothing, as its dtype
    with pytest.raises(SpecError, match="no dense weight"):
        model[0].q.weight.sum()
    with pytest.raises(ConversionError, match=r"no form for a program: .*safetensors"):
        serving_copy(model)
    with pytest.raises(RankError, match="no singular values to round by"):
        round_(model, 0.5)
    with pytest.raises(RankError, match="no singular values to round by"):
        canonicalize_([model[0].q.tt])
    with pytest.raises(RankError, match="no singular values to round by"):
        RankController(model, late=LateStage(target_size=0.5))
    assert RankController(model).stage == "early"
    assert all(torch.equal(p, state[name]) for name, p in model.named_parameters())


def test_a_weight_is_not_decomposed_into_it() -> None:
    model = nn.Sequential(nn.Linear(32, 64))
    with pytest.raises(SpecError, match=r"0 \(Linear 32 -> 64\): .*init='random'"):
        tensorize_(model, replace(CONFIG, init="decompose"))
    assert type(model[0]) is nn.Linear
    with pytest.raises(SpecError, match="draw them at random"):
        tt_svd(torch.randn(12, 10), replace(SPECS[1], activation="relu"))


@pytest.mark.parametrize("activation", ["tanh", 3, ""])
def test_an_unknown_activation(activation: object) -> None:
    with pytest.raises(SpecError, match="activation to be one of gelu, gelu_tanh, relu, silu or None"):
        TT(rank=2, activation=activation)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="activation to be one of"):
        replace(SPECS[0], activation=activation)  # type: ignore[arg-type]


def test_tables_have_none() -> None:
    with pytest.raises(TypeError):
        TTM(rank=2, activation="silu")  # type: ignore[call-arg]
