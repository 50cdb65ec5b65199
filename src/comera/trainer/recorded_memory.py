"""Memory of what a recording makes (cpu_graph.py).

Every tensor that is made while a step is recorded takes the first free memory that holds it, and leaves it to the next
ones when it is freed: in the order of the recording, which is that of every replay. So all of a step's tensors, small
ones too, lie close together in few blocks, in huge pages where the system has them. For one text, against memory of its
own for each small tensor: 35 MB and 3 % of the time less.
"""

from bisect import bisect
from collections.abc import Callable
from ctypes import c_float
from math import prod
from weakref import ref

import torch
from torch import Tensor

LINE = 64  # bytes of a cache line, at which every tensor begins
LEAST, MOST = 4 * 2**20, 128 * 2**20  # bytes of a block, which is as large as all before it, unless a tensor needs more


class Pool:
    """Memory for tensors, which keeps them apart as long as they are alive.

    block: makes memory of as many bytes at least.
    """

    def __init__(self, block: Callable[[int], torch.UntypedStorage]) -> None:
        self._block = block
        self._blocks: list[torch.UntypedStorage] = []
        self._free: list[tuple[int, int]] = []  # where free memory begins and ends, in order
        self._lent: dict[int, tuple[ref[torch.UntypedStorage], int]] = {}  # tensors that are alive, and their addresses

    def empty(self, *shape: int) -> Tensor:
        """An uninitialized float32 tensor."""
        elements = prod(shape)
        size = -(-4 * elements // LINE) * LINE
        place = next((k for k, (at, end) in enumerate(self._free) if end - at >= size), None)
        if place is None:
            most = max(size, LEAST, min(MOST, sum(block.nbytes() for block in self._blocks)))
            self._blocks.append(self._block(most + LINE))
            at = -(-self._blocks[-1].data_ptr() // LINE) * LINE
            self._give_back(at, at + most)
            return self.empty(*shape)
        at, end = self._free.pop(place)
        if at + size < end:
            self._free.insert(place, (at + size, end))
        made = vector(at, elements)
        storage = made.untyped_storage()
        key = storage._cdata

        def freed(_: object) -> None:
            del self._lent[key]
            self._give_back(at, at + size)

        self._lent[key] = ref(storage, freed), at
        return made.view(shape)

    def _give_back(self, at: int, end: int) -> None:
        """Join free memory with what is free before and after it."""
        place = bisect(self._free, (at, end))
        if place < len(self._free) and self._free[place][0] == end:
            _, end = self._free.pop(place)
        if place and self._free[place - 1][1] == at:
            place -= 1
            at, _ = self._free.pop(place)
        self._free.insert(place, (at, end))

    def address(self, tensor: Tensor) -> int | None:
        """Where the memory of a tensor begins, if it is of this pool."""
        lent = self._lent.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        return None if lent is None else lent[1]


def vector(at: int, elements: int) -> Tensor:
    """Memory as float32 numbers, which the tensor does not hold."""
    return torch.frombuffer((c_float * elements).from_address(at), dtype=torch.float32)
