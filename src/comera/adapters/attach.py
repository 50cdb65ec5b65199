"""`adapt_` and `remove_adapters_`: everything is decided and made before the model is touched."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from comera.adapters.config import TTAdapter
from comera.adapters.record import Record, moved_buffers, read, restore_flags_, stored_buffers, take, write
from comera.adapters.report import AdapterReport, AdapterRow
from comera.adapters.sites import Names, Site, check_apart, find_heads, matching_sites, patterns_of
from comera.convert.declared import guard_resizing_
from comera.convert.select import all_names
from comera.errors import ComeraError, ConversionError
from comera.nn.adapted import attach_, detach_, refuse_adapters
from comera.nn.tensor_train import TensorTrain
from comera.pretrained.sharded import is_sharded


def adapt_(
    model: nn.Module,
    adapter: TTAdapter,
    *,
    targets: Names,
    also_train: Names = (),
    generator: torch.Generator | None = None,
) -> AdapterReport:
    """Put a trained tensor train beside chosen linear layers of a model and freeze everything else, in place.

    Each layer then computes y = x W + bias + s · x Δ, with Δ zero at first. W may be dense or compressed; layers and
    parameters stay the same objects under the same names. Create optimizers and DistributedDataParallel wrappers
    afterwards: `param_groups` gives rates, `RankController` lowers the ranks of adapters alone, `fuse_` merges their
    cores in batches and leaves blocks alone that would skip an adapter. `save_adapters` writes them without the model.

    Args:
        model: any module with linear layers of the types that `tensorize_` converts, or those that it makes of them.
        adapter: order, rank and scale.
        targets: glob patterns of layer names ("*.q_proj", "encoder.layer.*.dense"); each must match a linear layer.
        also_train: glob patterns of modules whose own parameters are trained too, such as a new head ("classifier").
            What they were is kept, for `remove_adapters_`.
        generator: source of the random cores.

    Returns:
        The adapter of each matched layer, or why it has none; printable.

    Raises:
        ConversionError: a model that has adapters, is wrapped for several processes or has no shapes yet; a pattern
            that matches nothing, or a layer both adapted and trained. The model is unchanged, as after the next error.
        SpecError: an adapter that does not fit a layer.

    Example:
        >>> import torch, comera
        >>> from comera.adapters import TTAdapter, adapt_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
        >>> x = torch.randn(5, 64)
        >>> before = model(x)
        >>> adapt_(model, TTAdapter(order=4, rank=4), targets="0", also_train="2")
        <AdapterReport: 1 layer adapted, 3,062 of 19,702 parameters trained (15.54%)>
        >>> torch.equal(model(x), before)
        True
        >>> [name for name, p in model.named_parameters() if p.requires_grad and "cores" not in name]
        ['0.adapter.tt.rank_params.0', '0.adapter.tt.rank_params.1', '0.adapter.tt.rank_params.2', '2.weight', '2.bias']

    Source: docs/method.md §1.
    """
    if not isinstance(adapter, TTAdapter):
        raise ConversionError(f"adapt_: expected a TTAdapter, got {adapter!r}")
    check_plain(model, ConversionError, "adapt_")
    names = all_names(model)
    sites = matching_sites(names, patterns_of("targets", targets))
    heads = find_heads(names, patterns_of("also_train", also_train) if also_train else ())
    chosen = [site for site in sites if not site.refused]
    check_apart(names, [site.layer for site in chosen], heads)
    trains = {site: site.train(adapter.spec(*site.shape), generator=generator) for site in chosen}
    place_(model, adapter, trains, heads)
    refused = {site: site.refused for site in sites if site.refused}
    return report_of(model, trains, refused)


def remove_adapters_(model: nn.Module) -> nn.Module:
    """Take the adapters of a model away, in place: it is again what it was before `adapt_` or `load_adapters_`.

    Parameters are those of before, to the bit, also in the modules of `also_train`; so is their `requires_grad`, and so
    are the buffers that a state dict has, such as running statistics.

    Args:
        model: the model that was given to `adapt_`, or a wrapper of it.

    Returns:
        The model.

    Raises:
        ConversionError: a model without adapters, a part of one, or one that was sharded with them.

    Example:
        >>> import torch, comera
        >>> from comera.adapters import TTAdapter, adapt_, remove_adapters_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> _ = adapt_(model, TTAdapter(), targets="0")
        >>> remove_adapters_(model)
        Sequential(
          (0): Linear(in_features=64, out_features=64, bias=True)
        )
    """
    root, record, layers = read(model, "remove_adapters_")
    check_whole("remove_adapters_", root)
    for layer in layers.values():
        detach_(layer)
    for name, state in record.heads.items():
        root.get_submodule(name).load_state_dict(state)
    for name, buffer in moved_buffers(root, record).items():
        buffer.copy_(record.buffers[name])
    restore_flags_(root, record)
    take(root)
    guard_resizing_(root)
    return model


def place_(
    model: nn.Module, adapter: TTAdapter, trains: Mapping[Site, TensorTrain], heads: Mapping[str, nn.Module]
) -> None:
    """Attach adapters, freeze everything else but the heads, and note how to go back."""
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    states = {name: {key: t.detach().clone() for key, t in head.state_dict().items()} for name, head in heads.items()}
    buffers = {name: buffer.detach().clone() for name, buffer in stored_buffers(model).items()}
    write(model, Record(adapter, flags, states, buffers))
    trained = {parameter for head in heads.values() for parameter in head.parameters()}
    for parameter in model.parameters():
        wanted = parameter in trained and (parameter.is_floating_point() or parameter.is_complex())
        parameter.requires_grad_(wanted)
        if not wanted:
            parameter.grad = None  # which an optimizer from before would go on applying
    for site, train in trains.items():
        attach_(site.layer, train, adapter.scale, in_first=site.in_first)
    guard_resizing_(model)


def report_of(
    model: nn.Module, trains: Mapping[Site, TensorTrain], refused: Mapping[Site, str | None]
) -> AdapterReport:
    """What became of each layer."""
    rows = [AdapterRow(site.names[0], _kind(site.layer), train.spec) for site, train in trains.items()]
    rows += [AdapterRow(site.names[0], type(site.layer).__name__, None, why or "") for site, why in refused.items()]
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return AdapterReport(tuple(rows), trained, sum(p.numel() for p in parameters))


def check_plain(model: nn.Module, error: type[ComeraError], call: str) -> None:
    """Raise `error` unless a model can get adapters."""
    refuse_adapters(model, error, call, "remove_adapters_ or merge_adapters_ first")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise error(f"{call}: the model is wrapped in DistributedDataParallel: adapt it first, then wrap it")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise error(f"{call}: {lazy[0]} has no shape yet (a lazy module): run one batch through the model first")
    if any(map(is_sharded, model.parameters())):
        raise error(f"{call}: the model is sharded (fully_shard): adapt it first, then shard it")


def check_whole(call: str, model: nn.Module) -> None:
    """Raise ConversionError for a model that is sharded."""
    if any(map(is_sharded, model.parameters())):
        raise ConversionError(
            f"{call}: expected whole parameters, got a {type(model).__name__} that fully_shard has spread over "
            "processes: save_adapters in every process, and load_adapters_ into a model that is whole"
        )


def _kind(layer: nn.Module) -> str:
    return getattr(layer, "plain_type", type(layer)).__name__
