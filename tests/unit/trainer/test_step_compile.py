"""TrainStep in mode compile: the same numbers, compiled anew after a cut, and never eager in silence."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from comera.fusion import fuse_
from comera.kernels import select
from comera.nn.linear import TTLinear
from comera.optim.param_groups import param_groups
from comera.rank.prune import prune_
from comera.trainer.compiled import CompiledLoss
from comera.trainer.step import StepResult, TrainStep
from comera.tt.spec import TTSpec

# what torch.compile itself does: it instantiates torch.autograd.Function for its bookkeeping, and scripts functions
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated"),
]

SPEC = TTSpec(8, 12, (2, 2, 2), (3, 2, 2), (1, 2, 4, 6, 4, 2, 1))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def make_step(loss: Any = loss_of, **options: Any) -> TrainStep:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(13, 8), TTLinear(SPEC), nn.GELU(), nn.Linear(12, 13))
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2, rank_lr=5e-2), fused=True)
    return TrainStep(model, loss, optimizer, max_grad_norm=0.5, **options)


def take(step: TrainStep, lengths: list[int]) -> list[StepResult]:
    results = []
    for k, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(k)
        results.append(step([torch.randint(13, (4, length), generator=generator) for _ in range(2)]))
    return results


def cut(step: TrainStep) -> None:
    with torch.no_grad():
        for k, d in enumerate(step.model[1].tt.rank_params):
            d[: d.numel() // 2] = 0.0 if k % 2 else -0.1
    assert prune_(step.model, [step.optimizer]).changed


def assert_close(ours: TrainStep, theirs: TrainStep, results: list[tuple[StepResult, StepResult]]) -> None:
    torch.testing.assert_close(*zip(*results, strict=True), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(list(ours.parameters), list(theirs.parameters), rtol=1e-4, atol=1e-5)


def test_compiled_steps_are_eager_steps_through_lengths_and_a_cut() -> None:
    lengths = [5, 7, 9, 6, 5, 8]
    eager, compiled = make_step(), make_step(mode="compile")
    compiled.loss = loss = CompiledLoss(loss_of, backend="aot_eager")
    first = list(zip(take(eager, lengths), take(compiled, lengths), strict=True))
    assert_close(eager, compiled, first)
    built = compiled.built
    assert 1 <= built < len(set(lengths))  # lengths share what is compiled
    cut(eager)
    cut(compiled)
    assert_close(eager, compiled, list(zip(take(eager, lengths), take(compiled, lengths), strict=True)))
    assert compiled.built == loss.compilations == 2 * built
    assert (compiled.mode, eager.mode, eager.built) == ("compile", "eager", 0)


@torch._inductor.config.patch(compile_threads=1)  # others would be processes, each of which imports torch
def test_the_compiler_itself() -> None:
    eager, compiled = make_step(), make_step(mode="compile")
    assert isinstance(compiled.loss, CompiledLoss)
    assert_close(eager, compiled, list(zip(take(eager, [5] * 4), take(compiled, [5] * 4), strict=True)))
    assert (compiled.mode, compiled.built) == ("compile", 1)


def test_too_many_versions_end_in_eager_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comera.trainer.compiled.VERSIONS", 1)
    lengths = [5, 7, 5, 9]
    eager, compiled = make_step(), make_step(mode="compile")
    compiled.loss = CompiledLoss(loss_of, backend="aot_eager")
    assert_close(eager, compiled, list(zip(take(eager, lengths), take(compiled, lengths), strict=True)))
    assert compiled.mode == "eager (compiled 1 times for as many shapes of batches: use fewer lengths)"
    assert compiled.built == 1


def test_a_compiler_that_fails_ends_in_eager_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda _: fail)
    eager, compiled = make_step(), make_step(mode="compile")
    assert_close(eager, compiled, list(zip(take(eager, [5, 7]), take(compiled, [5, 7]), strict=True)))
    assert compiled.mode == "eager (torch.compile failed: RuntimeError: no C++ compiler)"


@pytest.mark.skipif(select.unavailable_reason() is not None, reason="needs the C++ kernels")
def test_fused_models_with_our_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_gated() -> nn.Module:
        torch.manual_seed(0)
        mlp = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=24))
        fuse_(mlp)
        return mlp

    def step_of(model: nn.Module) -> TrainStep:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainStep(model, lambda model, x: model(x).square().mean(), optimizer, mode="compile")

    refused = step_of(make_gated())
    assert refused.mode.startswith("eager (the C++ kernels of a fused model are faster")
    assert refused([torch.ones(2, 64)]).loss > 0
    assert refused.built == 0
    assert step_of(LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=24))).mode == "compile"
    monkeypatch.setenv("COMERA_KERNELS", "none")
    assert step_of(make_gated()).mode == "compile"


def test_mistakes_in_the_model_are_raised_as_they_are() -> None:
    def wrong(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() + torch.zeros(3)[5]

    step = make_step(mode="compile")
    step.loss = CompiledLoss(wrong, backend="eager")
    with pytest.raises(IndexError):
        take(step, [5])
