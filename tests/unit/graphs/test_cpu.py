"""Mode graph on a CPU: forward and backward from recordings are those of the step, to the bit, or are refused."""

import gc
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import comera
from comera.errors import IdError
from comera.graphs import cpu
from comera.graphs.cpu import CpuRecorder
from comera.graphs.pool import Pool
from comera.graphs.recording import Recording
from comera.kernels.cpp import compiler, memory
from comera.memory.recompute import recompute_
from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag
from comera.nn.linear import TTLinear
from comera.ops.cross_entropy import low_rank_cross_entropy
from comera.rank.objective import LateStage
from comera.trainer.step import TrainStep
from comera.tt.spec import TTMSpec, TTSpec

from ...helpers.recorded_steps import VOCABULARY, Loss, assert_equal, bert, ids_of, make, of_class, run, state

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")


class Small(nn.Module):
    """A table as TT-matrix, batch norm, dropout, and a compressed layer before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TTMEmbedding(TTMSpec(VOCABULARY, 48, (5, 6), (6, 8), (1, 6, 1)))
        self.norm = nn.BatchNorm1d(48)
        self.layer = TTLinear(TTSpec(48, 48, (6, 8), (8, 6), (1, 6, 20, 6, 1)))
        self.head = nn.Linear(48, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.table(ids).flatten(0, 1))
        return self.head(F.dropout(self.layer(hidden), 0.2, self.training))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]), ids[:, 1:].flatten())


def llama() -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attn_implementation="sdpa", **sizes)).train()
    comera.tensorize_(model, comera.TensorizeConfig(comera.BTT(rank=2), None))
    comera.fuse_(model)
    return model


def recomputed() -> nn.Module:
    model = bert()
    recompute_(model)
    return model


def of_next(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


MODELS = {"bert": (bert, of_class), "recompute": (recomputed, of_class), "llama": (llama, of_next)}


@pytest.mark.parametrize("kernels", ["all", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_recorded_steps_are_the_steps(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two lengths in turns, with dropout, in float32, with tensors that are large for the pools of memory."""
    monkeypatch.setenv("COMERA_KERNELS", kernels)
    for size in ("kernels.cpp.memory.LARGE", "graphs.pool.LEAST"):
        monkeypatch.setattr(f"comera.{size}", 2**10)
    (eager, _), (graph, _) = (make(mode, *MODELS[name]) for mode in ("eager", "graph"))
    ours = run(eager), state(eager)
    torch.manual_seed(2)
    theirs = run(graph), state(graph)
    assert (graph.mode, graph.built) == ("graph", 2)
    assert ours[0] == theirs[0]
    assert_equal(ours[1], theirs[1])


def test_half_precision_and_accumulation() -> None:
    def both(step: TrainStep) -> dict[str, Tensor]:
        torch.manual_seed(2)
        for k in range(8):
            step([ids_of(k, (9,)), ids_of(k + 100, (9,))], torch.tensor([1.0, 3.0 + k], dtype=torch.float64))
        return state(step)

    steps = [make(mode, bert, of_class, precision="bf16")[0] for mode in ("eager", "graph")]
    assert_equal(*map(both, steps))
    assert steps[1].mode == "graph"


def test_tables_batch_norm_and_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose memory changes is recorded anew, and one without recordings (`warm_ups`) is the same to the bit."""
    late = LateStage(target_size=0.5, start_step=10, steps=10)
    found = []
    for warm_ups in (1, 1000):
        monkeypatch.setattr(CpuRecorder, "warm_ups", warm_ups)
        step, controller = make("graph", Small, loss_of, late=late)
        assert controller is not None
        run(step, 40, lambda k, ranks=controller: k % 15 == 14 and ranks.prune_())
        found.append((step.built, state(step), controller.state_dict()))
    (built, ours, ranks), (none, theirs, expected) = found
    assert (built >= 4, none, ranks) == (True, 0, expected)
    assert_equal(ours, theirs)
    assert ours["norm.num_batches_tracked"] == 40


def test_operations_without_one_of_their_results() -> None:
    """The backward of a norm without bias, by torch."""

    def norm() -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8, bias=False))

    found = []
    for mode in ("eager", "graph"):
        step, _ = make(mode, norm, lambda model, ids: model(ids).square().mean(0).sum())
        found.append((run(step), state(step)))
    assert (step.mode, step.built) == ("graph", 2)
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


def test_eager_steps_of_tables_are_the_same_but_for_rounding() -> None:
    """They look up each different id once, which depends on values."""
    (eager, _), (graph, _) = make("eager", Small, loss_of), make("graph", Small, loss_of)
    ours = [float(result.loss) for result in run(eager)]
    torch.manual_seed(2)
    assert [float(result.loss) for result in run(graph)] == pytest.approx(ours, rel=1e-3)


def test_a_wrong_id_raises_what_the_step_raises() -> None:
    step, _ = make("graph", Small, loss_of)
    run(step, 8, lengths=(9,))
    assert step.built == 1
    wrong = ids_of(0, (9,))
    wrong[2, 3] = VOCABULARY
    with pytest.raises((IdError, RuntimeError), match="expected"):
        step([wrong])
    wrong[2, 3] = -5
    with pytest.raises((IdError, RuntimeError), match="expected"):
        step([wrong])


@pytest.mark.parametrize("label", [VOCABULARY, -7])
def test_a_wrong_label_never_reaches_the_kernel(label: int) -> None:
    def of_logits(model: nn.Module, ids: Tensor) -> Tensor:
        p_BR = model(ids[:, :-1] % VOCABULARY)[:, :8]
        return low_rank_cross_entropy(p_BR, weight, ids[:, 1:].flatten())

    weight = torch.randn(8, VOCABULARY)

    step, _ = make("graph", Small, of_logits)
    run(step, 6, lengths=(9,))
    assert step.built == 1
    wrong = ids_of(0, (9,))
    wrong[1, 5] = label
    with pytest.raises(RuntimeError, match="labels"):
        step([wrong])


class Bags(nn.Module):
    """Sums of rows of a table over bags whose sizes are values, and a sparse gradient if asked for."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = TTMEmbeddingBag(TTMSpec(VOCABULARY, 48, (5, 6), (6, 8), (1, 6, 1)))
        self.plain = nn.EmbeddingBag(VOCABULARY, 48, sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.flatten()
        offsets = torch.arange(4) * (flat.numel() // 4) - (flat[:4] % 2) * torch.tensor([0, 1, 1, 1])
        return self.table(flat, offsets) + self.plain(flat, offsets)


def of_bags(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().mean()


def test_bags_whose_sizes_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for warm_ups in (1, 1000):
        monkeypatch.setattr(CpuRecorder, "warm_ups", warm_ups)
        step, _ = make("graph", Bags, of_bags)
        run(step)
        found.append(state(step))
        assert step.mode == "graph"
        assert step.built == (2 if warm_ups == 1 else 0)
    assert_equal(*found)


def test_sparse_gradients_run_eager_and_say_so() -> None:
    step, _ = make("graph", lambda: Bags(sparse=True).requires_grad_(True), of_bags)
    step.optimizer = torch.optim.SGD(step.model.parameters(), lr=0.1)
    step.max_grad_norm = 0.0
    run(step, 5, lengths=(9,))
    assert "dense tensors" in step.mode


def read(how: Callable[[Tensor], object]) -> Loss:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        found = of_class(model, ids)
        how(found.detach())
        return found

    return loss


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (Tensor.item, "reads values of a tensor, by aten._local_scalar_dense"),
        (Tensor.tolist, "reads values of a tensor, by tolist()"),
        (lambda x: x.numpy(), "reads values of a tensor, by numpy()"),
        (lambda x: x.reshape(1).nonzero(), "reads values of a tensor, by aten.nonzero"),
        (lambda x: x.reshape(1)[x.reshape(1) > 0], "reads values of a tensor, by aten.index"),
        (lambda x: random.random(), "the step draws random numbers by Python's generator"),
    ],
)
def test_what_reads_values_or_draws_by_python_runs_eager_and_says_so(
    how: Callable[[Tensor], object], reason: str
) -> None:
    found = []
    for mode in ("eager", "graph"):
        step, _ = make(mode, bert, read(how) if mode == "graph" else of_class)
        run(step, 5, lengths=(9,))
        found.append(state(step))
    assert step.mode.startswith("eager (")
    assert reason in step.mode
    assert Path(__file__).name in step.mode or "draws" in reason
    assert_equal(*found)


def test_what_a_recording_cannot_see_is_found_by_comparison() -> None:
    """A number of Python that changes: it runs once a step, and what is compared counts, so nothing has happened."""

    def by_time(clock: Iterator[int], model: nn.Module, ids: Tensor) -> Tensor:
        return of_class(model, ids) * (1.0 + 0.1 * (next(clock) >= 3))

    found = []
    for mode in ("eager", "graph"):
        step, _ = make(mode, bert, partial(by_time, count()))
        found.append((run(step, 8, lengths=(9,)), state(step)))
    assert "what is recorded is not the step" in step.mode
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


@pytest.mark.parametrize(("every", "seen"), [(8, 6), (3, 5)])  # by the fourth replay, and by the third
def test_replays_are_compared_again_once_in_a_while(every: int, seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that nobody sees, in between: from the next comparison on, steps are eager."""
    monkeypatch.setattr("comera.graphs.cpu.EVERY", every)
    factor = iter(
        [1.0] * 5 + [2.0] * 20
    )  # a warm-up for what transformers notes, one more, the recording, two compared

    def by_time(model: nn.Module, ids: Tensor) -> Tensor:
        return of_class(model, ids) * next(factor)

    step, _ = make("graph", bert, by_time)
    step.set_rates([0.0] * len(step.optimizer.param_groups))
    step.model.eval()
    losses = [float(step([ids_of(0, (9,))]).loss) for _ in range(12)]
    assert losses == [losses[0]] * seen + [2 * losses[0]] * (12 - seen)
    assert "what is recorded is not the step" in step.mode


def test_recordings_of_several_lengths_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Pool] = []

    class Seen(Pool):
        def __init__(self, block: Callable[[int], torch.UntypedStorage]) -> None:
            super().__init__(block)
            pools.append(self)

    monkeypatch.setattr("comera.graphs.cpu.Pool", Seen)
    for size in ("LEAST", "MOST"):
        monkeypatch.setattr(f"comera.graphs.pool.{size}", 2**16)
    held = []
    for lengths in ((12,), (12, 11, 9)):
        pools.clear()
        step, _ = make("graph", bert, of_class)
        run(step, 12, lengths=lengths)
        assert (step.mode, step.built) == ("graph", len(lengths))
        (pool,) = pools
        held.append(sum(block.nbytes() for block in pool._blocks))
    assert held[1] == held[0]  # what the longest takes; its gradients, too, are read before the next replay


def test_gradients_outlive_their_recording() -> None:
    step, _ = make("graph", bert, of_class)
    run(step, 6, lengths=(9,))
    assert step.mode == "graph"
    gradients = [p.grad for p in step.model.parameters() if p.grad is not None]
    values = [gradient.clone() for gradient in gradients]
    del step
    gc.collect()
    others = [memory.empty(2**20).fill_(7.0) for _ in range(8)]  # which take what was freed
    assert len(others) == 8
    assert all(map(torch.equal, gradients, values))


def test_comparing_a_replay_with_the_step_takes_the_memory_of_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    made, blocks = [], []
    take, make_block = memory._taken, memory.block

    def taken(*shape: int) -> Tensor:
        made.append(shape)
        return take(*shape)

    def block(size: int) -> torch.UntypedStorage:
        blocks.append(size)
        return make_block(size)

    monkeypatch.setattr("comera.kernels.cpp.memory.LARGE", 2**10)
    monkeypatch.setattr("comera.kernels.cpp.memory._taken", taken)
    monkeypatch.setattr("comera.graphs.cpu.block", block)
    step, _ = make("graph", bert, of_class)
    run(step, 2, lengths=(9,))  # after the first one transformers notes something in its config
    warm_ups = len(made)
    run(step, 6, lengths=(9,))
    assert step.built == 1
    assert warm_ups > 0
    assert len(made) - warm_ups == len(blocks) > 0


def test_memory_of_eager_steps_is_given_back_once_steps_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comera.kernels.cpp.memory.LARGE", 2**10)
    step, _ = make("graph", bert, of_class)
    run(step, 2, lengths=(9,))
    assert memory.held().held > memory.held().in_use
    run(step, 4, lengths=(9,))
    assert step.built == 1
    assert memory.held().held == memory.held().in_use


def test_a_frozen_parameter_is_recorded_anew() -> None:
    (eager, _), (graph, _) = make("eager", bert, of_class), make("graph", bert, of_class)
    states = []
    for step in (eager, graph):
        torch.manual_seed(2)
        first = next(step.model.parameters())
        run(step, 12, lambda k, p=first: p.requires_grad_(k < 5), lengths=(9,))
        states.append(state(step))
        assert first.grad is None
    assert_equal(*states)
    assert (graph.mode, graph.built) == ("graph", 2)


# --- steps that ask tensors a question --------------------------------------------------------------------------------


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    made: list[Recording] = []

    class Seen(Recording):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(cpu, "Recording", Seen)
    return made


def small_llama() -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attention_dropout=0.1, **sizes)).train()


def padded(answer: str) -> Loss:
    """A mask as tokenizers make it, which transformers looks at; every third batch has no padding."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        mask[1:, 5:] *= (ids[:1, :1] % 3 == 0).to(mask.dtype)
        labels = ids[:, 0] % 2 if answer == "class" else ids
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    return loss


@pytest.mark.parametrize(("model", "answer"), [(bert, "class"), (small_llama, "next")])
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
    return model(ids)


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
