"""TrainStep in mode compile: forward and loss as one graph, the same numbers, anew after a cut, and what is refused."""

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
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.rank.prune import prune_
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


def make_step(loss: Any = loss_of, *, late: LateStage | None = None, **options: Any) -> TrainStep:
    """A step of a small compressed model; with `late`, under a controller. dtype: of the model."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(13, 8), TTLinear(SPEC), nn.GELU(), nn.Linear(12, 13))
    model.to(options.pop("dtype", torch.float32))
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2, rank_lr=5e-2, weight_decay=0.1))
    controller = None
    if late is not None:
        early = EarlyStage(size_weight=0.2, ridge=1e-3)
        controller = RankController(model, early, late).attach(optimizer)
    return TrainStep(model, loss, optimizer, **{"max_grad_norm": 0.5} | options, controller=controller)


def compiled_step(loss: Any = loss_of, **options: Any) -> TrainStep:
    return make_step(loss, **{"backend": "aot_eager"} | options, mode="compile")


def take(step: TrainStep, lengths: list[int], *, first: int = 0, count: int = 2) -> list[StepResult]:
    results = []
    for k, length in enumerate(lengths, first):
        generator = torch.Generator().manual_seed(k)
        results.append(step([torch.randint(13, (4, length), generator=generator) for _ in range(count)]))
    return results


def cut(step: TrainStep) -> None:
    with torch.no_grad():
        for k, d in enumerate(step.model[1].tt.rank_params):
            d[: d.numel() // 2] = 0.0 if k % 2 else -0.1
    assert prune_(step.model, [step.optimizer]).changed


def assert_close(ours: TrainStep, theirs: TrainStep, results: list[tuple[StepResult, StepResult]]) -> None:
    torch.testing.assert_close(*zip(*results, strict=True), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(list(ours.parameters), list(theirs.parameters), rtol=1e-4, atol=1e-5)


def assert_equal(ours: TrainStep, theirs: TrainStep) -> None:
    """Parameters and all state, to rounding in float64."""
    tight = {"rtol": 1e-10, "atol": 1e-12}
    for p, q in zip(ours.parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(p, q, **tight)
        torch.testing.assert_close(dict(ours.optimizer.state[p]), dict(theirs.optimizer.state[q]), **tight)
    if ours.controller is not None and theirs.controller is not None:
        expected = ours.controller.state_dict().items()
        rounded = {key: pytest.approx(v, rel=1e-6) if isinstance(v, float) else v for key, v in expected}
        assert theirs.controller.state_dict() == rounded


def test_compiled_steps_are_eager_steps_through_lengths_a_late_stage_and_a_cut() -> None:
    lengths = [5, 7, 9, 8]
    options: dict[str, Any] = {"dtype": torch.float64, "late": LateStage(target_size=0.5, start_step=8, steps=3)}
    eager, compiled = make_step(**options), compiled_step(**options)
    assert_close(eager, compiled, list(zip(take(eager, lengths), take(compiled, lengths), strict=True)))
    assert_equal(eager, compiled)
    built = compiled.built
    assert 1 <= built < len(lengths)  # lengths share what is compiled
    cut(eager)
    cut(compiled)
    for _ in range(2):  # the late stage begins after the first
        assert_close(eager, compiled, list(zip(take(eager, lengths), take(compiled, lengths), strict=True)))
        assert_equal(eager, compiled)
    assert built < compiled.built <= 3 * built
    assert (compiled.mode, eager.mode, eager.built) == ("compile", "eager", 0)


@torch._inductor.config.patch(compile_threads=1)  # others would be processes, each of which imports torch
def test_the_compiler_itself() -> None:
    eager, compiled = make_step(late=LateStage()), compiled_step(late=LateStage(), backend="inductor")
    lengths = [5] * 4
    results = zip(take(eager, lengths, count=1), take(compiled, lengths, count=1), strict=True)
    assert_close(eager, compiled, list(results))
    assert (compiled.mode, compiled.built) == ("compile", 1)


def test_too_many_versions_end_in_eager_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comera.trainer.compiled.VERSIONS", 1)
    lengths = [5, 5, 7, 9]
    eager, compiled = make_step(), compiled_step()
    assert_close(eager, compiled, list(zip(take(eager, lengths), take(compiled, lengths), strict=True)))
    assert compiled.mode == "eager (compiled 1 times for as many shapes of batches: use fewer lengths)"
    assert compiled.built == 1


def test_a_compiler_that_fails_ends_in_eager_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda _: fail)
    eager, compiled = make_step(), compiled_step()
    assert_close(eager, compiled, list(zip(take(eager, [5, 7]), take(compiled, [5, 7]), strict=True)))
    assert compiled.mode == "eager (torch.compile failed: RuntimeError: no C++ compiler)"


def test_a_loss_that_breaks_the_graph_runs_eager_and_says_so() -> None:
    def breaks(model: nn.Module, batch: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return loss_of(model, batch)

    eager, compiled = make_step(breaks), compiled_step(breaks)
    assert_close(eager, compiled, list(zip(take(eager, [5, 5]), take(compiled, [5, 5]), strict=True)))
    assert compiled.mode.startswith("eager (torch.compile failed: Unsupported: ")


@pytest.mark.skipif(select.unavailable_reason() is not None, reason="needs the C++ kernels")
def test_fused_models_with_our_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_gated() -> nn.Module:
        torch.manual_seed(0)
        mlp = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=24))
        fuse_(mlp)
        return mlp

    def step_of(model: nn.Module) -> TrainStep:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainStep(model, lambda model, x: model(x).square().mean(), optimizer, mode="compile", backend="eager")

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

    step = make_step(wrong, mode="compile", backend="eager")
    with pytest.raises(IndexError):
        take(step, [5])
