"""Mistakes of shared factors, once each: wrong gradients, frozen layers, mixed-up threads, heaps overrun."""

import copy
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import comera
from comera.fusion import fuse_, merge_cache, qkv
from comera.memory.recompute import recompute_
from comera.nn import TTLinear
from comera.ops.low_rank import low_rank

CONFIG = comera.TensorizeConfig(linear=comera.TT(order=4, rank=6), embedding=None)


def bert(dtype: torch.dtype = torch.float64, layers: int = 2) -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64, vocab_size=50,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config).to(dtype)
    comera.tensorize_(model, CONFIG)
    return model


IDS = torch.arange(80).view(4, 20) % 50


def masked_loss(model: BertForMaskedLM) -> Tensor:
    """As the code-lm recipe has it: the root is never called."""
    return model.cls(model.bert(IDS)[0][:, ::5]).square().mean()


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    model.zero_grad()
    loss().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("how", ["recompute_", "gradient_checkpointing_enable"])
def test_parts_called_by_themselves_recompute(how: str) -> None:
    plain, model = bert(), bert()
    fuse_(model)
    if how == "recompute_":
        recompute_(model)
    else:
        model.activation_checkpointing_enable()
        model.train()
    for _ in range(2):
        found, exact = (gradients(m, lambda m=m: masked_loss(m)) for m in (model, plain))
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


def test_the_merge_runs_though_the_root_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = bert(), []
    fuse_(model)
    real = merge_cache.merge
    monkeypatch.setattr(merge_cache, "merge", lambda specs, *rest: counts.append(len(specs)) or real(specs, *rest))
    masked_loss(model).backward()
    assert sorted(counts) == [1, 2, 2, 9]  # decoder; up; down; four in each layer and the transform of the head


def test_an_update_between_two_backwards_raises_as_it_does_dense() -> None:
    def run(model: nn.Module, x: Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        y = model(x)
        a, b = y.sum(), y.square().sum()
        a.backward(retain_graph=True)
        optimizer.step()
        b.backward()

    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
    model, x = copy.deepcopy(dense), torch.randn(200, 24)
    comera.tensorize_(model, comera.TensorizeConfig(linear=comera.TT(order=4, rank=3), embedding=None))
    fuse_(model)
    for each in (dense, model):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(each, x)


def test_a_layer_called_inside_a_backward_after_an_update_uses_the_new_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)).double()
    comera.tensorize_(model, comera.TensorizeConfig(linear=comera.TT(order=4, rank=3), embedding=None))
    fuse_(model)
    x, seen = torch.randn(200, 24, dtype=torch.float64), []
    model(x).sum().backward()

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):  # type: ignore[no-untyped-def]
            return y.clone()

        @staticmethod
        def backward(ctx, dy):  # type: ignore[no-untyped-def]
            with torch.no_grad():
                for p in model[0].parameters():
                    p.mul_(1.5)
            with torch.enable_grad():
                seen.append(model[0](x).detach())
            return dy

    model(x)
    Probe.apply(x.clone().requires_grad_()).sum().backward()
    torch.testing.assert_close(seen[0], x @ model[0].weight.t() + model[0].bias)


@pytest.mark.parametrize("family", ["bert", "llama", "vit"])
def test_a_fused_model_compiles_as_one_graph(family: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    input = IDS
    if family == "bert":
        sizes["num_hidden_layers"] = 2  # and the others trace a layer like another
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model: nn.Module = BertForMaskedLM(BertConfig(vocab_size=50, **sizes, **dropout))
    elif family == "vit":
        model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, **sizes))
        input = torch.randn(2, 3, 16, 16)
    else:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=True, **sizes))
    comera.tensorize_(model, comera.TensorizeConfig(linear=CONFIG.linear, embedding=comera.TTM(order=2, rank=4)))
    plain = copy.deepcopy(model)
    fuse_(model)
    torch._dynamo.reset()  # shapes that other tests compiled for make one more graph, of any shape
    graphs, backend = [], torch._dynamo.lookup_backend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=lambda *args: graphs.append(args[0]) or backend(*args))
    found, exact = compiled(input).logits, plain(input).logits
    assert len(graphs) == 1  # a break would make two, if `fullgraph` let it
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)
    found.square().mean().backward()
    exact.square().mean().backward()
    gradients = [[p.grad for p in each.parameters()] for each in (model, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("change", ["round_", "prune_", "load_pretrained"])
def test_a_backward_after_the_ranks_changed_raises(change: str, tmp_path: Path) -> None:
    model = bert(torch.float32)
    fuse_(model)
    smaller = copy.deepcopy(model)
    comera.round_(smaller, 0.5)
    comera.save_pretrained(smaller, tmp_path / "smaller")
    loss = model(IDS).logits.square().mean()
    if change == "round_":
        comera.round_(model, 0.3)
    elif change == "prune_":
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, TTLinear):
                    for d in layer.tt.rank_params:
                        d[1:] = 0.0
        comera.RankController(model).prune_()
    else:
        comera.load_pretrained(model, tmp_path / "smaller")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    model(IDS).logits.square().mean().backward()  # and the model goes on


def test_an_interrupted_forward_freezes_nothing() -> None:
    model = bert()
    fuse_(model)
    handle = model.bert.encoder.layer[1].attention.output.register_forward_pre_hook(
        lambda *_: signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        model(IDS)
    handle.remove()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = masked_loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(set(losses)) == 3
    plain = copy.deepcopy(model)
    fuse_(plain, enabled=False)
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits)


def test_threads_get_their_own_queries_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference in three threads and training in one, with a pause in each projection."""
    model = bert(torch.float32)
    fuse_(model)
    inputs = [(IDS * k + k) % 50 for k in (1, 2, 3)]
    with torch.no_grad():
        expected = [model(ids).logits for ids in inputs]
    wrong: list[float] = []
    stop = threading.Event()

    def slow(*args: Any) -> tuple[Tensor, ...]:
        outputs = low_rank(*args)
        stop.wait(0.0005)  # the others come in here
        return outputs

    monkeypatch.setattr(qkv, "low_rank", slow)

    def infer(k: int) -> None:
        with torch.no_grad():
            while not stop.is_set():
                difference = (model(inputs[k]).logits - expected[k]).abs().max().item()
                if difference > 1e-4:
                    wrong.append(difference)

    threads = [threading.Thread(target=infer, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    plain = bert(torch.float32)
    wanted = gradients(plain, lambda: plain(inputs[0]).logits.square().mean())
    for _ in range(15):
        found = gradients(model, lambda: model(inputs[0]).logits.square().mean())
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
