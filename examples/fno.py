"""neuraloperator: a Fourier neural operator on Darcy flow, its spectral weights tensor trains whose ranks adapt.

python examples/fno.py --data FOLDER    # with darcy_train_16.pt, darcy_test_16.pt of zenodo.org/records/12784353
"""

import argparse
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from neuralop.models import FNO
from torch import Tensor, nn

import comera
from comera.nn import TensorTrain
from comera.tt import tt_spec


class SpectralWeight(nn.Module):
    """The complex weight (I, O, X, Y) of a spectral convolution, as a real tensor train over I, X, 2·Y and O."""

    def __init__(self, shape: Sequence[int], rank: int) -> None:
        super().__init__()
        i, o, x, y = self.shape = tuple(shape)
        spec = tt_spec(i * x, 2 * y * o, order=4, rank=rank, in_modes=(i, x), out_modes=(2 * y, o))
        self.tt = TensorTrain(spec, init_std=1 / sqrt(i + o))

    def __getitem__(self, kept: Any) -> Tensor:  # what the convolution reads
        i, o, x, y = self.shape
        weight_IXYCO = self.tt.dense().view(i, x, y, 2, o)
        return torch.view_as_complex(weight_IXYCO.permute(0, 4, 1, 2, 3).contiguous())[kept]


def read(path: Path) -> tuple[Tensor, Tensor]:
    """Coefficients and pressures, (samples, 1, height, width) each."""
    held = torch.load(path)
    return held["x"].float()[:, None], held["y"].float()[:, None]


def error(found: Tensor, true: Tensor) -> Tensor:
    """Mean relative L2 error."""
    return ((found - true).flatten(1).norm(dim=1) / true.flatten(1).norm(dim=1)).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("runs/darcy"))
    parser.add_argument("--channels", type=int, default=24)
    parser.add_argument("--modes", type=int, default=8)
    parser.add_argument("--rank", type=int, default=24, help="to begin with; 0: dense weights")
    parser.add_argument("--target", type=float, default=0.5, help="of the size of the spectral weights at that rank")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=2e-2)
    options = parser.parse_args()
    torch.manual_seed(0)
    x, y = read(options.data / "darcy_train_16.pt")
    mean, std = y.mean(), y.std()

    model = FNO((options.modes,) * 2, in_channels=1, out_channels=1, hidden_channels=options.channels)
    if options.rank:
        for conv in model.fno_blocks.convs:
            conv.weight = SpectralWeight(conv.weight.shape, options.rank)
    optimizer = torch.optim.AdamW(comera.param_groups(model, lr=options.lr, weight_decay=1e-4))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    if options.rank:
        late = comera.LateStage(options.target, start_step=options.steps * 2 // 5, steps=options.steps * 3 // 10)
        ranks = comera.RankController(model, comera.EarlyStage(size_weight=0), late).attach(optimizer)
    for step in range(options.steps):
        batch = torch.randint(len(x), (20,))
        loss = error(model(x[batch]) * std + mean, y[batch])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if options.rank:
            ranks.observe(loss.detach())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    if options.rank:
        print(repr(ranks.meet_target_()))
    stored = sum(p.numel() * (1 + p.is_complex()) for p in model.parameters())
    for path in sorted(options.data.glob("darcy_test_*.pt")):
        x, y = read(path)
        with torch.no_grad():
            print(f"{path.stem}: error {error(model(x) * std + mean, y):.4f} with {stored:,} real parameters")


if __name__ == "__main__":
    main()
