"""Steps that ask tensors a question: each answer has its recording, and a step is that of mode eager to the bit."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from comera.graphs import cpu
from comera.graphs.recording import Recording
from comera.kernels.cpp import compiler
from comera.trainer.step import TrainStep

from ...helpers.recorded_steps import VOCABULARY, Loss, assert_equal, bert, make, of_class, run, state

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    made: list[Recording] = []

    class Seen(Recording):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(cpu, "Recording", Seen)
    return made


def llama() -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attention_dropout=0.1, **sizes)).train()


def padded(answer: str) -> Loss:
    """A mask as tokenizers make it, which transformers looks at; every third batch has no padding."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        mask[1:, 5:] *= (ids[:1, :1] % 3 == 0).to(mask.dtype)
        labels = ids[:, 0] % 2 if answer == "class" else ids
        found: Tensor = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        return found

    return loss


@pytest.mark.parametrize(("model", "answer"), [(bert, "class"), (llama, "next")])
def test_texts_with_padding_and_without(
    model: Callable[[], nn.Module], answer: str, recordings: list[Recording]
) -> None:
    found = []
    for mode in ("eager", "graph"):
        step, _ = make(mode, model, padded(answer))
        found.append((run(step, 24), state(step)))
    assert step.mode == "graph"
    assert step.built == 2
    assert len(recordings) == 4  # two lengths, with padding and without
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


class Counting(nn.Module):
    """Counts its calls in a buffer and draws random numbers, before it asks whether the ids are odd, bit by bit."""

    calls: Tensor

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        scale = torch.rand(3)
        for k in range(self.bits):
            if ids[0, k] % 2 == 1:
                scale = scale + torch.rand(3)
        return (scale * self.weight).square().sum()


def of_itself(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids)
    return loss


def both(bits: int, steps: int = 40) -> TrainStep:
    """The step in mode graph, the same as in mode eager."""
    found = []
    for mode in ("eager", "graph"):
        step, _ = make(mode, lambda: Counting(bits), of_itself)
        found.append((run(step, steps, lengths=(9,)), state(step)))
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])
    return step


def test_an_undone_replay_leaves_nothing(recordings: list[Recording]) -> None:
    step = both(bits=3)
    assert step.mode == "graph"
    assert len(recordings) == 8


def test_too_many_ways_run_eager_and_say_so(recordings: list[Recording]) -> None:
    step = both(bits=4)
    assert step.mode.startswith("eager (")
    assert f"more than {cpu.WAYS} ways" in step.mode
    assert Path(__file__).name in step.mode
    assert len(recordings) == cpu.WAYS


def test_a_step_that_changes_what_it_asks_runs_eager_and_says_so() -> None:
    """Its own batch: the recording that was just made comes to another answer."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        found = of_itself(model, ids)
        if ids[0, 0] % 3 == 0:
            found = 2 * found
        ids += 1
        return found

    step, _ = make("graph", lambda: Counting(bits=0), loss)
    run(step, 30, lengths=(9,))
    assert step.mode.startswith("eager (")
    assert Path(__file__).name in step.mode


def test_a_way_that_is_not_its_step_is_found() -> None:
    """Each recording is compared with the step, not the first alone."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        found = of_class(model, ids)
        if torch.equal(ids[0, 0] % 2, torch.tensor(1)):
            return found * (1.0 + next(ticks))
        return found

    ticks = count()
    step, _ = make("graph", bert, loss)
    run(step, 20, lengths=(9,))
    assert "what is recorded is not the step" in step.mode


def test_a_choice_that_never_changes_costs_one_recording(recordings: list[Recording]) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        found = of_class(model, ids)
        assert found > 0
        return found

    step, _ = make("graph", bert, loss)
    run(step, 12, lengths=(9,))
    assert (step.mode, len(recordings)) == ("graph", 1)
