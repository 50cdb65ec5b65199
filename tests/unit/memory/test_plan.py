"""Plans for a memory budget: what they promise is what training takes, and planning leaves no trace."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import comera
from comera.convert import BTT, TT, TTM, TensorizeConfig, tensorize_
from comera.errors import ConfigError, ConversionError
from comera.fusion import merge_cache
from comera.fusion.fuse import fuse_
from comera.memory import MemoryPlan, plan_memory
from comera.memory.budget import batch_tensors, parse_bytes
from comera.memory.plan import Loss
from comera.nn.linear import TTLinear
from comera.ops import linear as ops_linear
from comera.optim.names import OPTIMIZERS, Rates
from comera.tt.spec import TTSpec

from ...helpers.allocated import peak_allocated
from ...helpers.live import assert_same

WIDTH, HUGE = 64, "1GB"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


def mlp() -> nn.Module:
    return nn.Sequential(block(), block(), block())


def tensorized(linear: TT | BTT = TT(order=4, rank=4)) -> nn.Module:  # noqa: B008
    model = mlp()
    tensorize_(model, TensorizeConfig(linear))
    return model


def convolutional() -> nn.Module:
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16, WIDTH))


class Tied(nn.Module):
    """Predicts tokens with the table that it looks them up in."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(500, WIDTH), mlp(), nn.Linear(WIDTH, 500, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.body(self.table(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def tied(compress: bool) -> nn.Module:
    model = Tied()
    if compress:
        tensorize_(model, TensorizeConfig(TT(order=4, rank=4), TTM(order=2, rank=8)))
    return model


def bert() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": WIDTH}
    model = BertForSequenceClassification(BertConfig(vocab_size=200, max_position_embeddings=16, **sizes))
    tensorize_(model, TensorizeConfig(TT(order=4, rank=6), TTM(order=2, rank=4)))
    fuse_(model)
    return model


def autoencoding(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x)


def averaging(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def texts(samples: int) -> dict[str, Tensor]:
    ids = torch.randint(200, (samples, 16))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}


Case = tuple[Callable[[], nn.Module], Callable[[], Any], Loss | None]
CASES: dict[str, Case] = {
    "dense": (mlp, lambda: torch.randn(16, WIDTH), autoencoding),
    "tt": (tensorized, lambda: torch.randn(8, WIDTH), autoencoding),
    "btt": (lambda: tensorized(BTT(rank=2)), lambda: torch.randn(8, WIDTH), autoencoding),
    "conv": (convolutional, lambda: torch.randn(12, 3, 20, 20), averaging),
    "tied": (lambda: tied(False), lambda: torch.randint(500, (6, 16)), None),
    "tied, compressed": (lambda: tied(True), lambda: torch.randint(500, (6, 16)), None),
    "bert": (bert, lambda: texts(6), None),
}


def train(model: nn.Module, batch: Any, loss: Loss | None, plan: MemoryPlan, optimizer: str, steps: int) -> None:
    loss = loss or (lambda model, part: model(**part).loss if isinstance(part, dict) else model(part))
    moving = OPTIMIZERS[optimizer].make(model.train(), Rates())
    for _ in range(steps):
        for part, share in plan.micro_batches(batch):
            (share * loss(model, part)).backward()
        moving.step()
        moving.zero_grad()


# --- what it promises -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize(
    ("case", "optimizer"),
    [*((case, "adamw") for case in CASES), ("dense", "sgd"), ("conv", "momentum"), ("tied", "smmf"), ("tt", "smmf")],
)
def test_training_takes_what_the_plan_says(case: str, optimizer: str, tight: bool) -> None:
    """Measured by torch's allocator, with all that operations take for themselves."""
    make, draw, loss = CASES[case]
    model, batch = make(), draw()
    budget = least(model, batch, optimizer=optimizer, loss=loss) if tight else HUGE
    plan = plan_memory(model, batch, budget, optimizer=optimizer, loss=loss)
    assert plan.headroom == 0 or not tight
    plan.apply_(model)
    train(model, batch, loss, plan, optimizer, 1)  # tables and contraction plans that stay
    there = plan.weights + sum(tensor.nbytes for tensor in batch_tensors(batch))
    measured = there + peak_allocated(lambda: train(model, batch, loss, plan, optimizer, 2))
    assert measured == pytest.approx(plan.peak, rel=0.02)


def least(model: nn.Module, batch: Any, **settings: Any) -> int:
    """The smallest budget, as the error for a smaller one says it."""
    with pytest.raises(ConfigError, match="expected a budget of at least") as raised:
        plan_memory(model, batch, 1, **settings)
    return int(str(raised.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))


def test_parts_are_those_of_a_model_counted_by_hand() -> None:
    model, x = mlp(), torch.randn(48, WIDTH)
    plan = plan_memory(model, x, HUGE, loss=autoencoding)
    numbers = sum(p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    assert (plan.weights, plan.gradients, plan.optimizer) == (4 * numbers, 4 * numbers, 2 * 4 * numbers + 4 * tensors)
    assert (plan.micro_batch, plan.recompute, plan.contraction, plan.notes) == (48, False, "planned", ())
    assert plan.peak == sum(plan.parts.values()) == 10**9 - plan.headroom


def test_a_tied_weight_counts_once() -> None:
    model = tied(False)
    assert plan_memory(model, torch.randint(500, (2, 16)), HUGE).weights == 4 * sum(
        p.numel() for p in model.parameters()
    )


def test_less_and_less_memory_from_the_fastest_step_to_the_smallest() -> None:
    model, x = tensorized(), torch.randn(16, WIDTH)
    smallest = least(model, x, loss=autoencoding)
    budget, plans = 10**9, list[MemoryPlan]()
    while budget >= smallest:
        plans.append(plan_memory(model, x, budget, loss=autoencoding))
        assert plans[-1].peak <= budget
        budget = plans[-1].peak - 1
    sizes = [plan.micro_batch for plan in plans]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], plans[0].recompute) == (16, False)
    assert (sizes[1], plans[1].recompute) == (16, True)  # before smaller micro-batches
    assert sizes[-1] < 8
    assert plans[-1].peak == smallest


def test_micro_batches_that_take_more_than_the_first_ones_count() -> None:
    """As texts with more distinct words do: memory that depends on values."""

    def repeating(model: nn.Module, x: Tensor) -> Tensor:
        return averaging(model, x.repeat(64 if x.amax() > 100 else 1, 1))

    model, x = mlp(), torch.randn(8, WIDTH)
    alike = least(model, x, optimizer="sgd", loss=repeating)
    x[5] = 200.0
    assert least(model, x, optimizer="sgd", loss=repeating) > 1.5 * alike


def test_low_rank_contraction_is_chosen_where_the_planned_one_takes_more() -> None:
    """With few rows and a large rank, two input rows absorb core after core."""
    model = nn.Sequential(TTLinear(TTSpec(256, 256, (16, 16), (16, 16), (1, 16, 96, 16, 1)), bias=False))
    x = torch.randn(2, 256)
    planned = plan_memory(model, x, HUGE, optimizer="sgd", loss=averaging)
    plan = plan_memory(model, x, planned.peak - 1, optimizer="sgd", loss=averaging)
    assert (planned.contraction, plan.contraction, plan.micro_batch) == ("planned", "low_rank", 2)
    before = averaging(model, x)
    plan.apply_(model)
    assert "contraction=low_rank" in repr(model)
    torch.testing.assert_close(averaging(model, x), before, rtol=1e-4, atol=1e-7)
    planned.apply_(model)
    assert "contraction" not in repr(model)


def test_the_meta_device_gives_the_plan_without_memory() -> None:
    model, x = tensorized(), torch.randn(48, WIDTH)
    for budget in (HUGE, plan_memory(model, x, HUGE, optimizer="sgd", loss=averaging).peak - 1):
        plan = plan_memory(model, x, budget, optimizer="sgd", loss=averaging)
        meta = plan_memory(copy.deepcopy(model).to("meta"), x.to("meta"), budget, optimizer="sgd", loss=averaging)
        assert meta == plan
    with torch.device("meta"):
        large, batch = mlp(), torch.randn(1 << 24, WIDTH)  # 4 GB, and 17 of each hidden activation
    plan = plan_memory(large, batch, "8GB", loss=averaging)
    assert (7_000_000_000 < plan.peak < 8_000_000_000, plan.micro_batch < 1 << 22) == (True, True)


# --- what it does to a model, and what not --------------------------------------------------------------------------


def test_planning_leaves_no_trace() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), tensorized()).eval()
    x = torch.randn(16, WIDTH)
    averaging(model, x).backward()
    state, grads = copy.deepcopy(model.state_dict()), [p.grad for p in model.parameters()]
    values = [None if grad is None else grad.clone() for grad in grads]
    random.seed(3)
    drawn, own = torch.get_rng_state(), random.getstate()
    smallest = least(model, x, loss=averaging)
    plan_memory(model, x, smallest, loss=averaging)
    assert_same(model.state_dict(), state)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(grad is None or torch.equal(grad, value) for grad, value in zip(grads, values, strict=True))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), drawn)
    assert random.getstate() == own
    assert not any(module.training or "forward" in vars(module) for module in model.modules())
    assert all(m.contraction == "planned" for m in model.modules() if isinstance(m, TTLinear))


def test_micro_batches_give_the_gradient_of_the_batch() -> None:
    model, x = tensorized().eval(), torch.randn(10, WIDTH)
    plan = plan_memory(model, x, least(model, x, loss=autoencoding), loss=autoencoding)
    assert plan.micro_batch == 1
    autoencoding(model, x).backward()
    expected = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    plan.apply_(model)
    found = list(plan.micro_batches(x))
    assert torch.cat([part for part, _ in found]).equal(x)
    for part, share in found:
        (share * autoencoding(model, part)).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-4, atol=1e-6)


def test_a_plan_splits_batches_of_other_sizes_evenly() -> None:
    plan = MemoryPlan(0, 0, 0, 0, "Net", 12, 4, False, "planned", 1)
    batch = {"x": torch.arange(10), "pair": (torch.arange(20).view(10, 2), "words"), "scale": torch.tensor(3.0)}
    found = list(plan.micro_batches(batch))
    assert [part["x"].tolist() for part, _ in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [share for _, share in found] == [0.4, 0.4, 0.2]
    assert found[2][0]["pair"][0].shape == (2, 2)
    assert found[0][0]["pair"][1] == "words"
    assert found[0][0]["x"].data_ptr() == batch["x"].data_ptr()  # type: ignore[attr-defined]
    assert [len(part) for part, _ in plan.micro_batches(torch.zeros(5))] == [3, 2]
    assert [len(part) for part, _ in plan.micro_batches(torch.zeros(3))] == [3]


def test_a_plan_sets_recomputation_and_removes_it() -> None:
    model, x = tensorized(), torch.randn(64, WIDTH)
    roomy = plan_memory(model, x, HUGE, loss=autoencoding)
    plan = plan_memory(model, x, roomy.peak - 1, loss=autoencoding)
    plan.apply_(model)
    assert sum("forward" in vars(module) for module in model.modules()) == 3
    roomy.apply_(model)
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(ConversionError, match="expected blocks"):
        plan.apply_(mlp())


def test_a_plan_prints_itself() -> None:
    plan = MemoryPlan(830_000, 820_000, 1_650_000, 25_000_000, "Net", 32, 11, True, "low_rank", 28_500_000, ("a note",))
    assert str(plan).splitlines() == [
        "a step of Net on 32 samples: 3 micro-batches of 11, recomputing, contraction low rank, from both ends",
        "  weights       0.83 MB",
        "  gradients     0.82 MB",
        "  optimizer     1.65 MB",
        "  activations  25.00 MB",
        "  peak         28.30 MB",
        "  budget       28.50 MB",
        "  headroom      0.20 MB",
        "  note: a note",
    ]


# --- low-rank contraction of a layer --------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_set_to_low_rank_merges_its_factors_whatever_the_plan(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(TTLinear(TTSpec(256, 256, (16, 16), (16, 16), (1, 16, 96, 16, 1))))
    if fused:
        fuse_(model)
    merges: list[object] = []
    for place in (ops_linear, merge_cache):
        real = place.merge
        monkeypatch.setattr(place, "merge", lambda *given, real=real: (merges.append(given), real(*given))[1])
    for contraction, expected in (("planned", 0), ("low_rank", 1)):
        model[0].contraction = contraction  # type: ignore[assignment]
        averaging(model, torch.randn(2, 256)).backward()
        assert len(merges) == expected


# --- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("28.5MB", 28_500_000), ("24MiB", 24 * 2**20), ("1_000 kB", 10**6), (".5gib", 2**29), ("7 B", 7), (12, 12)],
)
def test_sizes_as_people_write_them(size: str | int, nbytes: int) -> None:
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize("size", ["", "28.5", "28,5MB", "-1MB", "0MB", "MB", "1TB", "0.1B", 0, -5, 28.5, True, None])
def test_a_budget_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a budget above 0 in bytes, kB, .* got"):
        plan_memory(mlp(), torch.randn(4, WIDTH), size, loss=autoencoding)


@pytest.mark.parametrize(
    "batch", [torch.randn(0, WIDTH), (torch.randn(4, 2), torch.randn(3)), {"x": 1}, torch.tensor(1.0), []]
)
def test_a_batch_without_samples_of_one_count_is_refused(batch: Any) -> None:
    with pytest.raises(ConfigError, match="expected a batch of tensors whose first dimension is the number of samples"):
        plan_memory(mlp(), batch, HUGE, loss=autoencoding)


def test_too_small_a_budget_is_refused_with_the_smallest_that_will_do() -> None:
    model, x = tensorized(), torch.randn(8, WIDTH)
    smallest = least(model, x, loss=autoencoding)
    assert plan_memory(model, x, smallest, loss=autoencoding).headroom == 0
    message = r"at least [\d,]+ bytes \(0\.\d\d MB\) .* recomputing, .* takes weights 0\.\d\d MB, .*: raise the budget"
    with pytest.raises(ConfigError, match=message):
        plan_memory(model, x, smallest - 1, loss=autoencoding)


def test_batch_norm_limits_micro_batches() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
    x = torch.randn(256, WIDTH)
    with pytest.raises(ConfigError, match=r"smaller micro-batches fail: ValueError: Expected more than 1 value"):
        plan_memory(model, x, "20kB", optimizer="sgd", loss=averaging)
    plan = plan_memory(model, x, least(model, x, optimizer="sgd", loss=averaging), optimizer="sgd", loss=averaging)
    assert 1 < plan.micro_batch < 256
    assert plan.notes == ("batch norm takes its statistics from micro-batches",)


def test_a_step_that_fails_is_reported_with_its_cause() -> None:
    with pytest.raises(ConfigError, match=r"a training step of Sequential .* to run, got RuntimeError: mat1 and mat2"):
        plan_memory(mlp(), torch.randn(4, WIDTH + 1), HUGE, loss=autoencoding)
    with pytest.raises(ConfigError, match=r"a model that returns a loss, .* got Tensor: pass loss="):
        plan_memory(mlp(), torch.randn(4, WIDTH), HUGE)
    with pytest.raises(ConfigError, match=r"a loss that is one number with a gradient, got \(4, 64\)"):
        plan_memory(mlp(), torch.randn(4, WIDTH), HUGE, loss=lambda model, x: model(x))
    other = mlp()
    with pytest.raises(ConfigError, match="to use the model that it is given"):
        plan_memory(mlp(), torch.randn(4, WIDTH), HUGE, loss=lambda model, x: other(x).sum())
    with pytest.raises(ConfigError, match=r"expected an optimizer out of adamw, .*, momentum, got 'lion'"):
        plan_memory(mlp(), torch.randn(4, WIDTH), HUGE, optimizer="lion", loss=autoencoding)


def test_an_optimizer_of_ones_own() -> None:
    model, x = mlp(), torch.randn(4, WIDTH)
    plan = plan_memory(model, x, HUGE, optimizer=lambda model: torch.optim.Adagrad(model.parameters()), loss=averaging)
    assert plan.optimizer == plan.weights + 4 * len(list(model.parameters()))


def test_the_room_s_old_name_has_its_public_names() -> None:
    assert comera.recompute.__all__ == comera.memory.__all__
    assert all(getattr(comera.recompute, name) is getattr(comera.memory, name) for name in comera.memory.__all__)
