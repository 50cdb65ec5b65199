"""What lives after a forward, and what runs: the memory of a graph counted, not timed."""

from typing import Any

from torch import Tensor, equal, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not equal(one[name], other[name])] == []


class Live(TorchDispatchMode):
    """Every storage that operations made, but for those of the model, and which operations ran."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.own = {StorageWeakRef(tensor.untyped_storage()) for tensor in [*model.parameters(), *model.buffers()]}
        self.storages: dict[StorageWeakRef, int] = {}
        self.ran: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.ran.append((func.__name__, tuple(tensor.shape)))
                storage = StorageWeakRef(tensor.untyped_storage())
                if storage not in self.own and not tensor.is_meta:
                    self.storages[storage] = tensor.untyped_storage().nbytes()
        return out

    @property
    def nbytes(self) -> int:
        return sum(nbytes for storage, nbytes in self.storages.items() if not storage.expired())
