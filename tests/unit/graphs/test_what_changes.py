"""What a recording cannot see is compared before each replay, or refused: steps of mode graph are those of mode eager.

Each case changes something between two steps, or does something in its step that a replay would leave out or repeat.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers import LlamaConfig, LlamaForCausalLM

import comera
from comera.kernels.cpp import compiler
from comera.trainer.step import TrainStep

from ...helpers.tape import TapeRecorder

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

RATE, CHANGE, STEPS = 2**-5, 10, 18  # a change comes before step CHANGE, when recordings are only replayed


def rows(step: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 8)), generator=torch.Generator().manual_seed(step))


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, fused=True)


@dataclass
class Both:
    """The same steps in mode eager and in mode graph.

    batches: one for each step. each: called before each. whole: whether whole steps are recorded, by a stand-in.
    """

    build: Callable[[], nn.Module]
    loss: Any = squares
    batches: Sequence[Any] = field(default_factory=lambda: [rows(k) for k in range(STEPS)])
    each: Callable[[int, TrainStep], object] = lambda k, step: None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    whole: bool = False

    def take(self, mode: Any) -> tuple[TrainStep, list[float]]:
        torch.manual_seed(1)
        model = self.build()
        recorder = TapeRecorder() if self.whole else None
        step = TrainStep(model, self.loss, self.optimizer(model), mode=mode, recorder=recorder)
        torch.manual_seed(2)
        losses = []
        for k, batch in enumerate(self.batches):
            self.each(k, step)
            losses.append(float(step([batch]).loss))
        return step, losses

    def same(self) -> TrainStep:
        """The step of mode graph, after both gave the same losses and left the same state, to the bit."""
        (eager, expected), (graph, losses) = self.take("eager"), self.take("graph")
        assert [k for k, (one, other) in enumerate(zip(losses, expected, strict=True)) if one != other] == []
        states = eager.model.state_dict(), graph.model.state_dict()
        assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []
        return graph


# --- tensors that outlive the step ------------------------------------------------------------------------------------


class Tabled(nn.Module):
    """Makes a table when it first meets a mask that hides something."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.table: Tensor | None = None

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = torch.relu(self.first(batch["x"]))
        if not bool(batch["mask"].all()):
            if self.table is None:
                self.table = torch.linspace(0, 1, 16).cos().square()
            hidden = hidden * self.table
        return self.last(hidden)


def test_a_table_that_a_branch_makes_once() -> None:
    def batch(k: int, n: int, full: bool) -> dict[str, Tensor]:
        mask = torch.ones(n, dtype=torch.bool)
        mask[0] = full
        return {"x": rows(k, n, 16), "mask": mask}

    plan = [(6, True)] * 5 + [(9, True)] * 5 + [(6, False)] * 3 + [(6, True)] * 2 + [(9, False)] * 3
    plan += [(6, True), (9, False), (9, True), (9, False)] * 2
    batches = [batch(k, *each) for k, each in enumerate(plan)]
    assert Both(Tabled, lambda model, batch: model(batch).square().mean(), batches).same().mode == "graph"


def test_angles_that_a_longer_text_replaces() -> None:
    """Dynamic RoPE of transformers: an evaluation afterwards reads what the last step left."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 128, "vocab_size": 50, "max_position_embeddings": 16, "rope_parameters": rope}
    held_out = torch.randint(50, (2, 28), generator=torch.Generator().manual_seed(99))

    def build() -> nn.Module:
        return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa")).train()

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    lengths = [10] * 5 + [28, 28, 12, 28, 28, 10, 10, 10]
    both = Both(build, loss, [torch.randint(50, (2, n), generator=torch.Generator().manual_seed(n)) for n in lengths])
    both.same()
    losses = []
    for mode in ("eager", "graph"):
        model = both.take(mode)[0].model.eval()
        with torch.no_grad():
            losses.append(float(loss(model, held_out)))
    assert losses[0] == losses[1]


class Averaged(nn.Module):
    """Puts a new tensor in the place of a buffer in each forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x)


def test_a_buffer_that_each_forward_replaces() -> None:
    step = Both(Averaged, batches=[rows(k, 4 + 2 * (k % 2), 8) for k in range(20)]).same()
    assert step.mode == "eager (_buffers.mean changes from step to step)"


class Keeper:
    """Keeps what it is called with; no picture looks into slots."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, found: Tensor) -> Tensor:
        self.seen.append(found.detach() * 2)
        return found


def test_tensors_that_nobody_sees_being_kept() -> None:
    """They are found in the memory of the recording."""
    seen = []
    for mode in ("eager", "graph"):
        keeper = Keeper()
        step, _ = Both(lambda: nn.Linear(8, 8), lambda model, x, keeper=keeper: keeper(squares(model, x))).take(mode)
        seen.append(keeper.seen)
    assert list(map(float, seen[0])) == list(map(float, seen[1]))
    assert "a tensor of shape () that the step makes outlives it" in step.mode


def test_the_gradient_of_a_leaf_that_is_neither_the_models_nor_the_optimizers() -> None:
    found = []
    for mode in ("eager", "graph"):
        scale = torch.ones(8, requires_grad=True)
        both = Both(lambda: nn.Linear(8, 8), lambda model, x, scale=scale: (model(x) * scale).square().mean())
        both.take(mode)
        found.append(scale.grad)
    assert torch.equal(*found)


# --- the weight of a compressed layer ---------------------------------------------------------------------------------


class ReadsWeight(nn.Module):
    """Multiplies with the dense weight of a compressed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(32, 32, bias=False)
        comera.tensorize_(self, comera.TensorizeConfig(comera.TT(order=4, rank=6)))
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.mm(x, self.layer.weight))


@pytest.mark.parametrize("frozen", [False, True])
def test_the_weight_of_a_compressed_layer_is_made_in_each_replay(frozen: bool) -> None:
    """With a rate of 0 in the steps that are compared, and where cores are loaded later."""

    def change(k: int, step: TrainStep) -> None:
        step.set_rates([0.0 if k < 6 else RATE])
        if k == CHANGE:
            state = step.model.state_dict()
            step.model.load_state_dict({n: t * 1.5 if "cores.0" in n else t for n, t in state.items()})

    def build() -> nn.Module:
        model = ReadsWeight()
        model.layer.requires_grad_(not frozen)
        return model

    assert Both(build, batches=[rows(k, 6, 32) for k in range(STEPS)], each=change).same().mode == "graph"


# --- what changes between two steps -----------------------------------------------------------------------------------


class Net(nn.Module):
    """Batch norm, dropout, a buffer, a config, and a list."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.config, self.factors = SimpleNamespace(power=1.0, nested={"shift": 0.0}), [1.0]
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.layer(x))) * self.scale + self.config.nested["shift"]
        return out * self.factors[0] * self.config.power


def transpose(model: Any) -> None:
    model.layer.weight.data = model.layer.weight.data.T


def double(weight: Any) -> None:
    weight.grad *= 2


def patch(model: Any) -> None:
    model.norm.forward = lambda x: x


CHANGES: dict[str, Callable[[Any], object]] = {
    "mode of a part": lambda model: model.norm.eval(),
    "mode of all": lambda model: model.eval(),
    "probability": lambda model: setattr(model.drop, "p", 0.0),
    "forward hook": lambda model: model.layer.register_forward_hook(lambda *given: given[2] * 2),
    "forward pre-hook": lambda model: model.layer.register_forward_pre_hook(lambda module, given: (given[0] * 2,)),
    "backward hook": lambda model: model.norm.register_full_backward_hook(lambda *given: (given[1][0] * 2,)),
    "gradient hook": lambda model: model.layer.weight.register_hook(lambda gradient: gradient * 2),
    "accumulation hook": lambda model: model.layer.weight.register_post_accumulate_grad_hook(double),
    "buffer": lambda model: setattr(model, "scale", torch.full((8,), 3.0)),
    "buffer of one number": lambda model: setattr(model.norm, "num_batches_tracked", torch.tensor(CHANGE)),
    "weight": lambda model: setattr(model.layer, "weight", nn.Parameter(torch.eye(8))),
    "memory": lambda model: setattr(model.layer.weight, "data", torch.eye(8)),
    "strides": transpose,
    "layer": lambda model: setattr(model, "layer", nn.Linear(8, 8)),
    "freezing": lambda model: model.layer.requires_grad_(False),
    "method": patch,
    "config": lambda model: setattr(model.config, "power", 2.0),
    "in a config": lambda model: model.config.nested.update(shift=1.0),
    "in a list": lambda model: model.factors.append(model.factors.pop() * 2),
    "momentum": lambda model: setattr(model.norm, "momentum", 0.5),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_steps_is_recorded_anew(change: str, whole: bool) -> None:
    def each(k: int, step: TrainStep) -> None:
        if k == CHANGE:
            built.append(step.built)
            CHANGES[change](step.model)

    built: list[int] = []
    step = Both(Net, each=each, whole=whole).same()
    if whole and change in ("weight", "layer"):
        assert "need gradients and are not the optimizer's" in step.mode
        return
    assert step.mode == "graph"
    assert (built[1], step.built) == (1, 2)


@contextmanager
def hooked() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda *given: given[2] * 2)
    yield
    handle.remove()


@contextmanager
def patched() -> Iterator[None]:
    before = nn.BatchNorm1d.forward
    nn.BatchNorm1d.forward = lambda self, x: x  # type: ignore[method-assign]
    yield
    nn.BatchNorm1d.forward = before  # type: ignore[method-assign]


AROUND: dict[str, Callable[[], Any]] = {
    "hook of all modules": hooked,
    "forward of a class": patched,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("case", AROUND)
def test_what_changes_for_all_modules_is_recorded_anew(case: str) -> None:
    found = []
    for mode in ("eager", "graph"):
        both = Both(Net)
        step, losses = Both(Net, batches=both.batches[:CHANGE]).take(mode)
        with AROUND[case]():
            losses += [float(step([batch]).loss) for batch in both.batches]
        losses += [float(step([batch]).loss) for batch in both.batches]
        found.append(losses)
    assert found[0] == found[1]
    assert (step.mode, step.built) == ("graph", 3)


def test_what_a_loss_reads_is_recorded_anew() -> None:
    """A value of its closure, an attribute of its owner, a buffer of a criterion, and another loss."""

    class Task:
        def __init__(self) -> None:
            self.smoothing, self.criterion = 0.0, nn.CrossEntropyLoss(weight=torch.ones(8))

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            found: Tensor = self.criterion(model(x), x.argmax(1))
            return found + self.smoothing * model(x).square().mean() * power

    tasks: list[Task] = []
    power = 1.0

    def each(k: int, step: TrainStep) -> None:
        nonlocal power
        task = tasks[-1]
        if k == 8:
            power = 2.0
        elif k == 16:
            task.smoothing = 0.5
        elif k == 24:
            task.criterion.weight = torch.arange(1.0, 9)
        elif k == 32:
            step.loss = squares

    found = []
    for mode in ("eager", "graph"):
        power = 1.0
        tasks.append(Task())
        batches = [rows(k) for k in range(40)]
        step, losses = Both(lambda: nn.Linear(8, 8), tasks[-1].loss, batches, each).take(mode)
        found.append(losses)
    assert found[0] == found[1]
    assert (step.mode, step.built) == ("graph", 5)


@pytest.mark.parametrize("whole", [False, True])
def test_what_changes_in_every_step_runs_eager_and_says_so(whole: bool) -> None:
    def each(k: int, step: TrainStep) -> None:
        step.model.drop.p = 0.01 * k  # type: ignore[union-attr,assignment]

    assert Both(Net, each=each, whole=whole).same().mode == "eager (drop.p changes from step to step)"


def test_options_of_a_captured_optimizer_are_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMERA_KERNELS", "none")  # one of them makes the norm of a gradient in eager steps

    def each(k: int, step: TrainStep) -> None:
        (group,) = step.optimizer.param_groups
        if k == CHANGE:
            group["weight_decay"] = 0.5
        elif k == 2 * CHANGE:
            step.max_grad_norm = 0.01

    both = Both(lambda: nn.Linear(8, 8), batches=[rows(k) for k in range(3 * CHANGE)], each=each, whole=True)
    step = both.same()
    assert (step.mode, step.built) == ("graph", 3)


# --- whose parameters -------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("whole", [False, True])
def test_a_group_that_comes_later(whole: bool) -> None:
    def frozen() -> nn.Module:
        model = Pair()
        model.first.requires_grad_(False)
        return model

    def unfreeze(k: int, step: TrainStep) -> None:
        if k == CHANGE:
            step.model.first.requires_grad_(True)  # type: ignore[union-attr]
            step.optimizer.add_param_group({"params": list(step.model.first.parameters())})  # type: ignore[union-attr]

    step = Both(frozen, each=unfreeze, whole=whole).same()
    assert (step.mode, step.built) == ("graph", 2)
    assert len(step.parameters) == 4


@pytest.mark.parametrize("every", [1, 3])
def test_parameters_of_a_second_optimizer_get_their_gradients(every: int) -> None:
    """Which add up until that takes a step."""
    found = []
    for mode in ("eager", "graph"):
        torch.manual_seed(1)
        model = Pair()
        other = torch.optim.SGD(model.first.parameters(), lr=RATE)
        step = TrainStep(model, squares, torch.optim.SGD(model.last.parameters(), lr=RATE), mode=mode)  # type: ignore[arg-type]
        seen = []
        for k in range(STEPS):
            if k % every == 0:
                other.zero_grad()
            seen.append(float(step([rows(k)]).loss))
            assert model.first.weight.grad is not None
            seen.append(float(model.first.weight.grad.norm()))
            if k % every == every - 1:
                other.step()
        found.append(seen)
    assert found[0] == found[1]
    assert step.mode == "graph"


def test_a_whole_step_leaves_no_gradients_so_it_runs_eager_where_others_need_them() -> None:
    def last(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.last.parameters(), lr=RATE, fused=True)

    step = Both(Pair, optimizer=last, whole=True).same()
    assert step.mode.startswith("eager (2 parameters of the model need gradients and are not the optimizer's")


# --- writes that a repetition would repeat ----------------------------------------------------------------------------


class Teacher(nn.Module):
    """Writes a parameter and counts its forwards in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.mean = nn.Parameter(torch.ones(8), requires_grad=False)
        self.steps, self.calls = torch.zeros(()), 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count(x)
        return self.layer(x)

    def count(self, x: Tensor) -> None:
        raise NotImplementedError


class ByParameter(Teacher):
    def count(self, x: Tensor) -> None:
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))


class ByTensor(Teacher):
    def count(self, x: Tensor) -> None:
        self.steps += 1


class ByNumber(Teacher):
    def count(self, x: Tensor) -> None:
        self.calls += 1


class OfBatch(Teacher):
    def count(self, x: Tensor) -> None:
        x += 1


WRITES = {
    ByParameter: "a tensor (8,) that is no buffer of the model",
    ByTensor: "a tensor () that is no buffer of the model",
    ByNumber: "calls changes from step to step",
    OfBatch: "a tensor (4, 8) that is no buffer of the model",
}


@pytest.mark.parametrize("kind", WRITES)
def test_what_a_step_writes_is_written_once(kind: type[Teacher]) -> None:
    def counted(mode: str) -> tuple[TrainStep, list[Any]]:
        batches = [rows(k) for k in range(STEPS)]
        step, losses = Both(kind, batches=batches).take(mode)
        model: Any = step.model
        return step, [*losses, model.mean.tolist(), float(model.steps), model.calls, *(x.tolist() for x in batches)]

    (_, expected), (step, seen) = counted("eager"), counted("graph")
    assert seen == expected
    assert step.mode.startswith("eager (")
    assert WRITES[kind] in step.mode


def test_statistics_of_a_replay_that_fails_are_undone() -> None:
    """A wrong label, behind a batch norm: the error is that of the step, which has written the statistics once."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["label"])

    found = []
    for mode in ("eager", "graph"):
        batches = [{"x": rows(k), "label": torch.tensor([0, 1, 2, 3])} for k in range(8)]
        step, _ = Both(Net, loss, batches).take(mode)
        with pytest.raises(IndexError, match="Target 9 is out of bounds"):
            step([{"x": rows(9), "label": torch.tensor([0, 1, 2, 9])}])
        found.append(step.model.state_dict())
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []
    assert found[1]["norm.num_batches_tracked"] == 9


# --- values that functions read themselves ----------------------------------------------------------------------------


def split(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    parts = model(batch["x"]).tensor_split(batch["sizes"])
    return torch.stack([part.mean().square() for part in parts]).sum()


def packed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found, _ = rnn(PackedSequence(model(batch["x"]), batch["sizes"]))
    return found.data.square().mean()


def ctc(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = model(batch["x"]).view(5, 2, 8).log_softmax(2), torch.tensor([[1, 2], [3, 4]])
    return F.ctc_loss(logits, labels, batch["sizes"], torch.tensor([2, 2]))


torch.manual_seed(0)
rnn = nn.RNN(8, 3)


@pytest.mark.parametrize(
    ("loss", "sizes", "others", "dtype"),
    [
        (split, [2, 5], [3, 6], torch.int64),
        (packed, [4, 4, 2], [4, 3, 3], torch.int64),
        (ctc, [5, 5], [4, 5], torch.int64),
        (ctc, [5, 5], [4, 5], torch.int32),
    ],
)
def test_integers_that_a_function_reads_itself(loss: Any, sizes: list[int], others: list[int], dtype: Any) -> None:
    batches = [
        {"x": rows(k, 10, 8), "sizes": torch.tensor(sizes if k < CHANGE else others, dtype=dtype)} for k in range(STEPS)
    ]
    assert "reads values of a tensor, by" in Both(lambda: nn.Linear(8, 8), loss, batches).same().mode


def test_values_that_a_hook_reads_in_the_backward() -> None:
    def reading(gradient: Tensor) -> Tensor:
        return gradient * (2.0 if gradient.tolist()[0][0] > 0 else 1.0)

    def build() -> nn.Module:
        model = nn.Linear(8, 8)
        model.weight.register_hook(reading)
        return model

    assert "reads values of a tensor, by tolist()" in Both(build).same().mode


# --- what is the same, and stays recorded -----------------------------------------------------------------------------


def test_fourier_transforms_and_own_generators_are_recorded() -> None:
    """Tensors whose elements in memory have another sign, and random numbers of the user's own."""
    generator = torch.Generator()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=generator)
        spectrum = torch.fft.rfft(model(x) + noise)
        return torch.fft.irfft(spectrum * spectrum.conj()).square().mean() + torch.fft.ifft(x).imag.mean()

    def each(k: int, step: TrainStep) -> None:
        if k == 0:
            generator.manual_seed(7)

    assert Both(lambda: nn.Linear(8, 8), loss, each=each).same().mode == "graph"


def test_whole_numbers_and_masks_lie_in_the_pool_too() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        best, ranks = model(x).topk(3)
        return torch.where(x[:, :3] > 0, best, best * ranks).square().mean()

    assert Both(lambda: nn.Linear(8, 8), loss).same().mode == "graph"
