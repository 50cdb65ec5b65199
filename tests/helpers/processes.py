"""Work done by several processes that talk over gloo, as torchrun would start them."""

import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .forked import context


def in_processes(work: Callable[..., Any], *args: Any, world: int = 2) -> list[Any]:
    """What `work(rank, *args)` returned in each process; AssertionError with its traceback where it raised.

    work: a function at the top of its module. Each process runs on one thread, warnings are errors.
    """
    forked = context()
    with tempfile.TemporaryDirectory() as folder:
        ends = [forked.Pipe(duplex=False) for _ in range(world)]
        processes = [
            forked.Process(target=_process, args=(sender, rank, world, str(Path(folder, "store")), work, args))
            for rank, (_, sender) in enumerate(ends)
        ]
        for process in processes:
            process.start()
        for _, sender in ends:
            sender.close()
        found = [receiver.recv() for receiver, _ in ends]
        for process in processes:
            process.join()
    assert all(error is None for _, error in found), "\n".join(str(error) for _, error in found)
    return [value for value, _ in found]


def _process(sender: Connection, rank: int, world: int, store: str, work: Callable[..., Any], args: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        sender.send((work(rank, *args), None))
    except BaseException:
        sender.send((None, traceback.format_exc()))
        sys.stdout.flush()
        os._exit(1)  # the others may wait for this one for ever: closing the connection tells them
    dist.destroy_process_group()
