"""Evaluation on held-out data, divided among the processes."""

from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import Tensor, nn

from comera.errors import ConfigError
from comera.trainer.step import autocast
from comera.trainer.task import Task


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, accelerator: Accelerator, *, batches: int = 0, precision: str = "fp32"
) -> dict[str, float]:
    """Weighted means of `task.evaluate` over the held-out batches, and `task.evaluate_rows` of all their rows, by name.

    batches: how many to use; 0 for all. Each process takes its share, and all return the same values. Afterwards the
    model is in training mode, and the random state is as before.
    Raises ConfigError without held-out batches, and for a task whose `evaluate` returns no "loss".
    """
    device = accelerator.device
    sums: dict[str, Tensor] = {}
    kept: list[Tensor] = []
    weight = 0.0
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.eval()
        share = islice(task.eval_batches(), accelerator.process_index, batches or None, accelerator.num_processes)
        for batch in share:
            with autocast(device, precision):
                means, count, *rows = task.evaluate(model, send_to_device(batch, device))
            kept += rows
            weight += count
            for name, mean in means.items():
                sums[name] = sums.get(name, 0.0) + mean.to(device, torch.float32) * count
        model.train()
    values = torch.stack([*sums.values()]).tolist() if sums else []  # the only synchronization
    rows = [torch.cat(kept).cpu()] if kept else []
    # A process without a batch knows no names.
    parts = gather_object([(weight, dict(zip(sums, values, strict=True)), rows)])
    total = sum(weight for weight, *_ in parts)
    if not total:
        raise ConfigError(f"expected held-out batches from {task.name}, got none: provide more held-out data")
    names = {name: None for _, part, _ in parts for name in part}
    if "loss" not in names:
        raise ConfigError(f"expected means with 'loss' from {task.name}.evaluate, got {', '.join(names) or 'none'}")
    averages = {name: sum(part.get(name, 0.0) for _, part, _ in parts) / total for name in names}
    rows = [tensor for *_, part in parts for tensor in part]
    return {**averages, **(task.evaluate_rows(torch.cat(rows)) if rows else {})}
