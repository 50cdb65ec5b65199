"""The residual norm kernel: against float64, and in the models that use it."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel
from transformers.models.bert.modeling_bert import BertOutput

import comera
from comera.fusion import sums
from comera.fusion.dropout import Dropout
from comera.fusion.fuse import fuse_
from comera.fusion.sums import add_and_layer_norm
from comera.kernels import select
from comera.kernels.cpp import residual_norm as kernels
from comera.memory.recompute import recompute_
from comera.ops.dropout import new_seed

from ...helpers.live import Live, assert_same

pytestmark = pytest.mark.skipif(
    select.unavailable_reason() is not None, reason=f"no C++ kernels: {select.unavailable_reason()}"
)
SHAPES = [(5, 9, 768), (3, 767), (40, 64), (70, 7), (6, 1), (2, 3, 100), (1, 5000), (17,), (0, 8), (4, 0), (300, 192)]


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


def seed(number: int = 5) -> Tensor:
    return torch.tensor(number)


def factors(shape: tuple[int, ...], p: float, number: int = 5) -> Tensor:
    return kernels.dropout(torch.ones(shape), seed(number), p) if p else torch.ones(shape)


def given(shape: tuple[int, ...], weight: bool, bias: bool) -> list[Any]:
    torch.manual_seed(len(shape) + sum(shape))
    z, x, dy = (torch.randn(shape) + 0.5 for _ in range(3))
    return [z, x, *(torch.randn(shape[-1]) if wanted else None for wanted in (weight, bias)), dy]


def plain(z: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, f: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x + f.to(z.dtype) * z, z.shape[-1:], weight, bias, eps)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_values_and_gradients(shape: tuple[int, ...], p: float, weight: bool, bias: bool) -> None:
    *single, dy = given(shape, weight, bias)
    wide = [None if t is None else t.double().requires_grad_() for t in single]
    exact = plain(*wide, factors(shape, p))
    grads = iter(torch.autograd.grad(exact, [t for t in wide if t is not None], dy.double()))
    drawn = seed() if p else None
    y, s, mean, rstd = kernels.residual_norm(*single, drawn, p, 1e-5)
    assert (mean.shape, rstd.shape) == (shape[:-1], shape[:-1])
    dx, dz, dweight, dbias = kernels.residual_norm_backward(dy, s, mean, rstd, single[2], drawn, p)
    if not p:
        assert dz.numel() == 0
        dz = dx
    found = {"dz": dz, "dx": dx, "dweight": dweight if weight else None, "dbias": dbias if bias else None}
    torch.testing.assert_close(y.double(), exact.detach(), rtol=1e-5, atol=2e-6)
    for name, grad in found.items():
        if grad is not None:
            # a row of one column has a large rstd, which blows rounding up; dweight and dbias add up rows
            size = max(1.0, *rstd.nan_to_num(1.0).flatten().tolist(), 1.0)
            atol = 3e-6 * size * (rstd.numel() ** 0.5 if name in ("dweight", "dbias") else 1.0)
            torch.testing.assert_close(grad.double(), next(grads), rtol=1e-4, atol=atol, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("shape", [*SHAPES[:-4], (0, 8), (300, 192)], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_rows_of_a_table_are_the_table_looked_up(shape: tuple[int, ...], p: float) -> None:
    z, _, weight, bias, _ = given(shape, True, True)
    table, rows = torch.randn(7, shape[-1]), torch.randint(0, 7, shape[:-1])
    drawn = seed() if p else None
    found = kernels.residual_norm(z, table, weight, bias, drawn, p, 1e-5, 0.0, False, rows)
    exact = kernels.residual_norm(z, F.embedding(rows, table), weight, bias, drawn, p, 1e-5)
    assert all(map(torch.equal, found, exact))


@pytest.mark.parametrize("row", [-1, 7, 2**62])
def test_rows_that_a_table_does_not_have_are_refused(row: int) -> None:
    rows = torch.tensor([0, 6, row])
    with pytest.raises(ValueError, match="expected numbers that fit"):
        kernels.residual_norm(torch.randn(3, 5), torch.randn(7, 5), None, None, None, 0.0, 1e-5, 0.0, False, rows)


def test_rows_that_fit_nothing_are_refused() -> None:
    z, table, rows = torch.randn(3, 5), torch.randn(7, 5), torch.zeros(3, dtype=torch.long)
    wrong = [
        (None, table, rows),
        (z, torch.randn(7, 4), rows),
        (z, torch.randn(5), rows),
        (z, table, rows[:2]),
        (z, table, rows.int()),
        (z, table, rows.to("meta")),
    ]
    for operands in wrong:
        with pytest.raises(RuntimeError, match="expected"):
            kernels.residual_norm(*operands[:2], None, None, None, 0.0, 1e-5, 0.0, False, operands[2])


def test_a_large_mean_costs_no_digits() -> None:
    x = torch.randn(64, 768) + 3000
    y, _, mean, _ = kernels.residual_norm(torch.zeros_like(x), x, None, None, None, 0.0, 1e-5)
    exact = F.layer_norm(x.double(), (768,))
    assert (mean - x.double().mean(-1)).abs().max() <= 2**-13  # half a unit in the last place of a float of 3000
    assert (y - exact).abs().max() < 2**-13 * 1.2


def test_other_layouts() -> None:
    z, x, dy = (torch.randn(40, 30, 20).transpose(0, 2) for _ in range(3))
    weight, bias = torch.randn(80)[::2], torch.randn(40, 2)[:, 1]
    outs = [kernels.residual_norm(*ts, seed(), 0.2, 1e-5) for ts in (
        (z, x, weight, bias), tuple(t.contiguous() for t in (z, x, weight, bias)))]  # fmt: skip
    grads = [
        kernels.residual_norm_backward(d, s, mean, rstd, w, seed(), 0.2)
        for d, w, (_, s, mean, rstd) in zip((dy, dy.contiguous()), (weight, weight.contiguous()), outs, strict=True)
    ]
    assert all(torch.equal(a, b) for pair in (outs, grads) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("cols", [768, 100])
def test_threads_do_not_change_what_belongs_to_rows(cols: int) -> None:
    z, x, weight, bias, dy = given((600, cols), True, True)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        y, s, mean, rstd = kernels.residual_norm(z, x, weight, bias, seed(), 0.1, 1e-5)
        results.append(
            [y, s, *kernels.residual_norm_backward(dy, s, mean, rstd, weight, seed(), 0.1), factors((600, cols), 0.1)]
        )
    (*rows, dw, db, f), (*rows2, dw2, db2, f2) = results
    assert all(torch.equal(a, b) for a, b in zip([*rows, f], [*rows2, f2], strict=True))
    torch.testing.assert_close((dw, db), (dw2, db2), rtol=1e-4, atol=1e-4)


def residual_norm(*given: Any) -> Tensor:
    return add_and_layer_norm(*given)[1]


def ends(width: int = 48, p: float = 0.2, affine: bool = True) -> tuple[Dropout, nn.LayerNorm]:
    torch.manual_seed(0)
    norm = nn.LayerNorm(width, elementwise_affine=affine)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return Dropout(p), norm


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("affine", [True, False])
def test_derivatives_of_any_order(p: float, affine: bool) -> None:
    drop, norm = ends(p=p, affine=affine)
    z, x, dy = (torch.randn(10, 48).requires_grad_() for _ in range(3))
    params = list(norm.parameters())
    torch.manual_seed(7)
    f = factors((10, 48), p, int(new_seed()) if p else 0)
    torch.manual_seed(7)
    found, exact = residual_norm(z, x, drop, norm), plain(z, x, norm.weight, norm.bias, f, norm.eps)
    assert "_ResidualNorm" in found.grad_fn.name()
    results = []
    for y in (found, exact):
        once = torch.autograd.grad(y, [z, x, *params], dy, create_graph=True)
        penalty = sum(g.square().sum() for g in once)
        twice = torch.autograd.grad(penalty, [z, x, dy, *params[:1]], create_graph=True)
        (thrice,) = torch.autograd.grad(sum(g.sin().sum() for g in twice), x)
        results.append([y, *once, *twice, thrice])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1.0, b.abs().max().item()))
    torch.manual_seed(7)
    first = torch.autograd.grad(residual_norm(z, x, drop, norm), [z, x, *params], dy)
    torch.testing.assert_close(first, tuple(results[0][1 : 3 + len(params)]), rtol=1e-4, atol=1e-5)


def test_the_sum_and_a_seed_are_kept() -> None:
    drop, norm = ends()
    z, x = (torch.randn(40, 48).requires_grad_() for _ in range(2))
    with Live(norm) as live:
        y = residual_norm(z, x, drop, norm)
        assert live.nbytes == 2 * y.nbytes + 2 * 40 * 4 + 8


def test_only_what_needs_a_gradient_gets_one() -> None:
    drop, norm = ends()
    z, x = torch.randn(4, 48), torch.randn(4, 48)
    norm.bias.requires_grad_(False)
    residual_norm(z, x, drop, norm).sum().backward()
    assert norm.weight.grad is not None
    assert norm.bias.grad is None
    norm.requires_grad_(False)
    assert not residual_norm(z, x, drop, norm).requires_grad
    z.requires_grad_()
    residual_norm(z, x, drop, norm).square().sum().backward()
    assert z.grad is not None


class Other(nn.LayerNorm):
    pass


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "change",
    [
        lambda z, x, drop, norm: (z.double(), x.double(), drop, norm.double()),
        lambda z, x, drop, norm: (z, x[:1], drop, norm),
        lambda z, x, drop, norm: (z.view(2, 5, 48), x.view(2, 5, 48), drop, nn.LayerNorm((5, 48))),
        lambda z, x, drop, norm: (z, x, drop, Other(48)),
        lambda z, x, drop, norm: (z, x, nn.AlphaDropout(0.1), norm),
        lambda z, x, drop, norm: (z, x, nn.Dropout(0.1, inplace=True), norm),
        lambda z, x, drop, norm: (z, x, nn.Dropout(1.0), norm),
        lambda z, x, drop, norm: (z, x, hooked(drop), norm),
        lambda z, x, drop, norm: (z, x, drop, hooked(norm)),
    ],
)
def test_the_modules_run_where_the_kernel_does_not(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drop, norm = ends()
    operands = torch.randn(10, 48), torch.randn(10, 48)
    monkeypatch.setattr(kernels, "residual_norm", None)
    z, x, drop, norm = change(*operands, drop, norm)
    torch.manual_seed(1)
    found = residual_norm(z.clone(), x, drop, norm)
    torch.manual_seed(1)
    assert torch.equal(found, norm(drop(z.clone()) + x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_a_sum_in_float32_is_one_operation_with_the_dtype_of_the_modules(dtype: torch.dtype) -> None:
    drop, norm = ends(p=0.0)
    z, x = torch.randn(10, 48).to(dtype), torch.randn(10, 48)
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = residual_norm(z, x, drop, norm), norm(drop(z) + x)
    assert found.dtype == plain.dtype == torch.float32
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


def test_the_modules_run_for_half_precision_under_autocast_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    drop, norm = ends()
    z, x = torch.randn(10, 48), torch.randn(10, 48)
    torch.manual_seed(1)
    assert not torch.equal(residual_norm(z, x, drop, norm), norm(x))
    monkeypatch.setattr(kernels, "residual_norm", None)
    with torch.autocast("cpu", torch.bfloat16):
        residual_norm(z.bfloat16(), x.bfloat16(), drop, norm)
        with pytest.raises(TypeError):
            residual_norm(z.bfloat16(), x, drop, norm)
    with pytest.raises(TypeError):
        residual_norm(z, x, drop, norm)
    monkeypatch.setenv("COMERA_KERNELS", "none")
    torch.manual_seed(1)
    found = residual_norm(z, x, drop, norm)
    torch.manual_seed(1)
    assert torch.equal(found, norm(drop(z) + x))


def test_in_evaluation_nothing_is_dropped_or_drawn() -> None:
    drop, norm = ends(p=1.0)
    z, x = torch.randn(10, 48), torch.randn(10, 48)
    state = torch.get_rng_state()
    torch.testing.assert_close(residual_norm(z, x, drop.eval(), norm), norm(z + x), rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)


# ---- models

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def model(drop: float = 0.1, kind: str = "bert") -> nn.Module:
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": drop, "attention_probs_dropout_prob": drop}
    made = {
        "bert": lambda: BertModel(BertConfig(**SIZES, **rates)),
        "roberta": lambda: RobertaModel(RobertaConfig(**SIZES, **rates, pad_token_id=0)),
    }[kind]()
    comera.tensorize_(made, comera.TensorizeConfig(linear=comera.TT(order=4, rank=6), embedding=None))
    return made.train()


def trained(made: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    made.zero_grad()
    out = made(input_ids=torch.arange(96).view(4, 24) * 7 % 63 + 1).last_hidden_state
    loss = out.square().mean() + out[..., 0].mean() + out[0].sin().sum()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "random": torch.rand(3), **grads}


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_fused_model_is_the_plain_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(0.0, kind)
    before, calls = trained(made), []
    fits = sums._fits
    monkeypatch.setattr(sums, "_fits", lambda *given: calls.append(fits(*given)) or calls[-1])
    report = fuse_(made)
    ends = [f"encoder.layer.{k}.{part}" for k in range(2) for part in ("attention.output", "output")]
    assert list(report.fused("residual norm")) == ends
    assert "4 residual norm" in str(report)
    after = trained(made)
    assert calls == [True] * 4  # those of the feed-forward parts too
    for name, exact in before.items():
        torch.testing.assert_close(after[name], exact, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


def test_fusing_twice_and_taking_it_back() -> None:
    made = model()
    before, twice = trained(made), copy.deepcopy(made)
    assert str(fuse_(twice)) == str(fuse_(twice))
    once = copy.deepcopy(made)
    fuse_(once)
    assert_same(trained(once), trained(twice))
    assert fuse_(twice, enabled=False).fused("residual norm") == fuse_(once).fused("residual norm")
    assert_same(trained(twice), before)
    assert not any("forward" in vars(module) for module in twice.modules())


def test_copies_and_pickles_run_on_their_own_weights() -> None:
    made = model()
    fuse_(made)
    before = trained(made)
    second, other = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.5)
    assert_same(trained(second), before)
    assert len(fuse_(other).fused("residual norm")) == 4
    assert_same(trained(other), before)


def test_a_forward_of_someone_else_stays() -> None:
    made = BertOutput(BertConfig(**SIZES))
    made.forward = own = lambda hidden_states, input_tensor: input_tensor  # type: ignore[method-assign]
    assert not fuse_(made).fused("residual norm")
    assert made.forward is own


def test_hooks_on_the_layers_run() -> None:
    made, ran = model(), []
    fuse_(made)
    made.encoder.layer[0].output.LayerNorm.register_forward_hook(lambda *_: ran.append("norm"))  # type: ignore[union-attr]
    made.encoder.layer[1].attention.output.dropout.register_forward_hook(lambda *_: ran.append("dropout"))  # type: ignore[union-attr]
    trained(made)
    assert ran == ["norm", "dropout"]


def test_recomputation_repeats_it_to_the_bit() -> None:
    made = model(0.3)
    fuse_(made)
    before = trained(made)
    recompute_(made)
    assert_same(trained(made), before)
    assert_same(trained(made), before)
