"""Processes that train as `accelerate launch --cpu` starts them."""

import os
import socket
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from .forked import context


def start(work: Callable[..., None], *args: Any) -> BaseProcess:
    """A process of its own for a function at the top of its module."""
    process = context().Process(target=work, args=args)
    process.start()
    return process


def launch(work: Callable[..., None], *args: Any, world: int = 2) -> None:
    """Run `work(rank, world, *args)` in each process; all must end well, and warnings are errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(_process, rank, world, port, work, args) for rank in range(world)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * world


def _process(rank: int, world: int, port: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("error")
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in launched.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    work(rank, world, *args)
    torch.distributed.destroy_process_group()
