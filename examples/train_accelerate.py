"""Accelerate: train a compressed model and cut its ranks on the way. Run it again to go on where it stopped.

accelerate launch --cpu examples/train_accelerate.py --out runs/accelerate
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

import comera

STEPS, SAVE_EVERY, PRUNE_EVERY = 60, 10, 10


def build() -> nn.Module:
    """Two numbers in, the larger one out."""
    model = nn.Sequential(nn.Embedding(256, 64), nn.Flatten(), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256))
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(rank=16), comera.TTM(rank=16)))
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    out = parser.parse_args().out

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = build()
    optimizer = torch.optim.AdamW(comera.param_groups(model, lr=3e-3))
    model, optimizer = accelerator.prepare(model, optimizer)
    # made with what prepare returned, so that a wrapper (DDP) follows the ranks
    ranks = comera.RankController(model, late=comera.LateStage(target_size=0.4, start_step=20, steps=30))
    ranks.attach(optimizer)
    accelerator.register_for_checkpointing(ranks)

    saved = sorted(out.glob("step-*"))
    if saved:
        accelerator.load_state(saved[-1])  # cut ranks included
    for step in range(int(saved[-1].name[5:]) if saved else 0, STEPS):
        generator = torch.Generator().manual_seed(step)
        pairs = torch.randint(256, (64, 2), generator=generator)
        loss = nn.functional.cross_entropy(model(pairs), pairs.amax(1))
        print(f"step {step}: loss {loss:.6f}, {comera.model_size(model).tensorized} parameters", flush=True)
        accelerator.backward(loss)
        ranks.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % PRUNE_EVERY == 0:
            ranks.prune_()
        if (step + 1) % SAVE_EVERY == 0:
            accelerator.save_state(out / "new")
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:  # a kill leaves none of that name that is half written
                (out / "new").rename(out / f"step-{step + 1:06d}")
    print(ranks.meet_target_())


if __name__ == "__main__":
    main()
