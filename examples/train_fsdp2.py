"""FSDP2: the dense rest of a compressed model is sharded, ranks are cut on the way. Run it again to go on, in as many
processes as you like.

torchrun --nproc_per_node 2 examples/train_fsdp2.py --out runs/fsdp2
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import comera
from comera.integrations.fsdp import clip_grad_norm_, fit_ranks_, replicate_

STEPS, SAVE_EVERY, PRUNE_EVERY = 60, 10, 10


def build() -> nn.Sequential:
    """Two numbers in, the larger one out."""
    model = nn.Sequential(
        nn.Embedding(256, 64), nn.Flatten(), nn.Linear(128, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256)
    )
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(rank=16), comera.TTM(rank=16), overrides={"5": None}))
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2"))
    out = parser.parse_args().out

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build()
    kept = replicate_(model)  # the compressed layers stay whole on every process
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, ignored_params=kept)
    optimizer = torch.optim.AdamW(comera.param_groups(model, lr=3e-3))
    ranks = comera.RankController(model, late=comera.LateStage(target_size=0.4, start_step=20, steps=30))

    saved = sorted(file.parent for file in out.glob("step-*/.metadata"))  # which is written last
    if saved:
        fit_ranks_(model, saved[-1], optimizers=[optimizer])
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments, "ranks": ranks}, checkpoint_id=saved[-1])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    ranks.attach(optimizer)
    for step in range(int(saved[-1].name[5:]) if saved else 0, STEPS):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        pairs = torch.randint(256, (64, 2), generator=generator)
        loss = nn.functional.cross_entropy(model(pairs), pairs.amax(1))
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        ranks.observe(loss)  # each process its own: decisions use the mean
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.6f}, {comera.model_size(model).tensorized} parameters", flush=True)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % PRUNE_EVERY == 0:
            ranks.prune_()
        if (step + 1) % SAVE_EVERY == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save(
                {"model": weights, "optimizer": moments, "ranks": ranks}, checkpoint_id=out / f"step-{step + 1:06d}"
            )
    ranks.meet_target_()
    comera.save_pretrained(model, out / "model")  # gathered, written by the first process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
