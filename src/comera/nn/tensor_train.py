"""A tensor train as a module: its cores, and its gates d_k (the paper's rank parameters) between them.

Every `CompressedLayer` holds one `TensorTrain`, and tied layers share one. Sizes, rank adaptation, pruning and
checkpoints find `TensorTrain`s by type, never by the names of parameters.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from comera.errors import SpecError, WeightError
from comera.kernels.tracing import traced
from comera.nn.weight import LazyWeight, Make, is_weight_of, lazy_weight
from comera.ops.dtypes import merge_dtype, without_autocast
from comera.tt.dense import absorb, materialize
from comera.tt.init import init_cores
from comera.tt.ngram import NGramSpec
from comera.tt.spec import Spec


class TensorTrain(nn.Module):
    """Cores and gates of one compressed weight.

    Args:
        spec: modes and ranks (TT, TTM or BTT).
        init_std: standard deviation of the materialized weight that `reset_parameters` draws.
        threshold: τ; a gate at or below it is pruned: it multiplies by exactly 0 and counts 0 (docs/method.md §2).
        starts_at_zero: draw the last core as zeros, as that of an adapter; `init_std` then scales the others.

    Parameters: `cores`, of `spec.core_shapes`; `rank_params`, the gates, vectors of `spec.inner_ranks`. Gates of cores
    in half precision are in float32: near 1, bfloat16 does not resolve their steps.
    late_from: parameters that it stored when a late stage first began, which a fraction as target counts from.
    counts_elsewhere: whether its weight was tied and counts in the dense model at another layer.
    padding_row: whether a table's row of padding is one like the others, instead of zero.

    Example:
        >>> import torch
        >>> from comera.nn import TensorTrain
        >>> from comera.tt import tt_spec
        >>> train = TensorTrain(tt_spec(64, 64, order=4, rank=8), init_std=0.1)
        >>> print(train.spec, [tuple(core.shape) for core in train.cores])
        TT 8·8 / 8·8 ranks 8-8-8 [(1, 8, 8), (8, 8, 8), (8, 8, 8), (8, 8, 1)]
        >>> train.dense().shape, round(train.dense().std().item(), 2)
        (torch.Size([64, 64]), 0.1)
        >>> _ = train.rank_params[0].data[:6].zero_()  # as training does it
        >>> [int(gates.sum()) for gates in train.unpruned()]
        [2, 8, 8]
    """

    late_from: int | None = None
    counts_elsewhere = False
    padding_row = False

    def __init__(
        self,
        spec: Spec,
        *,
        init_std: float,
        threshold: float = 1e-2,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
        starts_at_zero: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.init_std = init_std
        self.threshold = threshold
        self.starts_at_zero = starts_at_zero

        def empty(*shape: int, dtype: torch.dtype | None = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        wide = merge_dtype(dtype or torch.get_default_dtype())
        self.cores = nn.ParameterList([empty(*shape) for shape in spec.core_shapes])
        self.rank_params = _Gates([empty(rank, dtype=wide) for rank in spec.inner_ranks])
        for listed in (self.cores, self.rank_params):
            listed._parameters = _Parameters(listed._parameters)
        self.reset_parameters(generator)

    def note_layout_(self) -> None:
        """Keep in the state what the shapes of the parameters do not show, such as the ranks of a BTT's blocks."""
        if self.spec.layout_name:
            layout = torch.tensor(self.spec.layout, dtype=torch.int32, device=self.cores[0].device)
            self.register_buffer(self.spec.layout_name, layout)

    @classmethod
    def from_tensors(
        cls,
        spec: Spec,
        cores: Sequence[Tensor],
        rank_params: Sequence[Tensor] | None = None,
        *,
        init_std: float,
        threshold: float = 1e-2,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> TensorTrain:
        """A tensor train that holds copies of the given tensors; it draws nothing from the random generator.

        cores, rank_params: as for `set_`. dtype, device: those of the first core by default.
        """
        empty = cls(spec, init_std=init_std, threshold=threshold, dtype=dtype or cores[0].dtype, device="meta")
        train = empty.to_empty(device=device or cores[0].device)
        train.set_(spec, cores, rank_params)
        return train

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw new cores for `init_std` and set the gates to ones (meta tensors stay meta)."""
        device = self.cores[0].device
        if device.type != "meta":
            fresh = init_cores(self.spec, self.init_std, generator=generator, dtype=self.cores[0].dtype, device=device)
            for core, value in zip(self.cores, fresh, strict=True):
                core.copy_(value)
            if self.starts_at_zero:
                self.cores[-1].zero_()
        for d in self.rank_params:
            d.fill_(1.0)
        self.note_layout_()  # `to_empty` has emptied it
        self._undrawn = False

    _undrawn = False  # whether `to_empty` has given it memory without values, and nothing has given it any since

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TensorTrain:
        was_meta = self.cores[0].is_meta
        super()._apply(fn, recurse)
        self._undrawn = self._undrawn or (was_meta and not self.cores[0].is_meta)
        return self

    @torch.no_grad()
    def set_(self, spec: Spec, cores: Sequence[Tensor], rank_params: Sequence[Tensor] | None = None) -> None:
        """Replace all values in place, shapes included; the Parameter objects stay, so optimizers keep theirs.

        cores: `order` tensors of `spec.core_shapes`. rank_params: vectors of `spec.inner_ranks`, ones by default.
        A graph made before can no longer run backward through this tensor train: it raises RuntimeError, as after any
        in-place change. Raises SpecError when shapes do not fit `spec` or the order changes.
        """
        if rank_params is None:
            rank_params = [cores[0].new_ones(r) for r in spec.inner_ranks]
        came = tuple(tuple(c.shape) for c in cores), tuple(tuple(d.shape) for d in rank_params)
        want = spec.core_shapes, tuple((r,) for r in spec.inner_ranks)
        if came != want or len(cores) != len(self.cores):
            raise SpecError(f"expected cores and gates of shapes {want} for {spec}, got {came}")
        self.spec, self._undrawn = spec, False
        self.note_layout_()
        for parameter, value in zip([*self.cores, *self.rank_params], [*cores, *rank_params], strict=True):
            parameter.grad = None
            if parameter.shape == value.shape:
                # In place, so that the gradient's node stays, which DistributedDataParallel has hooks on.
                parameter.copy_(value.detach())
                continue
            data = value.detach().to(parameter.device, parameter.dtype).contiguous().clone()
            # A graph that is still alive (a kept loss) holds the parameter's gradient node, which remembers the old
            # shape and would refuse the next backward; torch renews the node only when the dtype changes.
            parameter.data = data.new_empty(0, dtype=torch.float16 if data.dtype == torch.float32 else torch.float32)
            parameter.data = data
        increment_version([*self.cores, *self.rank_params])  # an assignment to .data is not counted by itself

    def spec_for(self, shapes: Mapping[str, Sequence[int]], layout: Tensor | None = None) -> Spec | None:
        """The spec of a state with these modes and any ranks; None for any other state.

        shapes: name in `state_dict()` ("cores.0", "rank_params.0") -> shape in that state. layout: what these do not
        show, `spec.layout`; by default some that fits.
        """
        gates = [shapes.get(f"rank_params.{k}", ()) for k in range(len(self.rank_params))]
        cores = [shapes.get(f"cores.{k}", ()) for k in range(len(self.cores))]
        try:
            spec: Spec = self.spec.with_shapes(cores, [rank for (rank,) in gates])
            if layout is not None:
                spec = spec.with_layout(layout.flatten().tolist())
        except (ValueError, IndexError):  # no vectors or matrices, or no ranks (SpecError)
            return None
        want = {f"cores.{k}": shape for k, shape in enumerate(spec.core_shapes)}
        want |= {f"rank_params.{k}": (rank,) for k, rank in enumerate(spec.inner_ranks)}
        if spec.layout_name:
            want[spec.layout_name] = tuple(torch.tensor(spec.layout).shape)
        return spec if {name: tuple(shape) for name, shape in shapes.items()} == want else None

    def resize_(self, spec: Spec) -> None:
        """Take other ranks, to load a state that has them. Cores that get another shape are zeros then, gates ones, in
        memory of their own; the others stay, since the state may be made of them. The Parameter objects stay."""
        if spec != self.spec:
            cores, gates = _entries(self.cores), _entries(self.rank_params)
            kept = [c if c.shape == s else c.new_zeros(s) for c, s in zip(cores, spec.core_shapes, strict=True)]
            ones = [d if len(d) == r else d.new_ones(r) for d, r in zip(gates, spec.inner_ranks, strict=True)]
            self.set_(spec, kept, ones)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        held = self._buffers.get(self.spec.layout_name)
        if held is not None and not held.is_meta and held.tolist() != self.spec.layout:
            self.note_layout_()  # an average over buffers can make 6 of 0.9 · 7 + 0.1 · 7
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Ranks are state: `load_state_dict` takes those of the state, before it reaches the parameters."""
        names = {f"{prefix}{name}": name for name in self.state_dict()}
        shapes = {names[key]: value.shape for key, value in state_dict.items() if key in names}
        name = self.spec.layout_name
        layout = state_dict.get(f"{prefix}{name}") if name else None
        spec = self.spec_for(shapes, layout)
        if spec is not None:
            self.resize_(spec)
        before = self.get_buffer(name).shape if name else None
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._undrawn = self._undrawn and not all(each in shapes for each in names.values())
        if spec is None and layout is not None and layout.shape == before:
            *_, errors = args
            errors.append(
                f"{prefix}{name}: expected {self.spec.layout_of} the cores and gates beside them, got a sum of "
                f"{int(layout.sum())}, from {int(layout.min())} to {int(layout.max())}: the state is damaged, or of a "
                "model with other sizes"
            )
            self.note_layout_()

    @property
    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Cores and gates, as they are stored. Raises WeightError where they have memory but no values."""
        if self._undrawn:
            raise WeightError(
                f"expected cores and gates with values, got a tensor train ({self.spec}) that `to_empty` has left "
                "without: give tensorize_ the model on the meta device and device=..., in place of to_empty, or load a "
                "state, or call reset_parameters() of each compressed layer"
            )
        cores = _entries(self.cores)
        if cores[0].is_meta and "_hf_hook" in vars(self.cores):
            raise WeightError(
                "expected cores in memory, got them offloaded by accelerate, which brings the parameters of a module "
                "back when the module is called, but a layer reads those of its tensor train: give cpu_offload, "
                "disk_offload or dispatch_model preload_module_classes with the types of the compressed layers, as "
                '["BTTLinear", "TTMEmbedding", "TTMProjection"]'
            )
        return cores, _entries(self.rank_params)

    def unpruned(self) -> list[Tensor]:
        """For each vector of gates a boolean one: which are not pruned. A NaN is not: it stays, to be seen."""
        return [~(d.detach() <= self.threshold) for d in _entries(self.rank_params)]

    def gates(self) -> list[Tensor]:
        """The gates, pruned ones exactly zero."""
        return [d.masked_fill(d <= self.threshold, 0.0) for d in _entries(self.rank_params)]

    def effective_cores(self) -> list[Tensor]:
        """Cores with the gates absorbed and pruned slices exactly zero; writes nothing."""
        cores, gates = _entries(self.cores), self.gates()
        if isinstance(self.spec, NGramSpec):  # whose gates multiply what P reads
            return [*cores[:-1], (cores[-1] * torch.cat(gates)).to(cores[-1].dtype)]
        return absorb(cores, gates)

    def dense(
        self, tensors: Sequence[Tensor] | None = None, product: Callable[[Spec, Sequence[Tensor]], Tensor] = materialize
    ) -> Tensor:
        """The materialized weight, of `spec.shape`, in the cores' dtype whatever autocast says.

        Half-precision cores are merged in float32. tensors: cores and then gates to use in place of its own. product:
        what to make of the cores that have absorbed the gates.
        """
        tensors = [*_entries(self.cores), *_entries(self.rank_params)] if tensors is None else tensors
        cores, gates = tensors[: self.spec.order], tensors[self.spec.order :]
        dtype = cores[0].dtype
        with without_autocast(cores[0]):
            absorbed = absorb(cores, [d.masked_fill(d <= self.threshold, 0.0) for d in gates])
            return product(self.spec, [core.to(merge_dtype(dtype)) for core in absorbed]).to(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorTrain:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(deepcopy(vars(self), memo))
        _COPIES.setdefault(self, WeakKeyDictionary())[copied] = _bits(copied.cores[0])
        return copied

    def extra_repr(self) -> str:
        return f"{self.spec}, {self.spec.numel + self.spec.rank_numel:,} of {self.spec.dense_numel:,} elements"


_COPIES: WeakKeyDictionary[TensorTrain, WeakKeyDictionary[TensorTrain, Tensor | None]] = WeakKeyDictionary()


def copies_of(train: TensorTrain) -> dict[TensorTrain, bool]:
    """Those made of a tensor train by `copy.deepcopy`, as long as they live, and whether they were written to since, as
    averages of a model are. Synchronizes."""
    return {copied: _written(copied.cores[0], bits) for copied, bits in _COPIES.get(train, {}).items()}


def _written(core: Tensor, bits: Tensor | None) -> bool:
    now = None if bits is None else _bits(core)
    if bits is None or now is None or now.dtype != bits.dtype:
        return core._version > 0
    return not torch.equal(now.to(bits.device), bits)  # a write through .data has no version


def _bits(core: Tensor) -> Tensor | None:
    """The sum of the bits of a core, the same in whatever order; None of one that is sharded or has no values."""
    if type(core) is not nn.Parameter or core.is_meta:
        return None
    real = torch.view_as_real(core.detach()) if core.is_complex() else core.detach()
    kind = _INTEGERS[real.element_size()]
    return real.contiguous().view(kind).sum(dtype=kind)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class _Gates(nn.ParameterList):
    """Gates: in float32 whatever half precision the model is converted to."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Gates:
        def widened(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            wide = merge_dtype(converted.dtype)
            return converted if converted.dtype == wide else tensor.to(converted.device, wide)

        super()._apply(widened, recurse)
        return self


class _Swap:
    """`functional_call` has put `new` in the place of `old`, under as many names."""

    def __init__(self, old: Tensor, new: Tensor) -> None:
        self.old, self.new, self.names = ref(old), ref(new), 1


class _Parameters(dict[str, nn.Parameter | None]):
    """Parameters of a list that `functional_call` may put other tensors in the place of, and back.

    It does so for every name of a parameter. Layers that are tied share their list, where it finds under the second
    name what it has put there itself under the first, and would put that "back" last.
    """

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        swaps: list[_Swap] = vars(self).setdefault(name, [])  # also while it is unpickled
        now = self.get(name)
        if swaps and value is swaps[-1].new():
            swaps[-1].names += 1 if value is now else -1
        else:
            if swaps and value is swaps[-1].old():
                swaps[-1].names -= 1
            elif value is not None and now is not None and value is not now:
                swaps.append(_Swap(now, value))
            super().__setitem__(name, value)
        vars(self)[name] = [swap for swap in swaps if swap.names and swap.old() is not None]

    def __reduce__(self) -> Any:
        return type(self), (), None, None, iter(self.items())


def _entries(listed: nn.ParameterList) -> list[Tensor]:
    """The tensors of a list without its slow indexing, 3 µs each; a replica holds them as attributes only, and one with
    parametrizations makes them."""
    if listed._forward_pre_hooks:
        raise WeightError(
            "expected cores and gates that are read as they are stored, got forward hooks on the list of them, which "
            "nothing calls, so that what they do would be lost: torch.nn.utils.prune and the old spectral_norm and "
            "weight_norm register such. torch.nn.utils.parametrize and torch.nn.utils.parametrizations work on cores, "
            "comera.rank.prune_ cuts ranks, and comera.materialize_ makes layers dense"
        )
    plain = type(listed) is nn.ParameterList or type(listed) is _Gates
    return (list(listed._parameters.values()) if plain else []) or list(listed)  # type: ignore[arg-type]


def is_plain(tt: TensorTrain) -> bool:
    """Whether its tensors are its parameters, or others put in their place, and nothing makes them at each access, as
    parametrizations do."""
    return type(tt) is TensorTrain and type(tt.cores) is nn.ParameterList and type(tt.rank_params) is _Gates


class CompressedLayer(nn.Module):
    """Base class of the layers around a tensor train `tt`; layers tied to each other hold the same one.

    dense_type: the type of layer that `materialize_` turns it back into.

    Example:
        >>> import torch, comera
        >>> from comera.nn import CompressedLayer
        >>> model = torch.nn.Sequential(torch.nn.Embedding(500, 64), torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
        >>> _ = comera.tensorize_(model, ratio=4)
        >>> compressed = [module for module in model.modules() if isinstance(module, CompressedLayer)]
        >>> [(type(layer).__name__, layer.weight.shape) for layer in compressed]  # a shape costs nothing
        [('TTMEmbedding', torch.Size([500, 64])), ('BTTLinear', torch.Size([64, 64]))]
    """

    tt: TensorTrain
    dense_type: type[nn.Module]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As a module does. Raises WeightError for the weight, which `torch.nn.utils.prune` would rename."""
        if isinstance(param, LazyWeight):
            raise WeightError(
                f"expected a parameter to prune or to change, got the weight of a {type(self).__name__}, which is made "
                "of the cores of a tensor train whenever it is used: parametrize a core, as in "
                'parametrizations.spectral_norm(layer.tt.cores, "0"), or cut its ranks with comera.rank.prune_'
            )
        super().register_parameter(name, param)

    @property
    def weight(self) -> Tensor:
        """The dense weight as the layer that this one replaces has it: (out, in), (num_embeddings, embedding_dim), or
        (out_channels, in_channels / groups, *kernel_size).

        Read-only. Its dtype, device and shape cost nothing; operations on it materialize it, and differentiate through
        it. A write raises WeightError.
        """
        cores, gates = self.tt.tensors
        tensors = [*cores, *gates]
        if traced():
            return self._dense(tensors)
        return lazy_weight(self._make, self._dense_shape, tensors)

    @property
    def _make(self) -> Make:
        """What `weight` is made with when its values are used."""
        return self._dense

    @property
    @abstractmethod
    def _dense_shape(self) -> tuple[int, ...]:
        """Of the weight."""

    @abstractmethod
    def _dense(self, tensors: Sequence[Tensor]) -> Tensor:
        """The weight, contiguous, from cores and then gates."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        elif not is_weight_of(value, [*self.tt.cores, *self.tt.rank_params]):  # tied already
            raise WeightError(
                f"expected the weight of a {type(self).__name__} to stay the tensor train {self.tt.spec}, got a "
                f"{type(value).__name__} to put in its place: tie layers before tensorize_, or make them dense first "
                "with comera.materialize_(model)"
            )

    def __prepare_scriptable__(self) -> Any:
        raise WeightError(
            f"torch.jit.script reads the source of forward, which a {type(self).__name__} does not have in its "
            "language: use torch.jit.trace, or make the layers dense first with comera.materialize_(model)"
        )

    def _add_bias(self, bias: bool | nn.Parameter, features: int) -> None:
        """Register a bias (features,): True gives zeros, a Parameter is kept as the same object."""
        if bias is True:
            like = self.tt.cores[0]
            bias = nn.Parameter(torch.zeros(features, dtype=like.dtype, device=like.device))
        if isinstance(bias, nn.Parameter) and bias.shape != (features,):
            raise SpecError(f"expected a bias of shape ({features},) for {self.tt.spec}, got {tuple(bias.shape)}")
        self.register_parameter("bias", bias if isinstance(bias, nn.Parameter) else None)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new cores and set the bias to zeros, as after `to_empty` on a model built on the meta device."""
        self.tt.reset_parameters()
        bias = self._parameters.get("bias")
        if bias is not None:
            bias.zero_()


def named_trains(model: nn.Module) -> Iterator[tuple[str, TensorTrain]]:
    """Every TensorTrain of a model once, with its qualified name (for tied layers, the first one)."""
    for name, module in model.named_modules():
        if isinstance(module, TensorTrain):
            yield name, module
