"""`tensorize_` and `materialize_`.

`tensorize_` first decides everything, then makes all tensor trains, and only then touches the model, so that an error
leaves the model as it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from comera.convert.config import TT, TTM, TensorizeConfig
from comera.convert.meta import Drawn, draw_on_, undrawn
from comera.convert.ratio import check_size, fit_groups
from comera.convert.registry import converters
from comera.convert.report import TensorizeReport
from comera.convert.rows import rows_of
from comera.convert.select import Group, Site, all_names, find_groups, find_sites, why_nothing
from comera.convert.swap import compress_layers_, materialize_layers_
from comera.errors import ConversionError, SpecError
from comera.nn.adapted import refuse_adapters
from comera.nn.size import model_size
from comera.nn.tensor_train import CompressedLayer, TensorTrain, named_trains
from comera.tt.decompose import round_cores, tt_svd
from comera.tt.format import check_linear
from comera.tt.spec import BTTSpec, TTMSpec


def tensorize_(
    model: nn.Module,
    config: TensorizeConfig | None = None,
    *,
    ratio: float | None = None,
    init: Literal["random", "decompose"] | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> TensorizeReport:
    """Compress a model's linear and embedding layers, and if so configured its convolutions, in place.

    Keeps dtype, device, biases (the same objects), `requires_grad`, train mode, forward and backward hooks, and tied
    weights. Create optimizers and DDP wrappers afterwards. Works on the meta device. Layers that are compressed already
    stay as they are.

    Args:
        model: any module that contains `nn.Linear`, `nn.Embedding`, `nn.EmbeddingBag`, `nn.MultiheadAttention`,
            `nn.LSTM`, `nn.GRU`, `nn.RNN`, Hugging Face's variants of them (`Conv1D`, `FalconLinear`, scaled embeddings,
            XLNet's attention), or layers of a type registered with `register_converter`; convolutions with
            `TensorizeConfig(conv=...)`, and the matrices of experts with `TensorizeConfig(experts=...)`.
        config: formats by kind of layer and by name; see `TensorizeConfig`. By default block tensor trains for linear
            layers and TT-matrices for tables, of plain low rank for those that an output layer is tied to (see `TTM`),
            with the ranks that `ratio` asks for. With init="decompose" all have two cores instead, `TT(order=2)` and
            `TTM(order=2)`: they keep most of trained weights (docs/results.md).
        ratio: how many times smaller the whole model becomes, parameters that stay dense included; more only by what
            ranks, being integers, leave over. Every layer gets the same share of its own full rank, a small one beside
            large tables more. The formats then have no ranks of their own.
        init: that of the config by default: "random" cores, or "decompose" the present weights.
        generator: source of the random cores.
        device: for a model that was made on the meta device: where it gets memory and values, layers compressed, so
            that no dense weight of theirs ever exists. Cores are drawn for the standard deviation that the model's own
            code gives each dense weight, and that code draws the rest. A meta model without it stays on meta.

    Returns:
        What became of each layer, why others stay dense, and the parameters before and now; every parameter of the
        model counts in one row. Printable.

    Raises:
        ConversionError: no size (neither a ratio nor ranks) or both, a ratio of 1 or less or above what the formats
            reach, an override without a match or of the wrong format, a model in which nothing gets smaller, or one
            with adapters; with `device`, a model that is not on the meta device, or a part of it that its own code
            does not draw. The model is unchanged, as it is after the next error.
        SpecError: a format that does not fit its layer, or without a rank.

    Example:
        >>> import torch, comera
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5000, 128), torch.nn.Linear(128, 512))
        >>> report = comera.tensorize_(model, ratio=10)
        >>> print(f"{report.dense_total:,} parameters, now {report.total:,}")
        706,048 parameters, now 70,600

        Or by ranks:

        >>> model = torch.nn.Sequential(torch.nn.Embedding(5000, 128), torch.nn.Linear(128, 512))
        >>> report = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(rank=16), comera.TTM(rank=16)))
        >>> [(row.name, row.before, row.after, f"{row.ratio:.1f}x") for row in report.rows]
        [('0', 'Embedding', 'TTMEmbedding', '55.3x'), ('1', 'Linear', 'TTLinear', '13.7x')]
        >>> report.dense_total, report.total
        (706048, 16880)

        A model too large to hold, from the meta device:

        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(20_000, 20_000), torch.nn.LayerNorm(20_000))
        >>> report = comera.tensorize_(model, ratio=60, device="cpu")
        >>> f"{report.dense_total:,}, now {report.total:,}", model[0].tt.cores[0].device.type
        ('400,060,000, now 6,667,434', 'cpu')
    """
    check_size(config, ratio)
    if config is None:
        config = TensorizeConfig(TT(order=2), TTM(order=2)) if init == "decompose" else TensorizeConfig()
    config = config if init is None else replace(config, init=init)
    if type(model) in converters():
        raise ConversionError(
            f"tensorize_ replaces layers inside a module: {_wrap(model)}, "
            "or make a comera.nn.TTLinear or comera.nn.TTMEmbedding yourself"
        )
    instead = "compress first, then adapt_; remove_adapters_ or merge_adapters_ frees a model of them"
    refuse_adapters(model, ConversionError, "tensorize_", instead)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ConversionError("the model is wrapped in DistributedDataParallel: convert first, then wrap")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ConversionError(f"{lazy[0]} has no shape yet (a lazy module): run one batch through the model first")
    names = all_names(model)
    sites = find_sites(names, config)
    groups = find_groups(names, sites, config, smallest=ratio is not None)
    if not groups and not any(isinstance(module, CompressedLayer) for module in names):
        raise ConversionError(why_nothing(model, sites, config))
    if ratio is not None:
        groups = fit_groups(model, names, groups, config, ratio)

    drawn = None
    if device is not None:
        drawn = _draw_but(model, [group.leader.dense for group in groups], config, torch.device(device))
    trains: dict[tuple[nn.Module, str], TensorTrain] = {}
    errors: dict[TensorTrain, float] = {}
    for group in groups:
        tt, error = _make_train(group, config, generator, drawn, device, fitted=ratio is not None)
        trains |= dict.fromkeys([site.place for site in group.sites], tt)
        if error is not None:
            errors[tt] = error
    compress_layers_(model, trains)
    _count_once(model, {trains[site.place]: site.dense for site in sites if site.place in trains})
    return TensorizeReport(tuple(rows_of(model, names, sites, errors, config)), model_size(model))


def _draw_but(
    model: nn.Module, compressed: Sequence[nn.Parameter], config: TensorizeConfig, device: torch.device
) -> Drawn:
    """Give a model on the meta device memory and values, but for weights that will be compressed; how these would have
    been drawn."""
    if config.init != "random":
        raise ConversionError("init='decompose' needs weights, but the meta device has none: use init='random'")
    elsewhere = {weight for weight in compressed if not weight.is_meta}
    if elsewhere:
        held = next(name for name, p in model.named_parameters() if p in elsewhere)
        raise ConversionError(
            f"expected a model on the meta device, got {held} on another: make it under torch.device('meta'), or leave "
            "device out to compress it where it is"
        )
    if any(isinstance(module, CompressedLayer) for module in model.modules()):
        raise ConversionError(
            "expected a dense model on the meta device, got one with compressed layers: make it anew, and give the "
            "device when you compress it"
        )
    drawn = Drawn(model)
    if drawn.missing:
        raise undrawn(drawn.missing)
    if config.init_std is None:
        for weight in compressed:
            drawn.std(weight)  # which may raise, before anything has changed
    draw_on_(model, device, drawn, compressed)
    return drawn


def _count_once(model: nn.Module, weights: Mapping[TensorTrain, nn.Parameter]) -> None:
    """Note which of these tensor trains had its weight in common with another one, or with a layer that stays dense."""
    counted = set(model.parameters())
    for tt, weight in weights.items():
        tt.counts_elsewhere = weight in counted
        counted.add(weight)


def materialize_(model: nn.Module) -> nn.Module:
    """Turn every compressed layer back into a dense one of its original type, in place.

    The function is unchanged up to rounding. Layers that share a tensor train share one weight again; dtype, device,
    biases, `requires_grad`, train mode, hooks and padding rows are kept. Create optimizers afterwards.

    Args:
        model: a model that `tensorize_` or `load_pretrained` has compressed.

    Returns:
        The model.

    Raises:
        ConversionError: a model without compressed layers, one that is itself a single compressed layer, or one with
            adapters or with an activation between the factors of a layer. The model is unchanged.

    Example:
        >>> import torch, comera
        >>> model = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.ReLU())
        >>> _ = comera.tensorize_(model, ratio=5)
        >>> inputs = torch.randn(4, 128)
        >>> expected = model(inputs)
        >>> comera.materialize_(model)
        Sequential(
          (0): Linear(in_features=128, out_features=512, bias=True)
          (1): ReLU()
        )
        >>> torch.allclose(model(inputs), expected, atol=1e-5)
        True
    """
    if isinstance(model, CompressedLayer):
        raise ConversionError(f"materialize_ replaces layers inside a module: {_wrap(model)}")
    instead = "remove_adapters_ first, or merge_adapters_(model, materialize=True), which makes their layers dense"
    refuse_adapters(model, ConversionError, "materialize_", instead)
    for name, train in named_trains(model):
        check_linear(train.spec, f"dense weight, at {name}", ConversionError)
    if not materialize_layers_(model):
        raise ConversionError(
            f"nothing to materialize in {type(model).__name__}: it has no compressed layer; tensorize_ it first"
        )
    return model


def _wrap(model: nn.Module) -> str:
    return f"a single {type(model).__name__} has no parent to hold the new layer; wrap it, as in nn.Sequential(layer)"


def _make_train(
    group: Group,
    config: TensorizeConfig,
    generator: torch.Generator | None,
    drawn: Drawn | None,
    device: torch.device | str | None,
    *,
    fitted: bool,
) -> tuple[TensorTrain, float | None]:
    """The tensor train of one group, and the relative error of its decomposition (None for random cores).

    drawn, device: how the weight would have been drawn and where, for a model from the meta device. fitted: the ranks
    follow from a ratio, so that a block tensor train may give its blocks the ranks they need.
    """
    site, weight = group.leader, group.leader.dense.detach()
    std = config.init_std or (drawn and drawn.std(group.leader.dense)) or _std(site)
    threshold, dtype, device = config.threshold, weight.dtype, device or weight.device
    if config.init == "random":
        tt = TensorTrain(group.spec, init_std=std, threshold=threshold, dtype=dtype, device=device, generator=generator)
        return tt, None
    if weight.is_meta:
        raise ConversionError(f"init='decompose' needs a weight, but {site} is on the meta device: use init='random'")
    if site.converter.layout is not None:
        matrix = site.converter.layout.stack(weight).reshape(group.spec.shape)
    else:
        weight = weight.flatten(1)  # of a convolution (out, in, *kernel)
        matrix = weight.t() if not isinstance(group.spec, TTMSpec) and not site.converter.in_first else weight
    try:
        if fitted and isinstance(group.spec, BTTSpec):  # the largest singular values of all blocks
            whole = tt_svd(matrix, group.spec.with_ranks(group.spec.block_limit))
            result = round_cores(whole.spec, whole.cores, ranks=group.spec.ranks)
        else:
            result = tt_svd(matrix, group.spec)
    except SpecError as error:
        raise SpecError(f"{site}: {error}") from error
    tt = TensorTrain.from_tensors(
        result.spec, result.cores, init_std=std, threshold=threshold, dtype=dtype, device=device
    )
    return tt, result.error


def _std(site: Site) -> float:
    """Standard deviation of the weight, or of its layer's own initialization if the weight does not show one."""
    weight = site.dense.detach()
    if not weight.is_meta and weight.numel():
        values = weight.to(torch.promote_types(weight.dtype, torch.float32))
        std, mean = float(values.std(correction=0)), float(values.mean())
        if 1e-6 * abs(mean) < std < float("inf"):
            return std
    return site.converter.std(site.layer)
