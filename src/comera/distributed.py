"""Several processes: what they decide together, and DistributedDataParallel wrappers when ranks fall.

DistributedDataParallel lays out its buckets, and hooks onto the gradient of every parameter, when it wraps a model. A
cut changes shapes and renews these gradients' nodes, so the wrapper has to do both again: `rewrap_`.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from comera.errors import RankError


def several() -> bool:
    """Whether this process is one of several that train together.

    Example:
        >>> import comera
        >>> comera.distributed.several()  # True in each process that torchrun has started, once they are connected
        False
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_(tensor: Tensor) -> None:
    """Replace a tensor by its sum over all processes; each must call it. Does nothing in a single process.

    Example:
        >>> import torch, comera
        >>> correct = torch.tensor([3.0])
        >>> comera.distributed.sum_(correct)  # a process alone
        >>> correct
        tensor([3.])
    """
    if several():
        dist.all_reduce(tensor)


def rewrap_(model: nn.Module) -> int:
    """Let the DistributedDataParallel wrappers in a model see its parameters anew, in place, after ranks have fallen.

    A `RankController` that was given the wrapped model does this by itself. Call it in every process.

    Args:
        model: a DistributedDataParallel wrapper, or a module that holds some. Their settings and communication hooks
            stay.

    Returns:
        How many wrappers there were.

    Raises:
        RankError: a wrapper with mixed precision of its own, which has to be made anew. It is unchanged.

    Example:
        >>> import torch, comera
        >>> comera.distributed.rewrap_(torch.nn.Linear(2, 2))  # not wrapped
        0

    Source: docs/method.md §3.
    """
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    for wrapper in wrappers:
        if wrapper.mixed_precision is not None:
            raise RankError(
                "expected a DistributedDataParallel without mixed_precision, which casts parameters by their shapes: "
                "make the wrapper anew, DistributedDataParallel(ddp.module, ...), or use torch.autocast"
            )
    for wrapper in wrappers:
        wrapper._remove_autograd_hooks()
        parameters, sparse = wrapper._build_params_for_reducer()
        names = wrapper._build_debug_param_to_name_mapping(parameters)
        wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
        if wrapper.static_graph and wrapper.logger is not None:
            wrapper._static_graph_delay_allreduce_enqueued = False  # its first backward records the graph anew
            wrapper.reducer._set_static_graph()
            wrapper.logger._set_static_graph()
        for hook, state in wrapper._comm_hooks:
            dist._register_comm_hook(wrapper.reducer, state, hook)  # type: ignore[attr-defined]
    return len(wrappers)


def check_whole(cores: Iterable[Tensor]) -> None:
    """Raise RankError unless every process holds all of each core.

    Example:
        >>> import torch, comera
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> _ = comera.tensorize_(model, ratio=2)
        >>> comera.distributed.check_whole(model[0].tt.cores)  # nothing is sharded
    """
    for core in cores:
        by = "fully_shard" if hasattr(core, "to_local") else ""
        if not by and (core.ndim < 2 or core.untyped_storage().nbytes() < core.numel() * core.element_size()):
            by = "FullyShardedDataParallel, or a wrapper like it,"  # which flattens parameters and frees their memory
        if by:
            raise RankError(
                f"expected tensor trains that are whole on every process, got some that {by} has spread: call "
                "comera.integrations.fsdp.replicate_ first, then fully_shard with what it returns as ignored_params"
            )


def follow_state_(model: nn.Module) -> None:
    """After a state with other ranks may have been loaded: wrap anew if that is so.

    Example:
        >>> import torch, comera
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> _ = comera.tensorize_(model, ratio=2)
        >>> state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        >>> _ = comera.round_(model, 0.5)
        >>> _ = model.load_state_dict(state)  # with the ranks of before
        >>> comera.distributed.follow_state_(model)
    """
    if dist.is_available() and dist.is_initialized():
        wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        if any(_bytes_wrapped(wrapper) != _bytes_held(wrapper) for wrapper in wrappers):
            rewrap_(model)


def _bytes_wrapped(wrapper: DistributedDataParallel) -> int:
    """Size of the parameters that a wrapper laid its buckets out for."""
    return int(wrapper._get_ddp_logging_data()["total_parameter_size_bytes"])


def _bytes_held(wrapper: DistributedDataParallel) -> int:
    """Size of these parameters now."""
    parameters, _sparse = wrapper._build_params_for_reducer()
    return sum(p.numel() * p.element_size() for p in parameters)


def shapes_changed(model: nn.Module) -> None:
    """After a cut: wrap anew, or, where the wrapper is not part of `model`, make a forward inside an old one raise.

    Example:
        >>> import torch, comera
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> _ = comera.tensorize_(model, ratio=2)
        >>> tt = model[0].tt
        >>> tt.resize_(tt.spec.with_ranks(1))  # a cut of your own; `prune_` and `round_` call it themselves
        >>> comera.distributed.shapes_changed(model)
    """
    if dist.is_available() and dist.is_initialized() and not rewrap_(model):
        _Guard.of(model)


class _Guard:
    """A forward pre-hook that raises in a wrapper from before a cut, instead of torch at the step after the next."""

    handle: RemovableHandle

    @classmethod
    def of(cls, model: nn.Module) -> None:
        """Guard a model, once."""
        if not any(isinstance(hook, cls) for hook in model._forward_pre_hooks.values()):
            guard = cls()
            guard.handle = model.register_forward_pre_hook(guard)

    def __call__(self, *_: object) -> None:
        wrapper = None if torch.compiler.is_compiling() else DistributedDataParallel._active_ddp_module
        if wrapper is None:
            return
        if _bytes_wrapped(wrapper) != _bytes_held(wrapper):
            size = _bytes_wrapped(wrapper)
            raise RankError(
                f"expected a DistributedDataParallel of the parameters' present shapes, got one of {size:,} bytes "
                "from before ranks fell: call comera.distributed.rewrap_(ddp) after a cut, in every process, or give "
                "the wrapped model to RankController(ddp) and prune_(ddp), which then do it"
            )
        self.handle.remove()
