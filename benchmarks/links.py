"""Training over slow links: dense DistributedDataParallel beside compressed, each process behind a link of its own.

The six-encoder transformer of benchmarks/step.py, fused on both sides, 8 x 128 tokens a process, gloo. Each process has
a network namespace on this machine (benchmarks/network.py), with so many Mbit/s each way and a delay; and the same
without a limit. Two more sides are what one would use on such links instead: gradients sent as float16, and as factors
of rank 4 (PowerSGD), both with torch's hooks on the dense model. What these lose in quality is not looked at here.

Each case is a set of processes of its own, which share the cores: with more processes than cores, steps take longer.
They are forks of one that has imported torch and done nothing else, so that this is not waited for in every case.
A step is from a barrier to the end of the optimizer's; the slowest process counts. `sent_mb`: what left a process's
interface in a step, headers and all, in MB of a million bytes, mean over processes. `times_dense`: dense time over this
side's.

    python benchmarks/links.py [--processes 2 4] [--mbit 100] [--delay-ms 10] [--steps 20]      25 minutes, as root
    python benchmarks/links.py --processes 2 --steps 5 --sides "llama-1b, compressed"           3 minutes, 6 GB

The second is the preset llama-1b of `comera train lm`, one text of 512 tokens a process. Its dense model fits twice in
no memory here; its gradients are 19 times as many bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any

from network import INTERFACE, Network, NetworkRefusedError

SIDES = ("dense", "dense, float16 sent", "dense, PowerSGD", "compressed")
LARGE = "llama-1b, compressed"
GOALS = {(2, "100 Mbit/s, 10 ms", "compressed"): 20.0}
PROCESS = str(Path(__file__).with_name("links_process.py"))  # which alone needs torch: it takes seconds to import
SLOW_STEPS = 2  # of the sides that send the dense gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, default=100.0, help="of each link, each way; up to a few hundred")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="of each packet; a round trip takes two")
    parser.add_argument("--steps", type=int, default=20, help=f"measured; {SLOW_STEPS} where dense gradients are sent")
    parser.add_argument("--sides", nargs="+", choices=(*SIDES, LARGE), default=list(SIDES))
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
        with Processes(processes) as imported:
            dense_s: dict[str, float] = {}
            for link, side in product((limited, "no limit"), options.sides):
                network = Network(processes, *((options.mbit, options.delay_ms) if link == limited else ()))
                slow = link == limited and side in SIDES[:2] and not options.dry
                steps = min(options.steps, SLOW_STEPS) if slow else options.steps
                with network:
                    found = imported.run(network, {"side": side, "steps": steps, "dry": options.dry})
                step_s = statistics.median(map(max, zip(*(each["seconds"] for each in found), strict=True)))
                dense_s |= {link: step_s} if side == "dense" else {}
                row = {
                    "processes": processes,
                    "link": link,
                    "side": side,
                    "batch_each": found[0]["batch"],
                    "steps": steps,
                    "step_s": f"{step_s:.4g}",
                    "sent_mb": f"{statistics.mean(each['sent'] for each in found) / steps / 1e6:.4g}",
                    "times_dense": f"{dense_s[link] / step_s:.3g}" if link in dense_s and side != LARGE else "",
                    "goal": GOALS.get((processes, link, side), ""),
                }
                print(" | ".join(map(str, row.values())), flush=True)
                if not options.dry:
                    from common import about, update

                    about_each = about() | {"threads": str(found[0]["threads"])}
                    update("links", [row | about_each], key=("processes", "link", "side"))


class Processes:
    """Runs cases one after the other, each in `count` processes that share the cores, for a `with` statement."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child:
            os.killpg(self._child.pid, signal.SIGKILL)  # and its forks
            self._child.communicate()

    def run(self, network: Network, case: dict[str, Any]) -> list[dict[str, Any]]:
        """What `measure` found in each process, one in each namespace."""
        child = self._child = self._child or self._start()
        assert child.stdin
        assert child.stdout
        given = case | {"spaces": network.spaces, "address": network.address(0)}
        print(json.dumps(given), file=child.stdin, flush=True)
        found = child.stdout.readline()
        if not found:
            raise RuntimeError("a process failed, see above")
        return list(json.loads(found))

    def _start(self) -> subprocess.Popen[str]:
        """Once there is a network: where there can be none, nobody waits for torch."""
        environment = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": str(threads(self.count))}
        return subprocess.Popen(
            [sys.executable, PROCESS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip


def threads(processes: int) -> int:
    """Of each process."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


if __name__ == "__main__":
    main()
