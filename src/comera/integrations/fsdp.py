"""FSDP2: compressed layers stay whole on every process, `fully_shard` shards the dense rest.

A tensor train is small, one batched merge reads those of many blocks at once, and a cut changes its shapes, which the
bookkeeping of a sharded parameter does not survive. So the parameters of compressed layers are kept out of
`fully_shard` (`ignored_params`), which then neither shards them nor reduces their gradients; `replicate_` does that::

    kept = replicate_(model)
    for block in model.blocks:
        fully_shard(block, ignored_params=kept)
    fully_shard(model, ignored_params=kept)

Ranks are decided from gradients that are equal on all processes, so every process cuts alike. A MixedPrecisionPolicy
casts what is sharded; torch.autocast around the forward casts the rest alike.
"""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from comera.errors import CheckpointError, ConversionError
from comera.nn.tensor_train import CompressedLayer, TensorTrain, named_trains
from comera.pretrained.folder import with_stored_layout
from comera.rank.optimizer_state import reset_state_
from comera.tt.spec import Spec

__all__ = ["clip_grad_norm_", "fit_ranks_", "replicate_"]


def replicate_(model: nn.Module, group: dist.ProcessGroup | None = None) -> set[nn.Parameter]:
    """Keep the compressed layers of a model whole on every process; their gradients become means over the processes.

    Call it after `tensorize_` and before `fully_shard`. Their values are broadcast from the first process. At the end
    of each backward, gradients are averaged in one collective; those of earlier micro-batches are equal already.

    Args:
        model: has compressed layers.
        group: the processes of the data-parallel mesh; all by default.

    Returns:
        The parameters of compressed layers (cores, gates, biases), for `ignored_params` of every `fully_shard`.

    Raises:
        ConversionError: a model without compressed layers, or one whose compressed layers are sharded already or on the
            meta device; later, a forward with a MixedPrecisionPolicy of another dtype and without torch.autocast.

    Example:
        >>> import torch, comera
        >>> from torch.distributed.fsdp import fully_shard
        >>> from comera.integrations.fsdp import replicate_
        >>> def shard(model):  # in every process, after torch.distributed.init_process_group
        ...     kept = replicate_(model)
        ...     for block in model:
        ...         fully_shard(block, ignored_params=kept)
        ...     return fully_shard(model, ignored_params=kept)
    """
    layers = [module for module in model.modules() if isinstance(module, CompressedLayer)]
    kept = dict.fromkeys(parameter for layer in layers for parameter in layer.parameters())
    if not kept:
        raise ConversionError(
            f"expected a model with compressed layers, got {type(model).__name__}: tensorize_ it first"
        )
    if any(isinstance(parameter, DTensor) for parameter in kept):
        raise ConversionError(
            "the compressed layers are sharded already: call replicate_ first, then fully_shard with what it returns "
            "as ignored_params"
        )
    if any(parameter.is_meta for parameter in kept):
        raise ConversionError(
            "the compressed layers are on the meta device: call replicate_ once the model has been loaded or "
            "initialized"
        )
    for parameter in kept:
        dist.broadcast(parameter.detach(), group=group, group_src=0)
    average = _Average([parameter for parameter in kept if parameter.requires_grad], group)
    for parameter in average.parameters:
        parameter.register_post_accumulate_grad_hook(average.after)
    model.register_forward_pre_hook(_Precision(next(iter(kept))))
    return set(kept)


class _Precision:
    """A forward pre-hook that raises where a MixedPrecisionPolicy casts the dense layers and nothing the others."""

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    def __call__(self, model: nn.Module, _: object) -> None:
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(self.kept.device.type):
            return
        for part in model.modules():
            cast = part._get_fsdp_state()._mp_policy.param_dtype if isinstance(part, FSDPModule) else None
            if cast not in (None, self.kept.dtype):
                raise ConversionError(
                    f"MixedPrecisionPolicy(param_dtype={cast}) casts what is sharded, but compressed layers stay whole "
                    f"in {self.kept.dtype}: run each forward under torch.autocast('{self.kept.device.type}', {cast}), "
                    "which casts them too, or leave out param_dtype"
                )


class _Average:
    """Averages gradients over processes once, at the end of each backward that made one of them."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.parameters, self.group = parameters, group
        self._backward = -1  # the last one that will call `_run`

    def after(self, _: Tensor) -> None:
        """A gradient is complete."""
        running = torch._C._current_graph_task_id()
        if running != self._backward:
            self._backward = running
            Variable._execution_engine.queue_callback(self._run)

    @torch.no_grad()
    def _run(self) -> None:
        kinds: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            kinds.setdefault(parameter.dtype, []).append(parameter)
        for parameters in kinds.values():
            self._average(parameters)

    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of parameters of one dtype; those that no process has stay None."""
        grads = [p.grad for p in parameters]
        there = parameters[0].new_tensor([float(grad is not None) for grad in grads])
        flat = torch.cat(
            [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in parameters] + [there]
        )
        dist.all_reduce(flat, group=self.group)
        *means, there = flat.div_(dist.get_world_size(self.group)).split([*(p.numel() for p in parameters), len(there)])
        lacking = [k for k, grad in enumerate(grads) if grad is None]
        made = {k for k in lacking if there[k] > 0}  # synchronizes, only in a process that lacks a gradient
        for k, (parameter, grad, mean) in enumerate(zip(parameters, grads, means, strict=True)):
            if grad is not None:
                grad.copy_(mean.view_as(parameter))
            elif k in made:
                parameter.grad = mean.view_as(parameter).clone()


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for whole and sharded parameters together, which torch's does not mix.

    Args:
        parameters: of a model after `replicate_` and `fully_shard`.
        max_norm: of all gradients together.

    Returns:
        The norm before clipping, a scalar that is equal on all processes.

    Example:
        >>> import torch
        >>> from comera.integrations.fsdp import clip_grad_norm_
        >>> layer = torch.nn.Linear(3, 1, bias=False)
        >>> layer(torch.tensor([[3.0, 4.0, 0.0]])).sum().backward()
        >>> clip_grad_norm_(layer.parameters(), max_norm=1.0)
        tensor(5.)
        >>> layer.weight.grad
        tensor([[0.6000, 0.8000, 0.0000]])
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    parts = [[p for p in held if isinstance(p, DTensor) is sharded] for sharded in (False, True)]
    norms = [nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in parts if part]
    if not norms:
        return torch.tensor(0.0)
    wholes = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(wholes))
    for part in parts:
        nn.utils.clip_grads_with_norm_(part, max_norm, total)
    return total


def fit_ranks_(
    model: nn.Module,
    folder: str | Path,
    *,
    prefix: str = "model.",
    optimizers: Sequence[Optimizer] = (),
    optimizer_prefix: str = "optimizer.",
) -> None:
    """Give a model the ranks of a distributed checkpoint, so that `torch.distributed.checkpoint.load` can fill it.

    That load writes into tensors that are there, and refuses those of other shapes. Call this first, before optimizers
    have state; attach a `RankController` afterwards.

    Args:
        model: of the same architecture and modes as the one that was saved.
        folder: what was given to `torch.distributed.checkpoint.save` as `checkpoint_id`.
        prefix: of the model's tensors in it: the key under which its state was saved, and a dot.
        optimizers: those whose state will be loaded. They get state where the checkpoint has it and nowhere else: a
            late stage that begins leaves tensor trains without, and torch's load refuses what it does not find.
        optimizer_prefix: of their state in the checkpoint, as `prefix`.

    Raises:
        CheckpointError: a tensor train of the model is not in the checkpoint, or has other modes or damaged ranks
            there, or nothing of an optimizer is; no rank was changed.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        >>> from comera.integrations.fsdp import fit_ranks_
        >>> def resume(model, optimizer, controller, folder):
        ...     fit_ranks_(model, folder, optimizers=[optimizer])
        ...     weights, moments = get_state_dict(model, optimizer)
        ...     dcp.load({"model": weights, "optimizer": moments, "ranks": controller}, checkpoint_id=folder)
        ...     set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        ...     controller.attach(optimizer)
    """
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    sizes = {key: entry.size for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    specs: dict[TensorTrain, Spec] = {}
    layouts: dict[str, Tensor] = {}
    for name, train in named_trains(model):
        at = f"{prefix}{name}."
        shapes = {key.removeprefix(at): size for key, size in sizes.items() if key.startswith(at)}
        spec = train.spec_for(shapes)
        if spec is None:
            came = ", ".join(f"{key} {tuple(size)}" for key, size in shapes.items()) or f"nothing under {at!r}"
            raise CheckpointError(
                f"{folder}: expected the tensor train {name} with the modes of {train.spec}, got {came}; no rank was "
                "changed: build the model as it was when it was saved, or give the prefix that it was saved under"
            )
        specs[train] = spec
        if spec.layout_name:  # the shapes of cores and gates do not show all of it
            layouts[at + spec.layout_name] = torch.zeros(shapes[spec.layout_name], dtype=torch.int32)
    if optimizers and not any(key.startswith(optimizer_prefix) for key in stored):
        raise CheckpointError(
            f"{folder}: expected the state of optimizers, got nothing under {optimizer_prefix!r}; no rank was changed: "
            "give the optimizer_prefix that it was saved under, or no optimizers"
        )
    if layouts:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each process reads for itself
            dcp.load(layouts, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
    for name, train in named_trains(model):
        spec = specs[train]
        if spec.layout_name:
            specs[train] = with_stored_layout(spec, layouts[f"{prefix}{name}.{spec.layout_name}"], name, folder)
    for train, spec in specs.items():
        train.resize_(spec)
    if optimizers:
        get_optimizer_state_dict(model, optimizers)  # gives those their first state that have none
    for name, parameter in model.named_parameters():
        at = f"{optimizer_prefix}state.{name}."
        held = [key for key in stored if key.startswith(at)]
        if f"{prefix}{name}" in stored and not held:
            reset_state_([parameter], optimizers)
        for state in filter(None, (optimizer.state.get(parameter) for optimizer in optimizers)):
            for key in held:  # what an optimizer's first step does not make: importances of gates
                if sizes.get(key) == parameter.shape:
                    state.setdefault(key.removeprefix(at), torch.zeros_like(parameter))
