"""Lightning: train a compressed model and cut its ranks on the way. Run it again to go on where it stopped.

python examples/train_lightning.py --out runs/lightning
"""

import argparse
from pathlib import Path

import pytorch_lightning as pl  # or: import lightning.pytorch as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import comera
from comera.integrations.lightning import RankCallback


class Larger(pl.LightningModule):
    """Two numbers in, the larger one out."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Embedding(256, 64), nn.Flatten(), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256)
        )
        comera.tensorize_(self.model, comera.TensorizeConfig(comera.TT(rank=16), comera.TTM(rank=16)))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        pairs, sums = batch
        loss = nn.functional.cross_entropy(self.model(pairs), sums)
        print(f"step {self.global_step}: loss {loss:.6f}, {comera.model_size(self).tensorized} parameters", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(comera.param_groups(self, lr=3e-3))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    out = parser.parse_args().out

    pl.seed_everything(0)
    pairs = torch.randint(256, (640, 2))
    batches = DataLoader(TensorDataset(pairs, pairs.amax(1)), batch_size=64)
    ranks = RankCallback(late=comera.LateStage(target_size=0.4, start_step=20, steps=30), prune_every=10)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=6,
        callbacks=[ranks, ModelCheckpoint(out, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = out / "last.ckpt"
    trainer.fit(Larger(), batches, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
