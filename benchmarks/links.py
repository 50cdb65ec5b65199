"""Training over slow links: dense DistributedDataParallel beside compressed, each process behind a link of its own.

The six-encoder transformer of benchmarks/step.py, fused on both sides, 8 x 128 tokens a process, gloo. Each process has
a network namespace on this machine (benchmarks/network.py), with so many Mbit/s each way and a delay; and the same
without a limit. Two more sides are what one would use on such links instead: gradients sent as float16, and as factors
of rank 4 (PowerSGD), both with torch's hooks on the dense model. What these lose in quality is not looked at here.

Each case is a set of processes of its own, which share the cores: with more processes than cores, steps take longer.
A step is from a barrier to the end of the optimizer's; the slowest process counts. `sent_mb`: what left a process's
interface in a step, headers and all, in MB of a million bytes, mean over processes. `times_dense`: dense time over this
side's.

    python benchmarks/links.py [--processes 2 4] [--mbit 100] [--delay-ms 10] [--steps 20]      25 minutes, as root
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from common import about, update
from network import INTERFACE, Network, NetworkRefusedError
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from comera.fusion import fuse_
from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups
from comera.recipes.bert import ModelConfig
from comera.recipes.classify.task import example_loss
from comera.recipes.examples import ExampleBatch
from comera.recipes.mnli.recipe import CompressConfig, build_model, preset
from comera.trainer.step import TrainStep

SIDES = ("dense", "dense, float16 sent", "dense, PowerSGD", "compressed")
BATCH, LENGTH, VOCABULARY, PORT = 8, 128, 30_522, 29_500
TINY = ModelConfig(hidden=32, layers=2, heads=2, ffn=64, dropout=0.1)
GOALS = {(2, "100 Mbit/s, 10 ms", "compressed"): 20.0}
WARM_UPS = 1
SLOW_STEPS = 2  # of the sides that send the dense gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, default=100.0, help="of each link, each way; up to a few hundred")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="of each packet; a round trip takes two")
    parser.add_argument("--steps", type=int, default=20, help=f"measured; {SLOW_STEPS} where dense gradients are sent")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--dry", action="store_true", help="a tiny model; writes nothing")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(**options.child)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that the network is removed
    try:
        run_all(options)
    except NetworkRefusedError as error:
        sys.exit(f"links.py: {error}")


def run_all(options: argparse.Namespace) -> None:
    """Measure every case, and write each as it comes."""
    limited = f"{options.mbit:g} Mbit/s, {options.delay_ms:g} ms"
    for processes in options.processes:
        for link in (limited, "no limit"):
            dense_s = None
            for side in options.sides:
                network = Network(processes, *((options.mbit, options.delay_ms) if link == limited else ()))
                slow = link == limited and side in SIDES[:2] and not options.dry
                steps = min(options.steps, SLOW_STEPS) if slow else options.steps
                with network:
                    found = run_processes(network, {"side": side, "steps": steps, "dry": options.dry})
                step_s = statistics.median(map(max, zip(*(each["seconds"] for each in found), strict=True)))
                dense_s = step_s if side == "dense" else dense_s
                row = {
                    "processes": processes,
                    "link": link,
                    "side": side,
                    "batch_each": found[0]["batch"],
                    "steps": steps,
                    "step_s": f"{step_s:.4g}",
                    "sent_mb": f"{statistics.mean(each['sent'] for each in found) / steps / 1e6:.4g}",
                    "times_dense": f"{dense_s / step_s:.3g}" if dense_s else "",
                    "goal": GOALS.get((processes, link, side), ""),
                }
                print(" | ".join(map(str, row.values())), flush=True)
                if not options.dry:
                    about_each = about() | {"threads": str(found[0]["threads"])}
                    update("links", [row | about_each], key=("processes", "link", "side"))


def run_processes(network: Network, case: dict[str, Any]) -> list[dict[str, Any]]:
    """What `measure` printed in each process, one in each namespace."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": str(threads(network.count))}
    with ExitStack() as stack:
        children = []
        for rank in range(network.count):
            given = case | {"rank": rank, "world": network.count, "address": network.address(0)}
            command = network.command(rank, sys.executable, __file__, "--child", json.dumps(given))
            child = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            children.append(child)
            stack.callback(_end, child)
        while None in [child.poll() for child in children] and not any(child.returncode for child in children):
            time.sleep(0.1)
        if any(child.returncode for child in children):  # the others would wait for it
            raise RuntimeError(f"a process failed, see above: {[child.returncode for child in children]}")
        return [json.loads(child.stdout.read().splitlines()[-1]) for child in children if child.stdout]


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    if child.stdout:
        child.stdout.close()


def threads(processes: int) -> int:
    """Of each process."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def measure(side: str, steps: int, dry: bool, rank: int, world: int, address: str) -> NoReturn:
    """In a process of its own, which ends here: prints seconds of each step, and bytes sent in all of them."""
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=world)
    config = preset("comera" if side == "compressed" else "dense", "tuned")
    if dry:
        config = replace(config, model=TINY, compress=CompressConfig(order=4, rank=4, embedding_rank=4))
    model: Any = build_model(config, 100 if dry else VOCABULARY)[0]
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
    step = TrainStep(ddp, example_loss, optimizer, max_grad_norm=1.0)
    shape = (2, 16) if dry else (BATCH, LENGTH)
    ids = torch.randint(100 if dry else VOCABULARY, shape, generator=torch.Generator().manual_seed(rank))
    batch = ExampleBatch(ids, torch.zeros_like(ids), torch.ones(shape, dtype=torch.bool), ids[:, 0] % 3)
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
    found = {"seconds": seconds, "sent": sent, "batch": shape[0], "threads": torch.get_num_threads()}
    print(json.dumps(found), flush=True)
    dist.barrier()  # nobody leaves while another still waits for it
    os._exit(0)  # freeing the wrapper and the process group hangs at times: gloo's threads want the interpreter's lock


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
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()
