"""What another program on one of the cores does to a training step, dense and compressed.

Threads of a parallel region meet at its end. GNU OpenMP lets the one that is first spin for GOMP_SPINCOUNT rounds, by
default 300,000, several milliseconds, before it sleeps: nothing is lost while every thread has a core of its own. Where
another program has one of the cores, the spinning thread keeps the scheduler from the work it waits for, at every
region of the step. Each row is a process with its own setting: six encoders of the MNLI recipe, fused on both sides,
8 x 128 tokens; steps of the sides in turns, without the neighbour and with it (a loop that does nothing).

    python benchmarks/busy.py [--repeats 10] [--spins default 100000 10000 1000]        5 minutes, on a quiet machine
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from common import about, in_turns, update
from step import make_step

from comera.recipes.data.prepared import ExampleBatch

SPINS = ("default", "100000", "30000", "10000", "1000")
SIDES = {"dense": "dense", "compressed": "fused"}
BATCH, LENGTH = 8, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--spins", nargs="+", default=list(SPINS), metavar="COUNT")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.repeats)))
        return
    rows = []
    for spin in options.spins:
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        environment |= {} if spin == "default" else {"GOMP_SPINCOUNT": spin}
        command = [sys.executable, __file__, "--child", "--repeats", str(options.repeats)]
        child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        figures = json.loads(child.stdout.splitlines()[-1])
        quiet = figures["quiet"]["dense"] / figures["quiet"]["compressed"]
        for load, milliseconds in figures.items():
            ratio = milliseconds["dense"] / milliseconds["compressed"]
            shown = {f"{side}_ms": f"{value:.4g}" for side, value in milliseconds.items()}
            row = {"spin_count": spin, "load": load, **shown, "ratio": f"{ratio:.3g}", "kept": f"{ratio / quiet:.2f}"}
            rows.append({**row, **about()})
            print(row, flush=True)
    update("busy", rows, ("spin_count", "load"))


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each side's step, without and with a neighbour."""
    ids = torch.randint(1000, 30_000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = ExampleBatch(ids, torch.zeros_like(ids), torch.ones(BATCH, LENGTH, dtype=torch.bool), ids[:, 0] % 3)
    steps = {name: make_step(side, batch, 0.1, "fp32") for name, side in SIDES.items()}
    found = {"quiet": in_turns(steps, repeats)}
    with neighbour():
        found["one core busy"] = in_turns(steps, repeats)
    return {
        load: {name: 1e3 * statistics.median(own) for name, own in seconds.items()} for load, seconds in found.items()
    }


@contextmanager
def neighbour() -> Iterator[None]:
    """Another program that wants a core, in a session of its own, as programs of other users are."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    try:
        yield
    finally:
        program.kill()
        program.wait()


if __name__ == "__main__":
    main()
