"""Transforms of torch.func through compressed models, fused or not: they agree with those of the dense model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap
from transformers import BertConfig, BertForMaskedLM

import comera
from comera.fusion import fuse_
from comera.memory.recompute import recompute_

# torch's own table of forward derivatives
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")

IDS = torch.arange(60).view(5, 12) * 7 % 50


def bert(attention: str = "eager") -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=50, pad_token_id=0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation=attention,
    )  # fmt: skip
    model = BertForMaskedLM(config).double()
    comera.tensorize_(
        model, comera.TensorizeConfig(linear=comera.TT(order=4, rank=3), embedding=comera.TTM(order=2, rank=3))
    )
    return model


@pytest.fixture(params=["plain", "fused", "fused and recomputed"])
def model(request: pytest.FixtureRequest) -> BertForMaskedLM:
    made = bert("sdpa" if "fused" in request.param else "eager")  # torch's fused attention knows no transforms
    if "fused" in request.param:
        fuse_(made)
    if "recomputed" in request.param:
        recompute_(made)
    return made.train()


def split(model: nn.Module) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    def loss(parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        logits: Tensor = functional_call(model, parameters, (ids,)).logits
        return logits.square().mean()

    return {name: p.detach() for name, p in model.named_parameters()}, loss


def by_autograd(model: nn.Module, loss: Callable[..., Tensor], ids: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss(dict(zip(names, parameters, strict=True)), ids), parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}


def close(found: Any, exact: Any) -> None:
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-11)


def test_grad_and_vjp(model: BertForMaskedLM) -> None:
    parameters, loss = split(model)
    exact = by_autograd(model, loss, IDS)
    close(grad(loss)(parameters, IDS), exact)
    _, back = vjp(lambda p: loss(p, IDS), parameters)
    close(back(torch.tensor(1.0, dtype=torch.float64))[0], exact)


def test_gradients_of_each_sample(model: BertForMaskedLM) -> None:
    parameters, loss = split(model)
    found = vmap(grad(loss), in_dims=(None, 0))(parameters, IDS.unsqueeze(1))
    for k in range(len(IDS)):
        close({name: g[k] for name, g in found.items()}, by_autograd(model, loss, IDS[k : k + 1]))


def test_vmap_over_models() -> None:
    models = [bert(), bert()]
    with torch.no_grad():
        for p in models[1].parameters():
            p.mul_(1.1)
    stacked, buffers = stack_module_state(models)  # type: ignore[arg-type]
    base = copy.deepcopy(models[0])
    found = vmap(lambda p, b: functional_call(base, (p, b), (IDS,)).logits)(stacked, buffers)
    for k, each in enumerate(models):
        close(found[k], each(IDS).logits)


def test_jvp_and_second_derivatives(model: BertForMaskedLM) -> None:
    parameters, loss = split(model)
    torch.manual_seed(1)
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}
    exact = by_autograd(model, loss, IDS)
    _, found = jvp(lambda p: loss(p, IDS), (parameters,), (tangents,))
    close(found, sum((exact[name] * tangents[name]).sum() for name in exact))
    product = vjp(lambda p: grad(loss)(p, IDS), parameters)[1](tangents)[0]
    step = 1e-5
    moved = [{n: p + sign * step * tangents[n] for n, p in parameters.items()} for sign in (1, -1)]
    ahead, behind = (grad(loss)(p, IDS) for p in moved)
    differences = {n: (ahead[n] - behind[n]) / (2 * step) for n in parameters}
    torch.testing.assert_close(product, differences, rtol=1e-4, atol=1e-6)


def test_tied_parameters_are_put_back(model: BertForMaskedLM) -> None:
    own = dict(model.named_parameters())
    parameters, loss = split(model)
    before = loss(own, IDS)
    for _ in range(2):
        grad(loss)(parameters, IDS)
        loss({name: nn.Parameter(2 * p) for name, p in parameters.items()}, IDS)
        with pytest.raises(IndexError):
            loss(parameters, IDS + 50)
        assert all(p is own[name] for name, p in model.named_parameters())
        assert torch.equal(loss(own, IDS), before)
    other = copy.deepcopy(model).float()
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in other.parameters())
    loss({name: p.double() for name, p in other.named_parameters()}, IDS)
    assert all(p is own[name] for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 300])
def test_layers(rows: int, dtype: torch.dtype) -> None:
    """Every kind of layer and a large table, for which no dense one is made."""
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(40_000, 32, mode="mean", padding_idx=3)
    model = nn.Sequential(bag, nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).to(dtype)
    comera.tensorize_(model, comera.TensorizeConfig(embedding=comera.TTM(rank=4), linear=comera.TT(order=4, rank=3)))
    fuse_(model)
    ids = torch.randint(40_000, (rows, 4))
    ids[0, 0] = 3
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        out: Tensor = functional_call(model, parameters, (ids,))
        return out.square().sum()

    exact = by_autograd(model, loss, ids)
    near = {"rtol": 1e-8, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(grad(loss)(parameters, ids), exact, **near)
    each = vmap(grad(loss), in_dims=(None, 0))(parameters, ids.unsqueeze(1))
    torch.testing.assert_close({name: g.sum(0) for name, g in each.items()}, exact, **near)
    tangents = {name: torch.ones_like(p) for name, p in parameters.items()}
    _, found = jvp(lambda p: loss(p, ids), (parameters,), (tangents,))
    torch.testing.assert_close(found, torch.stack([g.sum() for g in exact.values()]).sum(), rtol=1e-3, atol=1e-3)


def test_the_lazy_weight() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(6, 8, dtype=torch.float64))
    comera.tensorize_(layer, comera.TensorizeConfig(linear=comera.TT(order=2, rank=2)))

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer[0]

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(self.layer.weight.dtype) @ self.layer.weight.t()).square().sum()

    reads = Reads()
    x = torch.randn(4, 6, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in reads.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(reads, parameters, (x,))

    close(grad(loss)(parameters, x), by_autograd(reads, loss, x))
    close(jacrev(loss, argnums=1)(parameters, x), torch.autograd.functional.jacobian(reads, x))
    close(hessian(loss, argnums=1)(parameters, x), torch.autograd.functional.hessian(reads, x))
