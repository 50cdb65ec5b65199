"""Parameters that `fully_shard` has spread over processes: gathered to save them, spread again to load them.

`torch.distributed.tensor` is imported only for a model that has such parameters, whose program has imported it.
"""

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor


def _library() -> Any:
    return sys.modules.get("torch.distributed.tensor")


def is_sharded(tensor: Tensor) -> bool:
    """Whether each process holds a part of it."""
    return _library() is not None and isinstance(tensor, _library().DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The tensor with all of its parts; every process has to call it for a sharded one."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full


def shard_like(value: Tensor, own: Tensor) -> Tensor:
    """A whole tensor spread like `own`, if that is sharded; every process has to call it then."""
    if not is_sharded(own):
        return value
    there: Any = own
    spread: Tensor = _library().distribute_tensor(value.to(own.device), there.device_mesh, there.placements)
    return spread


def is_writer(tensors: Iterable[Tensor]) -> bool:
    """Whether this process writes what all of them have gathered: the first one, or any if nothing is sharded."""
    meshes = [tensor.device_mesh for tensor in tensors if is_sharded(tensor)]  # type: ignore[attr-defined]
    return all(not any(mesh.get_coordinate() or ()) for mesh in meshes)
