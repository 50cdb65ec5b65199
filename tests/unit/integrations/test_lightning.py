"""RankCallback in Lightning's Trainer: what it observes, cuts and resumes."""

import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from comera.convert import TT, TTM, TensorizeConfig, tensorize_
from comera.errors import ConfigError, RankError
from comera.fusion import fuse_
from comera.integrations.lightning import RankCallback
from comera.nn.size import model_size
from comera.optim.param_groups import param_groups
from comera.rank import LateStage

from ...helpers.fresh_python import run_fresh
from ...helpers.processes import in_processes

# Lightning's advice, and what torch says of it
ADVICE = (
    "The '.*_dataloader' does not have many workers",
    "You defined a `validation_step` but have no `val_dataloader`",
    "Checkpoint directory .* exists and is not empty",
    "`isinstance.treespec, LeafSpec.` is deprecated",
)
pytestmark = [pytest.mark.filterwarnings(f"ignore:{advice}") for advice in ADVICE]
LATE = LateStage(target_size=0.5, start_step=6, steps=20)


class Net(pl.LightningModule):
    """Keeps the losses that it computed."""

    def __init__(self, seed: int = 0, *, fused: bool = False, dense: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Embedding(60, 32), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 60))
        if not dense:
            tensorize_(self.model, TensorizeConfig(TT(order=4, rank=6), TTM(order=2, rank=6)))
        if fused:
            fuse_(self.model)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        pairs, labels = batch
        loss = nn.functional.cross_entropy(self.model(pairs), labels)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        pairs, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self.model(pairs), labels), batch_size=len(pairs))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(param_groups(self, lr=1e-2, weight_decay=0.01))


def data(examples: int = 160) -> Any:
    torch.manual_seed(1)
    pairs = torch.randint(60, (examples, 2))
    return DataLoader(TensorDataset(pairs, pairs.amax(1)), batch_size=16)


def trainer(ranks: RankCallback, epochs: int, folder: Path | None = None, **options: Any) -> pl.Trainer:
    saving = [] if folder is None else [ModelCheckpoint(folder, save_last=True, save_top_k=-1)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    checkpointing = {"enable_checkpointing": folder is not None}
    return pl.Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=[ranks, *saving], **quiet, **checkpointing, **options
    )


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_resumes_after_a_cut_to_the_bit(tmp_path: Path, fused: bool) -> None:
    whole = Net(fused=fused)
    trainer(RankCallback(late=LATE, prune_every=10), 6).fit(whole, data())

    ranks = RankCallback(late=LATE, prune_every=10)
    first = Net(fused=fused)
    full = model_size(first).tensorized
    trainer(ranks, 4, tmp_path).fit(first, data())
    last = tmp_path / "last.ckpt"
    loaded = Net.load_from_checkpoint(last, seed=3)
    assert model_size(loaded).tensorized < full
    assert first.losses == whole.losses[:40]

    ranks = RankCallback(late=LATE, prune_every=10)
    resumed = Net(seed=3, fused=fused)
    trainer(ranks, 6, tmp_path).fit(resumed, data(), ckpt_path=last)
    assert resumed.losses == whole.losses[40:]
    assert ranks.controller is not None
    assert ranks.controller.target_size is not None
    assert model_size(resumed).tensorized <= ranks.controller.target_size
    assert [p.shape for p in resumed.parameters()] == [p.shape for p in whole.parameters()]


def test_it_observes_the_loss_of_the_batch_and_counts_optimizer_steps() -> None:
    ranks = RankCallback()
    net = Net()
    trainer(ranks, 2, accumulate_grad_batches=2).fit(net, data())
    state = ranks.state_dict()
    assert state["steps"] == 10
    assert state["epochs"] == 2
    assert state["loss"] == pytest.approx(sum(net.losses) / len(net.losses), rel=1e-4)


def test_held_out_losses_start_the_late_stage() -> None:
    ranks = RankCallback(late=LateStage(target_size=0.5, start_step=None, plateau=1))
    net = Net()
    frozen = data()
    fit = trainer(ranks, 3, num_sanity_val_steps=1)
    net.configure_optimizers = lambda: torch.optim.AdamW(param_groups(net, lr=0.0))  # type: ignore[method-assign]
    fit.fit(net, frozen, frozen)
    assert ranks.state_dict()["best_held_out"] == pytest.approx(float(fit.callback_metrics["val_loss"]))
    assert ranks.controller is not None
    assert ranks.controller.stage == "late"


def test_a_checkpoint_without_the_callback_is_said(tmp_path: Path) -> None:
    pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, default_root_dir=tmp_path).fit(Net(), data(16))
    [saved] = tmp_path.rglob("*.ckpt")
    with pytest.warns(UserWarning, match="holds no state of a RankCallback: its stages begin now"):
        trainer(RankCallback(), 2, saved.parent).fit(Net(), data(16), ckpt_path=saved)


def test_without_a_target_what_is_pruned_is_cut_at_the_end() -> None:
    class Closes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            with torch.no_grad():
                pl_module.model[2].tt.rank_params[0][0] = 0.0

    net = Net()
    before = model_size(net).tensorized
    fit = trainer(RankCallback(), 1)
    fit.callbacks.append(Closes())
    fit.fit(net, data())
    assert model_size(net).tensorized < before


def train_in_two(rank: int, folder: str) -> tuple[list[float], int]:
    """Train with DDP beyond a cut, then resume from a checkpoint after it; returns the last losses and the size."""
    for pattern in (
        "The '.*_dataloader' does not",
        "You defined a `valid",
        "Checkpoint directory",
        "`isinstance.trees",
    ):
        warnings.filterwarnings("ignore", pattern)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    whole = Net()
    trainer(RankCallback(late=LATE, prune_every=10), 8, Path(folder), **options).fit(whole, data(320))
    resumed = Net(seed=3)
    [middle] = Path(folder).glob("epoch=4-*.ckpt")
    trainer(RankCallback(late=LATE, prune_every=10), 8, Path(folder), **options).fit(
        resumed, data(320), ckpt_path=middle
    )
    assert resumed.losses == whole.losses[50:]
    assert [p.shape for p in resumed.parameters()] == [p.shape for p in whole.parameters()]
    assert resumed.model[2].tt.spec != Net().model[2].tt.spec  # type: ignore[union-attr]
    return resumed.losses[-3:], model_size(resumed).tensorized


def test_processes_cut_alike_and_resume(tmp_path: Path) -> None:
    (losses, size), (other_losses, other_size) = in_processes(train_in_two, str(tmp_path))
    assert losses != other_losses  # of their own parts of the data
    assert size == other_size


def test_what_cannot_work_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="prune_every: expected a number of steps, or 0 for never, got -1"):
        RankCallback(prune_every=-1)
    with pytest.raises(RankError, match=r"call comera.tensorize_\(model\) first"):
        trainer(RankCallback(), 1).fit(Net(dense=True), data())
    net = Net()
    net.configure_optimizers = lambda: torch.optim.SGD(Net().parameters(), lr=0.1)  # type: ignore[method-assign]
    with pytest.raises(RankError, match="none of them a core or rank parameter"):
        trainer(RankCallback(), 1).fit(net, data())


AVERAGES: dict[str, Callable[[], pl.Callback]] = {
    "EMA": lambda: EMAWeightAveraging(decay=0.9),
    "SWA": lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=3),
}


class OneRate(Net):
    """Has one rate for all cores, which a schedule of others may set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        tensorize_(self.model, TensorizeConfig(TT(order=4, rank=8)))

    def training_step(self, batch: tuple[Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[0].roll(1, 1))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(param_groups(self, lr=1e-2, rates="flat"))

    def final(self, rows: Tensor) -> float:
        with torch.no_grad():
            return nn.functional.mse_loss(self.model(rows), rows.roll(1, 1)).item()


@pytest.mark.parametrize("name", AVERAGES)
def test_averages_of_callbacks_follow_wherever_they_stand(name: str, tmp_path: Path) -> None:
    rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    batches = DataLoader(TensorDataset(rows), batch_size=8)

    def fit(*callbacks: pl.Callback) -> OneRate:
        net = OneRate()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        options: dict[str, Any] = {"accelerator": "cpu", "enable_checkpointing": False, "default_root_dir": tmp_path}
        pl.Trainer(max_epochs=12, callbacks=list(callbacks), **quiet, **options).fit(net, batches)
        return net

    def ranks() -> RankCallback:
        return RankCallback(late=LateStage(target_size=0.8, start_step=30, steps=30), prune_every=10)

    plain, alone = fit(ranks()), fit(AVERAGES[name]())
    before, after = fit(AVERAGES[name](), ranks()), fit(ranks(), AVERAGES[name]())
    assert before.final(rows) == after.final(rows)
    assert after.final(rows) < max(plain.final(rows), alone.final(rows)) + 0.05
    assert model_size(after).tensorized <= 0.8 * model_size(OneRate()).tensorized
    assert any(not torch.equal(a, b) for a, b in zip(plain.parameters(), after.parameters(), strict=True))


def test_a_run_with_an_average_resumes_after_a_cut_to_the_bit(tmp_path: Path) -> None:
    def fit(net: Net, epochs: int, folder: Path | None = None, path: Path | None = None) -> None:
        run = trainer(RankCallback(late=LATE, prune_every=10), epochs, folder)
        run.callbacks.insert(1, EMAWeightAveraging(decay=0.9))
        run.fit(net, data(), data(), ckpt_path=path)

    whole, first, resumed = Net(), Net(), Net(seed=3)
    fit(whole, 6)
    fit(first, 4, tmp_path)
    fit(resumed, 6, tmp_path, tmp_path / "last.ckpt")
    assert resumed.losses == whole.losses[40:]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_copies_that_the_callback_is_given_follow() -> None:
    net = Net()
    ema = AveragedModel(net.model)

    class Updates(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            ema.update_parameters(pl_module.model)

    fit = trainer(RankCallback(late=LATE, prune_every=10, copies=[ema]), 5)
    fit.callbacks.append(Updates())
    fit.fit(net, data())
    assert [p.shape for p in ema.module.parameters()] == [p.shape for p in net.model.parameters()]


def test_rates_that_a_schedule_overwrites_are_said() -> None:
    class OneCycle(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(param_groups(self, lr=1e-2))
            rates = [group["lr"] for group in optimizer.param_groups] if self.each else 1e-2
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=10)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    for each in (True, False):
        OneCycle.each = each  # type: ignore[attr-defined]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer(RankCallback(), 1).fit(OneCycle(), data())
        said = [one for one in said if "a schedule has overwritten the rates" in str(one.message)]
        assert bool(said) is not each
    run = trainer(RankCallback(), 3)
    run.callbacks.append(StochasticWeightAveraging(1e-2, swa_epoch_start=1))
    with pytest.warns(UserWarning, match="a schedule has overwritten the rates"):
        run.fit(Net(), data())
    net = Net()
    net.configure_optimizers = lambda: torch.optim.AdamW(net.parameters(), lr=1e-2)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="the optimizer decays gates.* and has no rates of their own for cores"):
        trainer(RankCallback(), 1).fit(net, data())


@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning.pytorch"])
def test_lightning_under_either_name(name: str, tmp_path: Path) -> None:
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    script = f"""
import sys, torch, {name} as pl, comera
from comera.integrations.lightning import RankCallback
from torch.utils.data import DataLoader, TensorDataset
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(64, 64)
        self.model = torch.nn.Sequential(self.model)
        comera.tensorize_(self.model, ratio=2)
    def training_step(self, batch, index):
        return self.model(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(comera.param_groups(self, lr=1e-2))
ranks = RankCallback(late=comera.LateStage(target_size=0.5, start_step=4, steps=4), prune_every=2)
assert isinstance(ranks, pl.Callback)
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
options["default_root_dir"] = sys.argv[1]
average = pl.callbacks.EMAWeightAveraging(decay=0.9)
trainer = pl.Trainer(accelerator="cpu", max_epochs=2, callbacks=[ranks, average], **options)
net = Net()
before = comera.model_size(net).tensorized
trainer.fit(net, DataLoader(TensorDataset(torch.randn(64, 64)), 8))
averaged = average._average_model.module.model[0]
print(comera.model_size(net).tensorized <= before // 2, averaged.tt.spec == net.model[0].tt.spec)
"""
    shown = run_fresh(script, str(tmp_path))
    assert shown.stdout.splitlines()[-1:] == ["True True"], shown.stderr
