"""One billion parameters in two processes, killed, continued in one, killed again, ended in two; ranks fall meanwhile.

    OMP_NUM_THREADS=1 python benchmarks/shards.py [--sides DDP FSDP2 "FSDP2, dense tables"]     34 minutes, 8 GB

The preset llama-1b of `comera train lm`, on Python's own library: two texts of 512 tokens a step, one in each process
or both in one. The late stage takes the compressed layers to half their size by step 11. Each side runs twice over
gloo: once without a break, and once killed, torchrun and all that it started, as soon as a checkpoint stands.

"DDP" is the command itself, whose processes average their gradients in one buffer. "FSDP2" treats the same model as
examples/train_fsdp2.py does: what is compressed stays whole in each process, `fully_shard` shards the rest, here norms
alone; with "dense tables" token table and head, too.

`parameters`, `checkpoint_mb` and `files` are those of the last checkpoint; `peak_mb`: resident memory of the process
that had most. `loss_apart`: from the loss of that step in the run without a break. `weights_apart`: the largest
difference of a weight at the end, `weights_apart_relative`: the norm of all differences over that of the weights.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import about, update
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import comera
from comera.cli.options import parse
from comera.integrations.fsdp import clip_grad_norm_, fit_ranks_, replicate_
from comera.optim.names import Rates
from comera.recipes.lm import recipe as lm
from comera.recipes.lm.data import prepare
from comera.trainer.state import adapt_

STEPS, EVERY, TEXTS = 12, 4, 2  # steps, those between checkpoints, and texts in a step
OPTIONS: dict[str, Any] = {
    **{"preset": "llama-1b", "train.steps": STEPS, "train.save_every": EVERY, "train.prune_every": 2},
    **{"train.late.target_size": 0.5, "train.late.start_step": 2, "train.late.steps": STEPS - 3},
    **{"train.log_every": 1, "train.eval_every": 0, "train.eval_batches": 1},
}
TINY = {"preset": "base", "model.hidden": 64, "model.layers": 2, "data.path": Path(json.__file__).parent}
TINY |= {"data.vocab_size": 400, "data.block_size": 32, "data.held_out": 0.2, "train.batch_size": 1}
DENSE = {"model.tie": "false", "compress.embedding": "dense", "compress.head": "dense"}
SIDES: dict[str, dict[str, Any]] = {"DDP": {}, "FSDP2": {}, "FSDP2, dense tables": DENSE}
RUNS = {"whole": ((2, STEPS),), "killed": ((2, EVERY), (1, 2 * EVERY), (2, STEPS))}  # processes, up to which step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--dry", action="store_true", help="a tiny model; writes nothing")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.process:
        train_sharded(json.loads(asked.process))
        return
    for side in asked.sides:
        with tempfile.TemporaryDirectory() as folder:
            rows = both_runs(side, Path(folder), OPTIONS | SIDES[side] | (TINY if asked.dry else {}))
        if not asked.dry:
            update("shards", rows, key=("side", "processes", "steps"))


def both_runs(side: str, folder: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each part of a side's two runs."""
    rows: list[dict[str, Any]] = []
    for name, parts in RUNS.items():
        out, begun = folder / name, 0
        for processes, end in parts:
            peak = run(side, out, processes, end, options)
            loss, parameters = logged(out, end)
            files = list(saved(out, end).iterdir())
            apart = weights_apart(*(folder / each for each in RUNS)) if begun and end == STEPS else ("", "")
            row = {
                **{"side": side, "processes": processes, "steps": f"{begun + 1} to {end}", "parameters": parameters},
                "peak_mb": f"{peak / 1e6:.0f}",
                "checkpoint_mb": f"{sum(file.stat().st_size for file in files) / 1e6:.0f}",
                "files": len(files),
                "loss": f"{loss:.6f}",
                "loss_apart": f"{abs(loss - logged(folder / 'whole', end)[0]):.2g}",
                **dict(zip(("weights_apart", "weights_apart_relative"), apart, strict=True)),
            }
            print(" | ".join(map(str, row.values())), flush=True)
            rows.append(row | about())
            begun = end
    return rows


def run(side: str, out: Path, processes: int, end: int, options: dict[str, Any]) -> int:
    """Begin or continue a run in so many processes, to its end or until it is killed at the checkpoint of step `end`;
    returns the peak bytes of a process."""
    ways = {"out": out, "train.accumulation": TEXTS // processes}
    words = [f"--{name}={value}" for name, value in (options | ways).items()] + ["--resume"] * out.exists()
    train = ["-m", "comera", "train", "lm", *words] if side == "DDP" else [__file__, "--process", json.dumps(words)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 or side != "DDP" else []), *train]
    log, peak, kills = out.with_suffix(".log"), 0, False
    with log.open("a") as file:
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        first = psutil.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    while first.poll() is None and not kills:
        time.sleep(0.1)
        all_of_it = [first, *first.children(recursive=True)]
        peak = max([peak, *map(peak_of, all_of_it)])
        kills = end < STEPS and is_complete(saved(out, end))
        for each in all_of_it * kills:  # torchrun at first, which would end the others in peace
            each.kill()
        psutil.wait_procs(all_of_it * kills)
    if kills != (end < STEPS) or (first.returncode and not kills):
        sys.exit(f"{' '.join(command)} ended:\n{log.read_text()[-3000:]}")
    return peak


def peak_of(process: psutil.Process) -> int:
    """Peak bytes of a process so far, 0 if it has ended."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) * 1024 if found else 0


def saved(out: Path, step: int) -> Path:
    """The checkpoint of a step, where the trainer puts it."""
    return out / "checkpoints" / f"step-{step:08d}"


def is_complete(checkpoint: Path) -> bool:
    """Whether the trainer, or torch.distributed.checkpoint, has written all of it."""
    return (checkpoint / "trainer.json").exists() or (checkpoint / ".metadata").exists()


def logged(out: Path, step: int) -> tuple[float, int]:
    """The loss of a step and the parameters after it."""
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    (*_, loss) = (row["loss"] for row in rows if row["kind"] == "train" and row["step"] == step)
    (*_, parameters) = (row["total"] for row in rows if row["kind"] == "size" and row["step"] <= step)
    return loss, parameters


def weights_apart(*outs: Path) -> tuple[str, str]:
    """Largest difference of a weight between two runs, and the norm of all over that of the weights."""
    one, two = (
        {name: tensor.double() for file in out.rglob("model*.safetensors") for name, tensor in load_file(file).items()}
        for out in outs
    )
    if {name: tensor.shape for name, tensor in one.items()} != {name: tensor.shape for name, tensor in two.items()}:
        return "other ranks", ""
    apart = torch.cat([(one[name] - two[name]).flatten() for name in one])
    norm = torch.cat([tensor.flatten() for tensor in one.values()]).norm()
    return f"{apart.abs().max():.2g}", f"{apart.norm() / norm:.2g}"


def train_sharded(words: list[str]) -> None:
    """A process of the sides with FSDP2, from the options of the command."""
    _, config, _ = parse("train", "lm", words)
    out, settings, data = config.folder, config.train, prepare(config.data, quiet=True)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model: Any = lm.build_model(config, data.vocab_size, data.separator)[0]  # by way of the meta device
    adapt_(model.train(), settings, keep_logits=False)
    kept = replicate_(model)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (world,)), ignored_params=kept)
    optimizer = torch.optim.AdamW(Rates.of(settings).groups(model), betas=settings.betas)
    ranks = comera.RankController(model, late=settings.late)

    begun = max((int(path.parent.name[5:]) for path in out.glob("checkpoints/step-*/.metadata")), default=0)
    if begun:
        fit_ranks_(model, saved(out, begun), optimizers=[optimizer])
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "ranks": ranks}
        dcp.load(state, checkpoint_id=saved(out, begun))  # type: ignore[attr-defined]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    ranks.attach(optimizer)
    for step in range(begun + 1, STEPS + 1):
        loss = torch.zeros(())
        for text in range(rank, TEXTS, world):
            own = lm.next_token_loss(model, data.train_batch((step - 1) * TEXTS + text, 1, settings.seed))
            (own * world / TEXTS).backward()  # a mean over this process's texts; the others' is averaged with it
            loss += own.detach() / TEXTS
        dist.all_reduce(loss)
        clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        ranks.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS:
            ranks.meet_target_()
        elif step % settings.prune_every == 0:
            ranks.prune_()
        if rank == 0:
            total = comera.model_size(model).total
            rows = {"kind": "train", "step": step, "loss": float(loss)}, {"kind": "size", "step": step, "total": total}
            out.mkdir(parents=True, exist_ok=True)
            with (out / "metrics.jsonl").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        if step % EVERY == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "ranks": ranks}
            dcp.save(state, checkpoint_id=saved(out, step))  # type: ignore[attr-defined]
    comera.save_pretrained(model, out / "model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
