"""Training steps in mode eager or graph, and what they leave behind, for tests of recordings on a CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import comera
from comera.optim import AdamW
from comera.optim.param_groups import param_groups
from comera.rank.controller import RankController
from comera.trainer.step import StepResult, TrainStep

VOCABULARY = 30
Loss = Callable[[nn.Module, Any], Tensor]


def ids_of(step: int, lengths: tuple[int, ...] = (9, 12)) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (4, lengths[step % len(lengths)]), generator=generator)


def make(
    mode: str, build: Callable[[], nn.Module], loss: Loss, **options: Any
) -> tuple[TrainStep, RankController | None]:
    torch.manual_seed(1)
    model = build()
    optimizer = AdamW(param_groups(model, lr=1e-2), fused=True)
    late = options.pop("late", None)
    controller = None if late is None else RankController(model, late=late).attach(optimizer)
    torch.manual_seed(2)
    step = TrainStep(model, loss, optimizer, max_grad_norm=1.0, mode=mode, controller=controller, **options)  # type: ignore[arg-type]
    return step, controller


def run(
    step: TrainStep, count: int = 12, each: Callable[[int], object] = lambda k: None, **kind: Any
) -> list[StepResult]:
    results = []
    for k in range(count):
        results.append(step([ids_of(k, **kind)]))
        each(k)
    return results


def state(step: TrainStep) -> dict[str, Tensor]:
    moments = {f"{k} {name}": v for k, s in enumerate(step.optimizer.state.values()) for name, v in s.items()}
    return {**step.model.state_dict(), **moments, "random": torch.get_rng_state()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def bert() -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **sizes)).train()
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=8), None))
    comera.fuse_(model)
    return model


def of_class(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids[:, 0] % 2).loss
