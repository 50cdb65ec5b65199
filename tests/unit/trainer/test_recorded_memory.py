"""Memory of what a recording makes."""

import random

import pytest
import torch
from torch import Tensor

from comera.trainer.recorded_memory import LEAST, LINE, Pool


def test_memory_is_used_again_and_joined() -> None:
    pool = Pool(torch.UntypedStorage)
    one, two, three = (pool.empty(10, 10) for _ in range(3))
    addresses = [tensor.data_ptr() for tensor in (one, two, three)]
    assert all(address % LINE == 0 for address in addresses)
    view = one.view(100)
    del one
    assert pool.address(view) == addresses[0]
    assert pool.address(torch.zeros(100)) is None
    assert pool.empty(100).data_ptr() not in addresses  # the view is alive
    del view, two
    assert pool.empty(200).data_ptr() == addresses[0]  # of both
    assert pool.empty(90).data_ptr() == addresses[0]
    del three
    assert len(pool._free) == len(pool._blocks) == 1


def test_no_two_tensors_share_memory() -> None:
    """Many sizes, some larger than a block, freed in any order: each keeps its values."""
    pool, choose = Pool(torch.UntypedStorage), random.Random(0)
    alive: list[Tensor] = []
    for k in range(600):
        if alive and choose.random() < 0.48:
            tensor = alive.pop(choose.randrange(len(alive)))
            assert bool((tensor == tensor[0]).all())
            del tensor
        else:
            elements = choose.choice([1, 3, 16, 100, 5000, LEAST // 4 + 1 if k % 50 == 0 else 2])
            alive.append(pool.empty(elements).fill_(k))
    values = [float(tensor[0]) for tensor in alive]
    assert len(set(values)) == len(values)
    assert all(bool((tensor == value).all()) for tensor, value in zip(alive, values, strict=True))
    held = sum(block.nbytes() for block in pool._blocks)
    alive.clear()
    assert held - sum(end - at for at, end in pool._free) <= LINE * len(pool._blocks)


def test_a_failed_request_leaves_nothing_behind() -> None:
    def none(size: int) -> torch.UntypedStorage:
        raise RuntimeError("no memory")

    pool = Pool(none)
    with pytest.raises(RuntimeError, match="no memory"):
        pool.empty(1)
    assert not pool._blocks
    assert not pool._free
