"""The processes of benchmarks/links.py, each in a network namespace of its own: they train, and say what a step took
and sent. Reads cases from its input, a line each, and prints what they gave, likewise."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from network import INTERFACE
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from comera.fusion import fuse_
from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups
from comera.recipes.classify.model import EncoderConfig
from comera.recipes.classify.recipe import preset, untrained
from comera.recipes.classify.task import example_loss
from comera.recipes.data.prepared import ExampleBatch
from comera.recipes.lm import recipe as lm
from comera.recipes.lm.data import Batch
from comera.trainer.step import TrainStep

BATCH, LENGTH, VOCABULARY, PORT = 8, 128, 30_522, 29_500
LARGE = "llama-1b, compressed"
TINY = EncoderConfig(hidden=32, layers=2, heads=2, ffn=64, dropout=0.1)
WARM_UPS = 1
CLONE_NEWNET = 0x40000000


def main() -> None:
    """This process only forks, for each case anew: no side finds a model, a thread or a number drawn by another."""
    gc.collect()
    gc.freeze()  # a fork that looked through all of this for garbage would copy it
    for line in sys.stdin:
        case = json.loads(line)
        spaces, ends = case.pop("spaces"), []
        for rank, space in enumerate(spaces):
            end, written = os.pipe()
            ends.append(end)
            if not os.fork():
                try:
                    enter(space)
                    measure(**case, rank=rank, world=len(spaces), out=written)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            os.close(written)
        for _ in spaces:
            if os.wait()[1]:  # the others would wait for it
                os._exit(1)
        found = []
        for end in ends:
            with open(end) as file:
                found.append(json.load(file))
        print(json.dumps(found), flush=True)


def enter(space: str) -> None:
    """Move this process into a network namespace, as `ip netns exec` does; os.setns is younger than Python 3.11."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(Path("/run/netns") / space) as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns into the network namespace {space}")


def measure(side: str, steps: int, dry: bool, address: str, rank: int, world: int, out: int) -> NoReturn:
    """In a process of its own, which ends here: writes to `out` seconds of each step, and bytes sent in all of them."""
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=world)
    model, loss, batch = llama(dry, rank) if side == LARGE else encoder(side, dry, rank)
    fuse_(model)
    # every process has drawn the same parameters: to send them would take longer than the steps
    # PowerSGD sends in callbacks, and those of several buckets come in another order in each process: gloo aborts
    buckets = 1024 if side == "dense, PowerSGD" else None
    ddp = DistributedDataParallel(model.train(), init_sync=False, bucket_cap_mb=buckets)
    if side == "dense, float16 sent":
        ddp.register_comm_hook(None, fp16_compress_hook)
    elif side == "dense, PowerSGD":
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook)
    optimizer = AdamW(param_groups(model, lr=1e-4), fused=True)
    step = TrainStep(ddp, loss, optimizer, max_grad_norm=1.0)
    for _ in range(3 if side == "dense, PowerSGD" else WARM_UPS):  # PowerSGD's first two send dense gradients
        step([batch])
    dist.barrier()
    seconds, before = [], bytes_sent()
    for _ in range(steps):
        dist.barrier()
        started = time.perf_counter()
        step([batch])
        seconds.append(time.perf_counter() - started)
    dist.barrier()
    sent = bytes_sent() - before
    agree([parameter.detach() for parameter in model.parameters()])
    found = {"seconds": seconds, "sent": sent, "batch": len(batch[0]), "threads": torch.get_num_threads()}
    os.write(out, json.dumps(found).encode())
    dist.barrier()  # nobody leaves while another still waits for it
    os._exit(0)  # freeing the wrapper and the process group hangs at times: gloo's threads want the interpreter's lock


def encoder(side: str, dry: bool, rank: int) -> tuple[Any, Any, ExampleBatch]:
    """The six encoders, their loss, and a batch of this process."""
    config = preset("comera" if side == "compressed" else "dense", "mnli")
    if dry:
        config = replace(config, model=TINY, compress=replace(config.compress, order=4, rank=4, embedding_rank=4))
    ids = drawn((2, 16) if dry else (BATCH, LENGTH), 100 if dry else VOCABULARY, rank)
    batch = ExampleBatch(ids, torch.zeros_like(ids), torch.ones(ids.shape, dtype=torch.bool), ids[:, 0] % 3)
    return untrained(config, 100 if dry else VOCABULARY)[0], example_loss, batch


def llama(dry: bool, rank: int) -> tuple[Any, Any, Batch]:
    """The same of the preset llama-1b, a text of 512 tokens a process."""
    config = lm.preset("comera", "small" if dry else "llama-1b")
    ids = drawn((1, 16 if dry else config.data.block_size), 100 if dry else VOCABULARY, rank)
    model = lm.build_model(config, 100 if dry else VOCABULARY)[0]
    return model, lm.next_token_loss, Batch(ids, ids.roll(-1, 1), ids.sum(1))


def drawn(shape: tuple[int, int], vocabulary: int, rank: int) -> torch.Tensor:
    """Ids, others in each process."""
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(rank))


def agree(parameters: Sequence[torch.Tensor]) -> None:
    """Raise if a process has other parameters than the others: its steps would not be data-parallel training."""
    norm = torch.stack([parameter.double().square().sum() for parameter in parameters])
    largest, least = norm.clone(), norm.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    if not torch.equal(largest, least):
        raise RuntimeError("processes have different parameters after the steps: DDP did not average the gradients")


def bytes_sent() -> int:
    """What has left this namespace's interface."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()  # /sys shows the namespace that it was mounted in
    (counts,) = (line.split(":")[1].split() for line in lines if line.split(":")[0].strip() == INTERFACE)
    return int(counts[8])  # after eight of what was received


if __name__ == "__main__":
    main()
