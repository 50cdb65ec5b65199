"""Compressed layers for inference: they hold cores only and use torch's own operators, for any batch size.

torch.export sees all of their graph. They need no custom gradient, plan only once, and never branch on the batch size.

    E[id] = L[id // M_R] · R[:, id % M_R],    logits = x Eᵀ:  T = x Rᵀ, then L T        (docs/method.md §5)

Shapes: B flattened batch, I/O in/out features, U ids, D columns, M/N row and column modes of the left (L) or right (R)
factor of a TTM, r the rank between them.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from comera.convert import materialize_
from comera.convert.swap import move_hooks_
from comera.errors import ConversionError
from comera.fusion.fuse import fuse_
from comera.kernels.tracing import traced
from comera.nn.adapted import refuse_adapters
from comera.nn.conv import TTConv
from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMProjection
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.ngram import NGramEmbedding, NGramTable, detach_ngrams_, longest_of, padding_of, rows_with_ngrams
from comera.nn.packed import CompressedParameter
from comera.nn.tensor_train import CompressedLayer, TensorTrain, named_trains
from comera.nn.weight import lazy_weight
from comera.ops.block_product import batched_product, component_places
from comera.ops.chunking import pad_last
from comera.ops.conv import tt_conv
from comera.ops.dtypes import merge_dtype, without_autocast, working_dtype
from comera.ops.ngram import NGramIds
from comera.ops.planner.plan import plan_linear
from comera.ops.projection import merge_sides
from comera.ops.sequential import contract_groups
from comera.rank.prune import prune_
from comera.tt.dense import materialize, zero_row
from comera.tt.format import check_linear
from comera.tt.ngram import NGramSpec
from comera.tt.spec import TTMSpec, TTSpec


def copy_with_own_trains(model: nn.Module) -> nn.Module:
    """A copy of a model with its own tensor trains; all other parameters and buffers are shared.

    Raises ConversionError for a model with adapters.
    """
    instead = "merge_adapters_ or remove_adapters_ first"
    refuse_adapters(model, ConversionError, "an export", instead)
    owned = {p for module in model.modules() if isinstance(module, TensorTrain) for p in module.parameters()}
    shared = [t for t in (*model.parameters(), *model.buffers()) if t not in owned]
    return deepcopy(model, {id(tensor): tensor for tensor in shared})


def dense_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with dense weights in the place of compressed ones; all others are shared."""
    copy = copy_with_own_trains(model)
    if any(isinstance(module, CompressedLayer) for module in copy.modules()):
        materialize_(copy)
    return copy


@torch.no_grad()
def serving_copy(model: nn.Module) -> nn.Module:
    """A copy of a model in evaluation mode, with the compressed layers of this file.

    Pruned slices are removed and gates absorbed; everything else is shared with the model, which is unchanged. Modules
    that multiply by compressed weights themselves stay as they are, gates included, and make them dense each time.
    Outputs are the same up to rounding.
    Raises ConversionError for an unknown type of compressed layer, and for adapters.

    Example:
        >>> import torch, comera
        >>> from comera.export import serving_copy
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=4)))
        >>> served = serving_copy(model)
        >>> [name for name, _ in served.named_parameters()]  # no gates
        ['0.bias', '0.tt.cores.0', '0.tt.cores.1', '0.tt.cores.2', '0.tt.cores.3']
        >>> x = torch.randn(3, 64)
        >>> torch.allclose(served(x), model.eval()(x), atol=1e-6)
        True
    """
    for _, train in named_trains(model):
        if not isinstance(train.spec, NGramSpec):
            check_linear(train.spec, "form for a program: export its weights (safetensors)", ConversionError)
    copy = copy_with_own_trains(model).eval()
    fuse_(copy, enabled=False)
    prune_(copy)
    cores: dict[TensorTrain, _Cores] = {}

    def replacement(layer: CompressedLayer) -> nn.Module:
        if type(layer) not in _INFERENCE:
            raise ConversionError(
                f"expected compressed layers of {', '.join(kind.__name__ for kind in _INFERENCE)}, got a "
                f"{type(layer).__name__}: materialize_ the model first"
            )
        if layer.tt not in cores:
            cores[layer.tt] = _Cores(layer.tt)
        return _INFERENCE[type(layer)](layer, cores[layer.tt])

    swaps: dict[nn.Module, nn.Module] = {}
    for module in list(copy.modules()):
        if isinstance(module, NGramEmbedding):
            table = module.ngrams
            detach_ngrams_(module)
            rows = replacement(module) if isinstance(module, CompressedLayer) else module
            swaps[module] = _WithNGrams(rows, table, padding_of(module))
        elif isinstance(module, CompressedLayer) and not isinstance(module, NGramTable):
            by_others = isinstance(module, CompressedParameter) or module.dense_type is NonDynamicallyQuantizableLinear
            if not by_others:  # no other module multiplies by its weight
                swaps[module] = replacement(module)
        elif type(module) is nn.EmbeddingBag and (module.mode, module.max_norm, module.padding_idx) == (
            "sum",
            None,
            None,
        ):
            swaps[module] = _DenseBag(module)
    for old, new in swaps.items():
        if "forward" in vars(old):
            raise ConversionError(
                f"expected a {type(old).__name__} with the forward of its class, got one with another, which "
                "cannot go along: remove it, or put it into a module around the layer"
            )
        move_hooks_(old, new)
    for parent in list(copy.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in swaps:
                setattr(parent, name, swaps[child])
    _leave_fast_paths(copy)
    return swaps.get(copy, copy).eval()


def _leave_fast_paths(model: nn.Module) -> None:
    """torch's transformer layers call their linear layers, instead of reading dense weights that they do not have."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and _without_weights(module):
            module.activation_relu_or_gelu = 0  # none that its fast path has
        elif isinstance(module, nn.TransformerEncoder) and any(map(_without_weights, module.layers)):
            module.use_nested_tensor = False


def _without_weights(layer: nn.Module) -> bool:
    return not all(isinstance(getattr(layer, name, None), nn.Linear) for name in ("linear1", "linear2"))


class _Cores(nn.Module):
    """Cores with the gates absorbed; tied layers share them."""

    def __init__(self, tt: TensorTrain) -> None:
        super().__init__()
        self.spec = tt.spec
        self.cores = nn.ParameterList([nn.Parameter(core, requires_grad=False) for core in tt.effective_cores()])

    def dense(self, cores: Sequence[Tensor]) -> Tensor:
        """The weight that these cores make, of `spec.shape`, in their dtype; merged in float32 if that is a half."""
        with without_autocast(cores[0]):
            return materialize(self.spec, [core.to(merge_dtype(core.dtype)) for core in cores]).to(cores[0].dtype)

    def factors(self) -> tuple[Tensor, Tensor]:
        """L (M, N, r) and R (r, M, N) of a TTM, split where they have the fewest elements."""
        spec = self.spec
        assert isinstance(spec, TTMSpec)
        modes = [rows * cols for rows, cols in zip(spec.row_modes, spec.col_modes, strict=True)]
        sizes = {k: spec.ranks[k] * (prod(modes[:k]) + prod(modes[k:])) for k in range(1, spec.order)}
        if sizes:
            return merge_sides(list(self.cores), min(sizes, key=sizes.__getitem__))
        table_MN = materialize(spec, [core.to(merge_dtype(core.dtype)) for core in self.cores])  # a single core
        return table_MN.unsqueeze(2), table_MN.new_ones(1, 1, 1)


class _Layer(nn.Module):
    """Base class of the layers around cores. Some models read the weight of their layers, most of them its dtype."""

    def __init__(self, layer: CompressedLayer, cores: _Cores) -> None:
        super().__init__()
        self.tt, self._shape = cores, layer.weight.shape

    @property
    def weight(self) -> Tensor:
        """The dense weight, as that of the layer; made when its values are used, or by a graph that uses them."""
        cores = list(self.tt.cores)
        return self._dense(cores) if traced() else lazy_weight(self._dense, self._shape, cores)

    def _dense(self, cores: Sequence[Tensor]) -> Tensor:
        return self.tt.dense(cores).t().reshape(self._shape).contiguous()


class _Linear(_Layer):
    """y = x W + bias, contracted as planned for the first batch."""

    def __init__(self, layer: TTLinear, cores: _Cores) -> None:
        super().__init__(layer, cores)
        self.bias = layer.bias
        self.groups: Any = None

    def forward(self, input: Tensor) -> Tensor:
        spec, cores = self.tt.spec, list(self.tt.cores)
        assert isinstance(spec, TTSpec)
        x_BI = input.reshape(-1, spec.in_features)
        if self.groups is None:
            plan = plan_linear(spec, x_BI.shape[0], input.element_size(), device=input.device.type)
            self.groups = plan.groups
        return contract_groups(x_BI, spec, cores, self.groups, self.bias).view(*input.shape[:-1], spec.out_features)


class _Convolution(_Layer):
    """y = conv(x, W) + bias, as the layer computes it."""

    def __init__(self, layer: TTConv, cores: _Cores) -> None:
        super().__init__(layer, cores)
        self.bias, self.settings = layer.bias, layer.settings

    def forward(self, input: Tensor) -> Tensor:
        spec, cores = self.tt.spec, list(self.tt.cores)
        assert isinstance(spec, TTSpec)
        return tt_conv(input, spec, cores, self.bias, **self.settings)


class _Blocks(_Layer):
    """y = x W + bias, W a block tensor train."""

    def __init__(self, layer: BTTLinear, cores: _Cores) -> None:
        super().__init__(layer, cores)
        self.bias, self.spec = layer.bias, layer.spec
        places = component_places(self.spec, cores.cores[0].device)  # so that a graph need not make them
        self.places = [f"place_{k}" for k in range(len(places))]
        for name, place in zip(self.places, places, strict=True):
            self.register_buffer(name, place)

    def forward(self, input: Tensor) -> Tensor:
        spec, dtype = self.spec, working_dtype(input)
        r_NK, l_KM = self.tt.cores[0].squeeze(0).to(dtype), self.tt.cores[1].squeeze(2).to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        places = [self.get_buffer(name) for name in self.places]
        y_BO = batched_product(spec, input.reshape(-1, spec.in_features).to(dtype), r_NK, l_KM, bias, places)
        return y_BO.to(input.dtype).view(*input.shape[:-1], spec.out_features)


class _Table(_Layer):
    """Rows of a tensor-train matrix."""

    def __init__(self, layer: Any, cores: _Cores) -> None:
        super().__init__(layer, cores)
        self.padding_idx: int | None = layer.zero_row
        self.spec: TTMSpec = layer.tt.spec

    def _dense(self, cores: Sequence[Tensor]) -> Tensor:
        table_VD = self.tt.dense(cores).contiguous()
        return table_VD if self.padding_idx is None else zero_row(table_VD, self.padding_idx)

    def rows(self, ids_U: Tensor) -> Tensor:
        """Rows (U, D); an id outside the table is a runtime error."""
        inside_U = (ids_U >= 0) & (ids_U < self.spec.num_embeddings)
        torch._assert_async(inside_U.all(), f"expected every id in 0 ... {self.spec.num_embeddings - 1}")
        left_MNR, right_RMN = self.tt.factors()
        right_MRN = right_RMN.transpose(0, 1)
        # ONNX has no assertions: there, an id after the last row fails in its own lookup
        ids_U = torch.where(inside_U, ids_U, left_MNR.shape[0] * right_MRN.shape[0])
        i_U, k_U = ids_U // right_MRN.shape[0], ids_U % right_MRN.shape[0]
        rows_UNN = torch.bmm(left_MNR[i_U], right_MRN[k_U])
        rows_UD = rows_UNN.flatten(1)[:, : self.spec.embedding_dim].to(self.tt.cores[0].dtype)
        if self.padding_idx is not None:
            rows_UD = rows_UD.masked_fill((ids_U == self.padding_idx).unsqueeze(1), 0)
        return rows_UD


class _Embedding(_Table):
    """Rows, times the scale of the table that some models have."""

    def __init__(self, layer: TTMEmbedding, cores: _Cores) -> None:
        super().__init__(layer, cores)
        self.scale = float(layer.embed_scale)

    def forward(self, input: Tensor) -> Tensor:
        rows_UD = self.rows(input.reshape(-1))
        rows_UD = rows_UD if self.scale == 1.0 else rows_UD * self.scale
        return rows_UD.view(*input.shape, rows_UD.shape[1])


class _WithNGrams(nn.Module):
    """Rows, and those of the n-grams that end at each id. Every row of ids is a whole text: there are no masks."""

    def __init__(self, rows: nn.Module, table: nn.Module, padding_idx: int | None) -> None:
        super().__init__()
        self.rows, self.ngrams, self.padding_idx = rows, table, padding_idx

    @property
    def weight(self) -> Any:
        """That of the token table, as everywhere."""
        return self.rows.weight

    def forward(self, input: Tensor) -> Tensor:
        ids = NGramIds.of(input, longest_of(self), self.padding_idx)
        padding = None if self.padding_idx is None else input == self.padding_idx
        return rows_with_ngrams(self.rows(input), ids, self.rows, self.ngrams, padding)


class _Bag(_Table):
    """Sums or means over bags of rows; ignores the padding id."""

    def __init__(self, layer: TTMEmbeddingBag, cores: _Cores) -> None:
        super().__init__(layer, cores)
        self.mode, self.include_last_offset = layer.mode, layer.include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        ids_N = input.reshape(-1)
        rows_ND = self.rows(ids_N)
        if per_sample_weights is not None:
            rows_ND = rows_ND * per_sample_weights.reshape(-1, 1)
        if self.mode == "mean":  # the number of ids per bag is a sum too
            present_N = ids_N >= 0 if self.padding_idx is None else ids_N != self.padding_idx
            rows_ND = torch.cat([rows_ND, present_N.unsqueeze(1).to(rows_ND.dtype)], 1)
        if offsets is None:
            sums_BD = rows_ND.view(*input.shape, rows_ND.shape[1]).sum(1)
        else:
            starts_B = (offsets[:-1] if self.include_last_offset else offsets).long()
            sums_BD = F.embedding_bag(torch.arange(ids_N.shape[0], device=input.device), rows_ND, starts_B, mode="sum")
        return sums_BD if self.mode == "sum" else sums_BD[:, :-1] / sums_BD[:, -1:].clamp(min=1)


class _DenseBag(nn.Module):
    """Sums of rows of a dense table, by a lookup: ONNX has no bags, and torch's translation loops over them."""

    def __init__(self, layer: nn.EmbeddingBag) -> None:
        super().__init__()
        self.bag = layer

    @property
    def weight(self) -> Tensor:
        """That of the bag."""
        return self.bag.weight

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if offsets is not None:
            return self.bag(input, offsets, per_sample_weights)  # type: ignore[no-any-return]
        rows_BUD = F.embedding(input, self.bag.weight)
        if per_sample_weights is not None:
            rows_BUD = rows_BUD * per_sample_weights.unsqueeze(-1)
        return rows_BUD.sum(1)


class _Projection(_Table):
    """logits = x Eᵀ + bias; the logit of the padding row is the bias alone."""

    def __init__(self, layer: TTMProjection, cores: _Cores) -> None:
        super().__init__(layer, cores)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        spec = self.spec
        left_MNR, right_RMN = (factor.to(input.dtype) for factor in self.tt.factors())
        (_, n, r), (_, rows_r, cols_r) = left_MNR.shape, right_RMN.shape
        x_BI = input.reshape(-1, spec.embedding_dim)
        x_QN = pad_last(x_BI, n * cols_r).reshape(-1, cols_r)
        t_BKM = (x_QN @ right_RMN.flatten(0, 1).t()).view(x_BI.shape[0], n * r, rows_r)
        logits_BO = (left_MNR.flatten(1) @ t_BKM).flatten(1)[:, : spec.num_embeddings]
        if self.padding_idx is not None:
            padding_O = torch.arange(spec.num_embeddings, device=input.device) == self.padding_idx
            logits_BO = logits_BO.masked_fill(padding_O, 0)
        if self.bias is not None:
            logits_BO = logits_BO + self.bias
        return logits_BO.view(*input.shape[:-1], spec.num_embeddings)


_INFERENCE: dict[type[nn.Module], Callable[[Any, _Cores], nn.Module]] = {
    TTLinear: _Linear,
    BTTLinear: _Blocks,
    TTConv: _Convolution,
    TTMEmbedding: _Embedding,
    TTMEmbeddingBag: _Bag,
    TTMProjection: _Projection,
}
