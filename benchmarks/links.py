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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from network import INTERFACE, Network, NetworkRefusedError

SIDES = ("dense", "dense, float16 sent", "dense, PowerSGD", "compressed")
GOALS = {(2, "100 Mbit/s, 10 ms", "compressed"): 20.0}
PROCESS = str(Path(__file__).with_name("links_process.py"))  # which alone needs torch: it takes seconds to import
SLOW_STEPS = 2  # of the sides that send the dense gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, default=100.0, help="of each link, each way; up to a few hundred")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="of each packet; a round trip takes two")
    parser.add_argument("--steps", type=int, default=20, help=f"measured; {SLOW_STEPS} where dense gradients are sent")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--dry", action="store_true", help="a tiny model; writes nothing")
    options = parser.parse_args()
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
                    from common import about, update

                    about_each = about() | {"threads": str(found[0]["threads"])}
                    update("links", [row | about_each], key=("processes", "link", "side"))


def run_processes(network: Network, case: dict[str, Any]) -> list[dict[str, Any]]:
    """What links_process.py printed in each process, one in each namespace."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": str(threads(network.count))}
    with ExitStack() as stack:
        children = []
        for rank in range(network.count):
            given = case | {"rank": rank, "world": network.count, "address": network.address(0)}
            command = network.command(rank, sys.executable, PROCESS, json.dumps(given))
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


if __name__ == "__main__":
    main()
