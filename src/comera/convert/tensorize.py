"""`tensorize_` and `materialize_`.

`tensorize_` first decides everything, then makes all tensor trains, and only then touches the model, so that an error
leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from comera.convert.config import TT, TTM, TensorizeConfig
from comera.convert.meta import Drawn, draw_on_, undrawn
from comera.convert.ratio import check_size, fit_groups
from comera.convert.registry import converters
from comera.convert.report import TensorizeReport
from comera.convert.rows import rows_of
from comera.convert.select import (
    Group,
    Site,
    all_names,
    find_groups,
    find_sites,
    keeps_padding,
    note_padding,
    why_nothing,
)
from comera.convert.swap import compress_layers_, materialize_layers_
from comera.errors import ConversionError, SpecError, check_module
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
    plan = Plan.of(model, config, ratio, init)
    stds = [plan.config.init_std] * len(plan.groups)
    if device is not None:
        stds = _draw_but(plan, torch.device(device))
    if plan.config.init == "decompose":
        return plan.apply_([plan.decompose(group, group.leader.dense) for group in plan.groups])
    groups = zip(plan.groups, stds, strict=True)
    return plan.apply_(
        [(plan.draw(group, std or _std(group.leader), device, generator), None) for group, std in groups]
    )


@dataclass(frozen=True)
class Plan:
    """What `tensorize_` will do to a model, which has no say in the values of its weights.

    names: every module with its names. sites: the layers of types that can be converted. groups: the tensor trains to
    make. fitted: their ranks follow from a ratio, so that a block tensor train may give its blocks the ranks they need.
    """

    model: nn.Module
    config: TensorizeConfig
    names: dict[nn.Module, list[str]]
    sites: list[Site]
    groups: list[Group]
    fitted: bool

    @classmethod
    def of(
        cls,
        model: nn.Module,
        config: TensorizeConfig | None,
        ratio: float | None,
        init: Literal["random", "decompose"] | None,
    ) -> Plan:
        """The plan for the arguments of `tensorize_`, which raises what this does."""
        check_module(model)
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
        return cls(model, config, names, sites, groups, ratio is not None)

    def draw(
        self, group: Group, std: float, device: torch.device | str | None, generator: torch.Generator | None
    ) -> TensorTrain:
        """A tensor train with random cores, of a standard deviation of the weight."""
        weight = group.leader.dense
        about: dict[str, Any] = {"dtype": weight.dtype, "device": device or weight.device, "generator": generator}
        tt = TensorTrain(group.spec, init_std=std, threshold=self.config.threshold, **about)
        tt.padding_row = keeps_padding(group.sites, weight)
        return tt

    def decompose(self, group: Group, weight: Tensor) -> tuple[TensorTrain, float]:
        """The tensor train nearest to a dense weight, and its relative error."""
        site, weight = group.leader, weight.detach()
        if weight.is_meta:
            raise ConversionError(
                f"init='decompose' needs a weight, but {site} is on the meta device: use init='random'"
            )
        std = self.config.init_std or _std(site, weight)
        if site.converter.layout is not None:
            matrix = site.converter.layout.stack(weight).reshape(group.spec.shape)
        else:
            matrix = weight.flatten(1)  # of a convolution (out, in, *kernel)
            matrix = matrix.t() if not isinstance(group.spec, TTMSpec) and not site.converter.in_first else matrix
        try:
            if self.fitted and isinstance(group.spec, BTTSpec):  # the largest singular values of all blocks
                whole = tt_svd(matrix, group.spec.with_ranks(group.spec.block_limit))
                result = round_cores(whole.spec, whole.cores, ranks=group.spec.ranks)
            else:
                result = tt_svd(matrix, group.spec)
        except SpecError as error:
            raise SpecError(f"{site}: {error}") from error
        about: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        threshold = self.config.threshold
        tt = TensorTrain.from_tensors(result.spec, result.cores, init_std=std, threshold=threshold, **about)
        tt.padding_row = keeps_padding(group.sites, weight)
        return tt, result.error

    def apply_(self, made: Sequence[tuple[TensorTrain, float | None]]) -> TensorizeReport:
        """Put a tensor train for each group into the model. made: with the errors of their decompositions."""
        trains = {site.place: tt for group, (tt, _) in zip(self.groups, made, strict=True) for site in group.sites}
        errors = {tt: error for tt, error in made if error is not None}
        for group, (tt, _) in zip(self.groups, made, strict=True):
            note_padding(group.sites, tt.padding_row)
        compress_layers_(self.model, trains)
        _count_once(self.model, {trains[site.place]: site.dense for site in self.sites if site.place in trains})
        rows = rows_of(self.model, self.names, self.sites, errors, self.config)
        return TensorizeReport(tuple(rows), model_size(self.model))


def _draw_but(plan: Plan, device: torch.device) -> list[float | None]:
    """Give a model on the meta device memory and values, but for weights that will be compressed; the standard
    deviations that these would have, by group."""
    model, config, compressed = plan.model, plan.config, [group.leader.dense for group in plan.groups]
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
    stds = [config.init_std or drawn.std(weight) for weight in compressed]  # may raise, before anything has changed
    swapped = {site.place for group in plan.groups for site in group.sites}
    kept = {p for module in plan.names for leaf, p in module._parameters.items() if (module, leaf) not in swapped}
    draw_on_(model, device, drawn, [weight for weight in compressed if weight not in kept])
    for site in plan.sites:
        site.weight = site.layer._parameters.get(site.leaf)
    return stds


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
    check_module(model)
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


def _std(site: Site, weight: Tensor | None = None) -> float:
    """Standard deviation of the weight, or of its layer's own initialization if the weight does not show one."""
    weight = site.dense.detach() if weight is None else weight
    if not weight.is_meta and weight.numel():
        values = weight.to(torch.promote_types(weight.dtype, torch.float32))
        std, mean = float(values.std(correction=0)), float(values.mean())
        if 1e-6 * abs(mean) < std < float("inf"):
            return std
    return site.converter.std(site.layer)
