"""A batch in chunks whose intermediate results stay in the caches, and padding of modes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Numbers of a wide intermediate that are held at a time. On a CPU pieces that stay in the caches are 15 to 30 % faster
# than the whole (no fresh pages) and bound the memory; an accelerator wants few launches.
CHUNK_CPU, CHUNK_ACCELERATOR = 2**20, 2**26


def chunks(batch: int, numbers: int, device: torch.device) -> list[slice]:
    """Slices of a batch whose intermediate, `numbers` a row, stays within CHUNK elements (one row at least).

    As few as can be, of equal sizes but the last, which may be smaller.
    """
    piece = CHUNK_CPU if device.type == "cpu" else CHUNK_ACCELERATOR
    count = -(-batch // max(1, piece // max(1, numbers)))
    step = -(-batch // max(1, count))
    return [slice(start, min(start + step, batch)) for start in range(0, batch, max(1, step))]


def pad_last(tensor: Tensor, size: int) -> Tensor:
    """The last dimension filled up with zeros to `size`; the tensor itself where it has that size."""
    return tensor if tensor.shape[-1] == size else F.pad(tensor, (0, size - tensor.shape[-1]))
