"""RankCallback in Lightning's Trainer: what it observes, cuts and resumes."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from comera.convert import TT, TTM, TensorizeConfig, tensorize_
from comera.errors import ConfigError, RankError
from comera.fusion import fuse_
from comera.integrations.lightning import RankCallback
from comera.nn.size import model_size
from comera.optim.param_groups import param_groups
from comera.rank import LateStage

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
    net.configure_optimizers = lambda: torch.optim.AdamW(net.parameters(), lr=0.0)  # type: ignore[method-assign]
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
