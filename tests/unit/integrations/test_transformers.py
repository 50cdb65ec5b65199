"""RankCallback: transformers' Trainer trains a compressed model, is interrupted, and goes on after cuts."""

import json
import os
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

import comera
from comera.errors import ConfigError
from comera.integrations.transformers import RankCallback
from comera.nn.tensor_train import named_trains

from ...helpers.processes import in_processes

pytestmark = pytest.mark.filterwarnings("ignore:the late stage :UserWarning")  # short ones, in these tests

logging.disable_progress_bar()

LATE = comera.LateStage(target_size=0.4, start_step=4, steps=20)  # gates are zeroed from step 5 on
STEPS = 30


class Pairs(Dataset[dict[str, Tensor]]):
    """Two numbers, and the larger one to predict; every third one also twice, so that counts of labels differ."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pair = torch.randint(64, (2,), generator=torch.Generator().manual_seed(index))
        largest = pair.amax(0, keepdim=True)
        first = largest if index % 3 == 0 else torch.tensor([-100])
        labels = torch.cat([torch.full((1,), -100), first, largest])
        return {"input_ids": torch.cat([pair, largest]), "labels": labels}


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, **sizes))
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=8), comera.TTM(order=2, rank=8)))
    return model


def trainer_of(
    out: Path, *more: TrainerCallback, ranks: RankCallback | None = None, makes: bool = False, **options: Any
) -> Trainer:
    """makes: whether the Trainer makes its optimizer itself."""
    model, decay = build(), options.get("weight_decay", 0.0)
    optimizer = None if makes else torch.optim.AdamW(comera.param_groups(model, lr=3e-3, weight_decay=decay))
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "optim": "adamw_torch",
        "per_device_train_batch_size": 8,
        "save_steps": 13,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(str(out), **settings | options)
    ranks = RankCallback(late=LATE, prune_every=5) if ranks is None else ranks
    data = {"train_dataset": Pairs(), "eval_dataset": Pairs()}
    return Trainer(model, arguments, **data, optimizers=(optimizer, None), callbacks=[*more, ranks])


def ranks_of(trainer: Trainer) -> RankCallback:
    found = [each for each in trainer.callback_handler.callbacks if isinstance(each, RankCallback)]
    return found[0]


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


class Interrupt(TrainerCallback):
    """Raises in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise InterruptedError


class Stop(TrainerCallback):
    """Ends the training before its last step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= 28


OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation_steps": 3},
    {"gradient_accumulation_steps": 2, "activation_checkpointing": True, "bf16": True},
    {"restore_callback_states_from_checkpoint": True, "max_grad_norm": 0.0},
    {"makes": True, "weight_decay": 0.1, "warmup_steps": 3, "lr_scheduler_type": "cosine"},
    {"makes": True, "restore_callback_states_from_checkpoint": True, "optim": "adamw_torch_fused"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_a_resumed_run_ends_like_the_unbroken_one(options: dict[str, Any], tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "whole", **options)
    whole.train()
    for interrupted in (20, 28):  # in the late stage, after a cut
        cut = trainer_of(tmp_path / "cut", Interrupt(interrupted), **options)
        with pytest.raises(InterruptedError):
            cut.train(resume_from_checkpoint=interrupted > 20)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "cut" / "checkpoint-26")
    assert comera.model_size(saved).tensorized < 0.5 * comera.model_size(build()).tensorized
    resumed = trainer_of(tmp_path / "cut", **options)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    values = zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True)
    assert [name for (name, one), other in values if not torch.equal(one, other)] == []
    first, second = (ranks_of(each).state()["attributes"]["saved"] for each in (whole, resumed))
    assert first == second


def test_the_target_is_met_before_the_last_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.train()
    controller = ranks_of(trainer).controller
    assert controller is not None
    assert comera.model_size(trainer.model).tensorized <= controller.target_size
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    assert comera.model_size(loaded).tensorized == comera.model_size(trainer.model).tensorized
    ids = torch.arange(6).reshape(2, 3)
    assert torch.equal(loaded(ids).logits, trainer.model.eval()(ids).logits)


def test_a_run_that_stops_early_can_go_on(tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "whole")
    whole.train()
    stopped = trainer_of(tmp_path / "cut", Stop())
    stopped.train()
    controller = ranks_of(stopped).controller
    assert controller is not None
    assert comera.model_size(stopped.model).tensorized <= controller.target_size  # in memory
    resumed = trainer_of(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-26"))
    assert losses(resumed) == losses(whole)


def test_the_best_model_has_its_own_ranks(tmp_path: Path) -> None:
    class FirstIsBest(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["metrics"]["eval_score"] = -state.global_step

    best = {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "load_best_model_at_end": True}
    trainer = trainer_of(tmp_path, FirstIsBest(), **best, metric_for_best_model="score", greater_is_better=True)
    first = comera.model_size(trainer.model).tensorized
    with pytest.warns(UserWarning, match=r"the best model, .*checkpoint-3, has .* above the target of"):
        trainer.train()
    assert comera.model_size(trainer.model).tensorized == first  # that of step 3, before any cut
    history = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert trainer.evaluate()["eval_loss"] == history[0]["eval_loss"]
    shapes = {p: p.shape for p in trainer.model.parameters()}
    for parameter, state in trainer.optimizer.optimizer.state.items():
        assert all(value.shape == shapes[parameter] for value in state.values() if value.ndim)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.args.max_steps = 2
        trainer.train()  # another run, from the best model


def test_the_observed_loss_is_the_one_that_the_trainer_logs(tmp_path: Path) -> None:
    for accumulate in (1, 3):
        ranks = RankCallback()
        trainer = trainer_of(tmp_path, ranks=ranks, gradient_accumulation_steps=accumulate, max_steps=4)
        trainer.train()
        assert ranks.controller is not None
        observed = ranks.controller.state_dict()["loss"]
        assert observed == pytest.approx(sum(losses(trainer)) / 4, rel=1e-5)


def test_losses_that_the_trainer_computes_are_recorded(tmp_path: Path) -> None:
    ranks = RankCallback()

    def compute_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = torch.nn.functional.cross_entropy(outputs.logits[:, 1], labels[:, 2])
        ranks.record(loss)
        return loss

    trainer = trainer_of(tmp_path, ranks=ranks, max_steps=4)
    trainer.compute_loss_func = compute_loss
    trainer.train()
    assert ranks.controller is not None
    assert ranks.controller.state_dict()["loss"] == pytest.approx(sum(losses(trainer)) / 4, rel=1e-5)


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor"])
def test_the_optimizer_that_the_trainer_makes_has_the_rates_of_param_groups(optim: str, tmp_path: Path) -> None:
    seen = []

    class See(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            inner = kwargs["optimizer"].optimizer
            inner.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(optimizer.param_groups))

    options = {"optim": optim, "max_steps": 1, "weight_decay": 0.1}
    made = trainer_of(tmp_path, See(), makes=True, **options)
    expected = {}
    for group in comera.param_groups(made.model, lr=3e-3, weight_decay=0.1):
        expected |= {p: pytest.approx((group["lr"], group["weight_decay"]), rel=1e-6) for p in group["params"]}
    made.train()
    found = {p: (group["lr"], group["weight_decay"]) for group in seen[0] for p in group["params"]}
    assert found == expected
    own = made.optimizer.optimizer.param_groups
    assert [group["initial_lr"] for group in own] == made.lr_scheduler.base_lrs == [3e-3, 3e-3]


def test_it_trains_as_with_one_of_param_groups(tmp_path: Path) -> None:
    made = trainer_of(tmp_path / "made", makes=True, weight_decay=0.1, warmup_steps=3)
    made.train()
    given = trainer_of(tmp_path / "given", weight_decay=0.1, warmup_steps=3)
    given.train()
    torch.testing.assert_close(losses(made), losses(given), rtol=1e-4, atol=1e-5)
    assert ranks_of(made).state()["attributes"]["rates"] is not None
    assert ranks_of(given).state()["attributes"]["rates"] is None
    assert comera.model_size(made.model).tensorized == comera.model_size(given.model).tensorized


def test_a_run_that_began_with_one_rate_goes_on_so(tmp_path: Path) -> None:
    trainer_of(tmp_path, makes=True, max_steps=5).train()
    path = tmp_path / "checkpoint-5" / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["RankCallback"]["attributes"]["rates"]  # as earlier versions wrote it
    path.write_text(json.dumps(state))
    with pytest.warns(UserWarning, match="the optimizer has no rates of their own for cores"):
        trainer_of(tmp_path, makes=True, max_steps=10).train(resume_from_checkpoint=True)


def test_rates_that_a_given_optimizer_has_are_left_alone(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, makes=True, max_steps=1)
    own = torch.optim.AdamW(trainer.model.parameters(), lr=3e-3, weight_decay=0.0)
    ranks = RankCallback()
    again = Trainer(trainer.model, trainer.args, train_dataset=Pairs(), optimizers=(own, None), callbacks=[ranks])
    with pytest.warns(UserWarning, match="the optimizer has no rates of their own for cores"):
        again.train()
    assert ranks.rates is None


def test_gates_that_are_decayed_are_reported(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.optimizer = None
    trainer.args.weight_decay = 0.1
    with pytest.warns(UserWarning, match="the optimizer decays gates"):
        trainer.train()


def test_a_checkpoint_of_a_run_without_the_callback(tmp_path: Path) -> None:
    trainer_of(tmp_path, max_steps=5).train()
    path = tmp_path / "checkpoint-5" / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["RankCallback"]
    path.write_text(json.dumps(state))
    with pytest.warns(UserWarning, match="the checkpoint of step 5 holds no state of a RankCallback"):
        trainer_of(tmp_path, max_steps=10).train(resume_from_checkpoint=True)
    state = json.loads((tmp_path / "checkpoint-10" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["RankCallback"]["attributes"]["saved"]["steps"] == 5


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="prune_every: expected"):
        RankCallback(prune_every=-1)
    again = RankCallback(**RankCallback(late=LATE, multiple=2).state()["args"])
    assert (again.late, again.multiple) == (LATE, 2)


def test_nothing_stays_attached(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.train()
    assert not trainer.model._forward_hooks
    assert not trainer.optimizer.optimizer._optimizer_step_pre_hooks
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks
    trainer.train()
    assert len(list(named_trains(trainer.model))) > 0
    shutil.rmtree(tmp_path)


def ddp_runs(rank: int, folder: str) -> list[tuple[list[float], int, list[float]]]:
    """In each process, an unbroken run and one that was interrupted after a cut: losses, size, and all parameters."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    options = {"ddp_backend": "gloo", "gradient_accumulation_steps": 2}
    with suppress(InterruptedError):
        trainer_of(Path(folder, "cut"), Interrupt(28), **options).train()
    found = []
    for name in ("whole", "cut"):
        trainer = trainer_of(Path(folder, name), **options)
        trainer.train(resume_from_checkpoint=name == "cut")
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        values = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
        found.append((losses(trainer), comera.model_size(trainer.model).tensorized, values.tolist()))
    return found


def test_two_processes(tmp_path: Path) -> None:
    (whole, resumed), others = in_processes(ddp_runs, str(tmp_path))
    assert whole[1] < 0.5 * comera.model_size(build()).tensorized
    assert resumed == whole
    assert [values for *_, values in others] == [whole[2], whole[2]]  # replicas stay replicas


class Averaging(TrainerCallback):
    """An exponential moving average, made as training begins."""

    model: AveragedModel

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.model = AveragedModel(kwargs["model"], multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.model.update_parameters(kwargs["model"])


@pytest.mark.parametrize("first", [True, False])
def test_an_average_of_another_callback_follows_wherever_it_stands(first: bool, tmp_path: Path) -> None:
    average = Averaging()
    ranks = RankCallback(late=LATE, prune_every=5, copies=lambda: [average.model])
    trainer = trainer_of(tmp_path, *([average] if first else []), ranks=ranks)
    if not first:
        trainer.add_callback(average)
    trainer.train()
    with torch.no_grad():
        batch = {name: torch.stack([Pairs()[k][name] for k in range(96)]) for name in ("input_ids", "labels")}
        own, averaged, fresh = (model.eval()(**batch).loss for model in (trainer.model, average.model.module, build()))
    assert averaged < own + 0.1 < fresh
    assert [p.shape for p in average.model.module.parameters()] == [p.shape for p in trainer.model.parameters()]


def test_an_average_of_another_callback_that_is_not_given_is_said(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Averaging(), ranks=RankCallback(late=LATE), max_steps=5)
    with pytest.warns(UserWarning, match=r"a copy made by copy.deepcopy would not follow.*give it as copies=\[...\]"):
        trainer.train()


def test_copies_do_not_get_lost_with_a_callback_that_is_made_anew(tmp_path: Path) -> None:
    average = Averaging()

    def run(steps: int, **options: Any) -> Trainer:
        ranks = RankCallback(late=LATE, copies=lambda: [average.model])
        return trainer_of(tmp_path, average, ranks=ranks, max_steps=steps, save_steps=3, **options)

    run(3).train()
    with pytest.raises(ConfigError, match="expected the copies that this RankCallback had"):
        run(6, restore_callback_states_from_checkpoint=True).train(resume_from_checkpoint=True)
    run(6).train(resume_from_checkpoint=True)
