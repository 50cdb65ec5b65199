"""The processes of a run, as torchrun or `accelerate launch` started them. On CPUs they communicate over gloo."""

import os
from typing import Literal

import torch
from accelerate import Accelerator

from comera.errors import ConfigError

_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")  # as launchers and MPI name it


def open_accelerator(device: Literal["auto", "cpu"] = "auto") -> Accelerator:
    """This process, joined with all others that were started with it.

    device: as in TrainConfig; several processes on a machine without a GPU train on its CPU.
    Raises ConfigError where fewer processes would train together than were started: each would train alone.
    """
    started, ranked = started_processes(), any(name in os.environ for name in _RANKS)
    if started > 1 and not ranked:
        raise _alone(f"WORLD_SIZE={started} without a RANK")
    if not ranked and "MASTER_ADDR" in os.environ and os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
        raise _alone("one process, all that `accelerate launch --cpu` starts")
    on_cpu = device == "cpu" or (started > 1 and not torch.accelerator.is_available())
    accelerator = Accelerator(cpu=on_cpu)
    started = started_processes()  # MPI's count too, which accelerate has put there
    if accelerator.num_processes != started:
        raise _alone(f"WORLD_SIZE={started}, but {accelerator.num_processes} that are connected")
    return accelerator


def started_processes() -> int:
    """How many processes the launcher has started together."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _alone(came: str) -> ConfigError:
    return ConfigError(
        f"expected all processes that were started to train together, got {came}: start them with "
        "`torchrun --nproc_per_node N -m comera train RECIPE`, with --train.device cpu where there are fewer than N "
        "GPUs, or unset WORLD_SIZE, RANK and MASTER_ADDR to train in one process"
    )
