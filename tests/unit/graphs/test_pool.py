"""Memory of what a recording makes."""

import random
from weakref import ref

import pytest
import torch
from torch import Tensor

from comera.graphs.pool import LEAST, LINE, Pool, memory_at


def test_memory_is_used_again_and_joined() -> None:
    pool = Pool(torch.UntypedStorage)
    one, two, three = (pool.empty(10, 10) for _ in range(3))
    addresses = [tensor.data_ptr() for tensor in (one, two, three)]
    assert all(address % LINE == 0 for address in addresses)
    view = one.view(100)
    del one
    assert view in pool
    assert torch.zeros(100) not in pool
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
    assert held - sum(end - at for _, at, end in pool._free) <= LINE * len(pool._blocks)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_where_blocks_lie_changes_nothing(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest block that holds a tensor is taken, whatever the addresses; blocks side by side are not joined."""
    monkeypatch.setattr("comera.graphs.pool.MOST", LEAST)
    size = LEAST  # without the line more that is asked for: these begin at one
    whole = torch.UntypedStorage(3 * size + LINE)
    start = -(-whole.data_ptr() // LINE) * LINE
    places = iter(order)

    def block(asked: int) -> torch.UntypedStorage:
        assert asked == size + LINE
        return memory_at(start + next(places) * size, size).untyped_storage()

    pool = Pool(block)
    tensors = [pool.empty(LEAST // 4) for _ in order]
    assert [(t.data_ptr() - start) // size for t in tensors] == list(order)
    tensors.clear()
    assert len(pool._free) == len(order)
    assert (pool.empty(1).data_ptr() - start) // size == order[0]


def test_the_memory_of_an_alias_goes_to_the_next_tensor() -> None:
    pool = Pool(torch.UntypedStorage)
    tensor = pool.empty(4, 6).fill_(1.0)
    alias = pool.alias(tensor[1:].T, hold=True)
    assert (alias.shape, alias.stride()) == ((6, 3), (1, 6))
    assert alias not in pool
    del tensor
    pool.empty(24).fill_(2.0)
    assert bool((alias == 2.0).all())


def test_a_block_lives_as_long_as_a_tensor_of_it() -> None:
    blocks = []

    def block(size: int) -> torch.UntypedStorage:
        made = torch.UntypedStorage(size)
        blocks.append(ref(made))
        return made

    pool = Pool(block)
    tensor = pool.empty(5)
    alias = pool.alias(tensor, hold=True)
    del pool, tensor
    assert blocks[0]() is not None
    del alias
    assert blocks[0]() is None


def test_a_failed_request_leaves_nothing_behind() -> None:
    def none(size: int) -> torch.UntypedStorage:
        raise RuntimeError("no memory")

    pool = Pool(none)
    with pytest.raises(RuntimeError, match="no memory"):
        pool.empty(1)
    assert not pool._blocks
    assert not pool._free
