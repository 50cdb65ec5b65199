"""Lanes: the step of one thread, by several, with numbers that a seed and the number of lanes fix."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import comera
import comera.nn.together as together
from comera.errors import ConfigError, DataError, TrainingError
from comera.nn.fuse import fuse_
from comera.train.config import TrainConfig
from comera.train.lanes import split
from comera.train.loop import fit
from comera.train.step import TrainStep

from .test_train_modes import CONFIG, Tiny, learned, records


class Pairs(NamedTuple):
    ids: Tensor
    labels: Tensor


def make_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_labels=3,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = BertForSequenceClassification(config).double()
    comera.tensorize_(model, comera.TensorizeConfig(linear=comera.TT(order=4, rank=6), embedding=None))
    fuse_(model)
    return model.train()


def make_batches(*examples: int) -> list[Pairs]:
    generator = torch.Generator().manual_seed(1)
    return [
        Pairs(torch.randint(50, (size, 40), generator=generator), torch.randint(3, (size,), generator=generator))
        for size in examples
    ]


def loss_of(model: nn.Module, batch: Pairs) -> Tensor:
    return F.cross_entropy(model(input_ids=batch.ids).logits, batch.labels)


def make_step(model: nn.Module, lanes: int, **options: Any) -> TrainStep:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return TrainStep(model, loss_of, torch.optim.SGD(parameters, lr=0.1), lanes=lanes, **options)


def gradients(model: nn.Module, lanes: int, *examples: int) -> tuple[Tensor, list[Tensor | None]]:
    result = make_step(model, lanes)(make_batches(*examples))
    return result.loss, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("lanes", [2, 3, 5])
@pytest.mark.parametrize("examples", [(6,), (7,), (3, 8), (2, 1, 1), (1, 1)])
def test_gradients_are_those_of_one_thread(lanes: int, examples: tuple[int, ...]) -> None:
    one, several = make_model(), make_model()
    expected, found = gradients(one, 1, *examples), gradients(several, lanes, *examples)
    torch.testing.assert_close(found[0], expected[0])
    for mine, its in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-12)


def test_parameters_that_take_no_part_or_no_gradient_get_none() -> None:
    model = make_model()
    model.unused = nn.Linear(3, 3)
    model.bert.pooler.requires_grad_(False)
    gradients(model, 2, 4)
    assert model.unused.weight.grad is None
    assert all(p.grad is None for p in model.bert.pooler.parameters())


def test_recomputation_in_lanes_changes_no_gradient() -> None:
    one, several = make_model(), make_model()
    comera.recompute_(several)
    for mine, its in zip(gradients(several, 2, 6)[1], gradients(one, 1, 6)[1], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-12)


def test_bf16_reaches_the_lanes() -> None:
    seen = []

    def loss(model: nn.Module, batch: Pairs) -> Tensor:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return loss_of(model, batch)

    model = make_model().float()
    TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), lanes=2, precision="bf16")(make_batches(4))
    assert seen == [torch.bfloat16] * 2


@pytest.mark.parametrize(("lanes", "examples"), [(1, (2, 2, 2)), (3, (6,)), (2, (4, 4, 4))])
def test_chains_are_merged_once_in_a_step(
    lanes: int, examples: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    merged: list[tuple[int, int]] = []
    merge_together = together.merge_together

    def counted(specs: Any, chains: Any, *others: Any) -> Any:
        merged.append(specs[0].shape)
        return merge_together(specs, chains, *others)

    monkeypatch.setattr(together, "merge_together", counted)
    model = make_model()
    step = make_step(model, lanes)
    for _ in range(2):  # the second step begins anew, with other weights
        merged.clear()
        step(make_batches(*examples))
        assert merged
        assert len(merged) == len(set(merged))
    monkeypatch.undo()
    expected, found = make_model(), make_model()
    for made, count in ((expected, 1), (found, lanes)):
        step = make_step(made, count)
        for batch in make_batches(*examples):
            step([batch])
    for mine, its in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-12)


def test_a_seed_fixes_what_is_dropped_in_every_lane() -> None:
    def losses(seed: int) -> list[float]:
        model = make_model(dropout=0.2)
        step = make_step(model, 3)
        torch.manual_seed(seed)
        return [step(make_batches(6)).loss.item() for _ in range(4)]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_lanes_drop_different_entries() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    fuse_(model)
    kept = {}

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        kept[int(batch[0, 0])] = model(torch.ones(1000)) > 0
        return model.scale.sum()

    TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), lanes=2)([torch.tensor([[0], [1]])])
    assert 400 < int((kept[0] != kept[1]).sum()) < 600


def test_draws_that_lanes_do_not_order_are_refused_and_nothing_is_stepped() -> None:
    model = make_model(dropout=0.1)
    fuse_(model, enabled=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TrainingError, match=r"torch's global one.*train.fuse.*lanes 1"):
        make_step(model, 2)(make_batches(4))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_error_in_a_lane_is_raised_and_the_next_step_is_a_whole_one() -> None:
    model = make_model()
    fails = [True]

    def loss(model: nn.Module, batch: Pairs) -> Tensor:
        value = loss_of(model, batch)
        if fails and int(batch.labels[0]) == int(last.labels[-1]):
            raise ValueError("in a lane")
        return value

    (batch,) = make_batches(2)
    last = batch
    step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), lanes=2)
    with pytest.raises(ValueError, match="in a lane"):
        step([batch])
    fails.clear()
    found = step([batch])
    torch.testing.assert_close(found.loss, make_step(make_model(), 1)([batch]).loss)


def test_threads_of_the_others_stay() -> None:
    before = torch.get_num_threads()
    make_step(make_model(), 2)
    assert torch.get_num_threads() == before


def test_batches_are_taken_apart_evenly_and_weighed_by_examples() -> None:
    parts = split([{"x": torch.arange(7), "name": "kept"}, {"x": torch.arange(2), "name": "small"}], 3)
    assert [(part.batch["x"].tolist(), part.batch["name"]) for part in parts] == [
        ([0, 1], "kept"),
        ([2, 3], "kept"),
        ([4, 5, 6], "kept"),
        ([0], "small"),
        ([1], "small"),
    ]
    assert [part.share for part in parts] == pytest.approx([1 / 7, 1 / 7, 3 / 14, 1 / 4, 1 / 4])


@pytest.mark.parametrize(
    "batch", [(torch.zeros(4, 2), torch.zeros(3)), (torch.zeros(4), torch.zeros(())), (torch.zeros(0, 2),), ("text",)]
)
def test_batches_that_cannot_be_taken_apart_are_refused(batch: Any) -> None:
    with pytest.raises(DataError, match=r"begin with the same number of examples.*got shapes .*lanes 1"):
        split([batch], 2)


def test_models_and_modes_that_cannot_run_in_lanes_say_so() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, lambda model, batch: model(batch).sum(), optimizer, lanes=2)
    assert step.mode == "eager (batch norm mixes the examples of a batch, which lanes take apart)"
    step([torch.randn(4, 3)])
    with pytest.raises(ConfigError, match="mode eager for 2 lanes, got mode 'compile'"):
        TrainStep(model, loss_of, optimizer, lanes=2, mode="compile")
    with pytest.raises(ConfigError, match=r"train.lanes must be 1 in mode graph, got 2"):
        TrainConfig(steps=1, lanes=2, mode="graph")


def test_a_run_in_lanes_resumes_to_the_bit_and_only_with_as_many(tmp_path: Path) -> None:
    config = replace(CONFIG, lanes=3)
    whole = fit(Tiny(), config, tmp_path / "whole")
    assert whole.mode == "eager in 3 lanes"
    assert [line["mode"] for line in records(tmp_path / "whole", "mode")] == ["eager in 3 lanes"]
    fit(Tiny(ends=16), config, tmp_path / "halves")
    assert fit(Tiny(), config, tmp_path / "halves", resume=True).held_out_loss == whole.held_out_loss
    assert learned(tmp_path / "halves") == learned(tmp_path / "whole")

    fit(Tiny(ends=4), config, tmp_path / "other")
    with pytest.raises(ConfigError, match="lanes"):
        fit(Tiny(), replace(config, lanes=2), tmp_path / "other", resume=True)


def test_the_dense_twin_runs_in_lanes_too(tmp_path: Path) -> None:
    summary = fit(Tiny(compressed=False), replace(CONFIG, steps=3, late=comera.LateStage(), lanes=2), tmp_path)
    assert summary.mode == "eager in 2 lanes"
    assert "lanes" in json.loads(json.dumps(replace(CONFIG, lanes=2).identity()))
    assert "lanes" not in CONFIG.identity()
