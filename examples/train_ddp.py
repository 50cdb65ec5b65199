"""DDP in a loop of one's own: ranks are cut on the way. Run it again to go on where it stopped.

torchrun --nproc_per_node 2 examples/train_ddp.py --out runs/ddp
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import comera

STEPS, SAVE_EVERY, PRUNE_EVERY = 60, 10, 10


def build() -> nn.Sequential:
    """Two numbers in, the larger one out."""
    model = nn.Sequential(nn.Embedding(256, 64), nn.Flatten(), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256))
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(rank=16), comera.TTM(rank=16)))
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/ddp"))
    out = parser.parse_args().out
    last = out / "last.pt"

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build()
    saved = torch.load(last) if last.exists() else None
    if saved:
        model.load_state_dict(saved["model"])  # cut ranks included
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(comera.param_groups(model, lr=3e-3))
    # given the wrapper, the controller wraps anew whenever ranks fall
    ranks = comera.RankController(ddp, late=comera.LateStage(target_size=0.4, start_step=20, steps=30))
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        ranks.load_state_dict(saved["ranks"])
    ranks.attach(optimizer)
    for step in range(saved["step"] if saved else 0, STEPS):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        pairs = torch.randint(256, (64, 2), generator=generator)
        loss = nn.functional.cross_entropy(ddp(pairs), pairs.amax(1))
        loss.backward()
        ranks.observe(loss)  # each process its own: decisions use the mean
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.6f}, {comera.model_size(model).tensorized} parameters", flush=True)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % PRUNE_EVERY == 0:
            ranks.prune_()
        if (step + 1) % SAVE_EVERY == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ranks": ranks.state_dict()}
            out.mkdir(parents=True, exist_ok=True)
            torch.save({**state, "step": step + 1}, out / "new.pt")
            os.replace(out / "new.pt", last)  # a kill leaves the old one or the new one
        dist.barrier()
    ranks.meet_target_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
