"""Parameters that modules hold themselves and read by name, as tensor trains: the matrices of experts and the like.

Such a module has no layer to put in the place of a weight, and its forward is its own. It stays the same object with
its other parameters; only its class changes, to one made for it, in which the name of the parameter is a property that
gives the dense weight (weight.py). The tensor trains are in `compressed`, an `nn.ModuleDict` by name::

    experts.gate_up_proj                   parameter (E, 2I, H)   ->   property, made when its values are used
    experts.compressed.gate_up_proj.tt     its tensor train, a module like those of layers

One expert of a stack, `self.gate_up_proj[e]`, is made alone. What a forward makes it gives back at its end, and the
backward makes it again: so at any time one module's weights are dense, not those of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import local
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comera.errors import SpecError, WeightError
from comera.kernels.tracing import traced
from comera.nn.tensor_train import CompressedLayer, TensorTrain
from comera.nn.weight import Make, is_weight_of, marks_of, released
from comera.tt.experts import check_stack, expert_matrix
from comera.tt.format import check_linear
from comera.tt.spec import BTTSpec, Spec, TTSpec

HELD = "compressed"
"""Name of the ModuleDict with a module's compressed parameters."""


@dataclass(frozen=True)
class Layout:
    """How a parameter holds matrices.

    shape: of the parameter, which `experts` × (out_features, in_features) reshapes to, or with in_first
    `experts` × (in_features, out_features).

    Example:
        >>> import torch
        >>> from comera.nn.packed import Layout
        >>> layout = Layout((8, 96, 64), in_features=64, out_features=96, experts=8)
        >>> stack_IEO = layout.stack(torch.randn(8, 96, 64))
        >>> stack_IEO.shape, layout.parameter(stack_IEO).shape
        (torch.Size([64, 8, 96]), torch.Size([8, 96, 64]))
    """

    shape: tuple[int, ...]
    in_features: int
    out_features: int
    experts: int = 1
    in_first: bool = False

    def stack(self, parameter: Tensor) -> Tensor:
        """(in_features, experts, out_features), whose elements are in the order of a spec's weight."""
        sizes = (self.in_features, self.out_features) if self.in_first else (self.out_features, self.in_features)
        matrices = parameter.reshape(self.experts, *sizes)
        return matrices.permute(1, 0, 2) if self.in_first else matrices.permute(2, 0, 1)

    def parameter(self, weight: Tensor) -> Tensor:
        """The parameter, contiguous, from a weight in the order of `stack`."""
        stack_IEO = weight.reshape(self.in_features, self.experts, self.out_features)
        matrices = stack_IEO.permute(1, 0, 2) if self.in_first else stack_IEO.permute(1, 2, 0)
        return matrices.reshape(self.shape).contiguous()

    def matrix(self, weight: Tensor) -> Tensor:
        """One matrix as the parameter holds it, contiguous, from (in_features, out_features)."""
        return (weight if self.in_first else weight.t()).contiguous()

    def check(self, spec: Spec) -> None:
        """Raise SpecError unless a tensor train of this spec can hold the parameter."""
        if not isinstance(spec, TTSpec | BTTSpec):
            raise SpecError(f"a parameter of matrices needs a TTSpec or a BTTSpec, got {spec}")
        check_linear(spec, "dense weight, which the module reads")
        check_stack(spec, self.experts, self.in_features, self.out_features)

    def fits(self, spec: Spec) -> bool:
        """Whether a tensor train of this spec can hold the parameter."""
        try:
            self.check(spec)
        except SpecError:
            return False
        return True


class CompressedParameter(CompressedLayer):
    """A parameter of a module that is a tensor train; the module reads `weight` under the parameter's name.

    tt: of a spec that fits the layout. It is no layer: it has no forward.

    Example:
        >>> import torch, comera
        >>> attention = torch.nn.MultiheadAttention(64, 4)
        >>> _ = comera.tensorize_(attention, comera.TensorizeConfig(comera.BTT(rank=1)))
        >>> part = attention.compressed.in_proj_weight
        >>> type(part).__name__, part.layout.shape, attention.in_proj_weight.shape
        ('CompressedParameter', (192, 64), torch.Size([192, 64]))
        >>> torch.equal(part.weight, attention.in_proj_weight)
        True
    """

    def __init__(self, tt: TensorTrain, layout: Layout) -> None:
        super().__init__()
        layout.check(tt.spec)
        self.tt, self.layout = tt, layout

    @property
    def spec(self) -> TTSpec | BTTSpec:
        """Modes and ranks of the stack."""
        assert isinstance(self.tt.spec, TTSpec | BTTSpec)
        return self.tt.spec

    @property
    def _dense_shape(self) -> tuple[int, ...]:
        return self.layout.shape

    def _dense(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.layout.parameter(self.tt.dense(tensors))

    @property
    def _make(self) -> Make:
        return _Stack(self) if len(self.layout.shape) == 3 and self.layout.experts > 1 else self._dense

    def _one(self, index: int | Tensor, tensors: Sequence[Tensor]) -> Tensor:
        experts = self.layout.experts

        def product(spec: Spec, cores: Sequence[Tensor]) -> Tensor:
            assert isinstance(spec, TTSpec | BTTSpec)
            return expert_matrix(spec, cores, experts, index)

        return self.layout.matrix(self.tt.dense(tensors, product))

    def extra_repr(self) -> str:
        return f"{'×'.join(map(str, self.layout.shape))}"


class _Stack:
    """Makes the matrices of all experts, or that of one."""

    def __init__(self, held: CompressedParameter) -> None:
        self.held = held

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.held._dense(tensors)

    def at(self, index: int | Tensor) -> Make:
        experts = self.held.layout.experts
        if isinstance(index, int) and not -experts <= index < experts:
            raise IndexError(f"index {index} is out of bounds for {experts} experts")
        return partial(self.held._one, index)


class Holder(nn.Module):
    """A module of which some parameters are tensor trains.

    plain_type: its type without them.
    """

    plain_type: ClassVar[type[nn.Module]]
    leaves: ClassVar[tuple[str, ...]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the plain type."""
        if traced():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with released():
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.leaves:
            super().__setattr__(name, value)
            return
        held = self._modules[HELD][name]  # type: ignore[index]
        if not is_weight_of(value, [*held.tt.cores, *held.tt.rank_params]):
            raise WeightError(
                f"expected {name} of a {type(self).__name__} to stay the tensor train {held.spec}, got a "
                f"{type(value).__name__} to put in its place: make it dense first with comera.materialize_(model)"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(2)  # its class is made, so it has no name to be found by
        return _blank, (self.plain_type, self.leaves), *reduced[2:]


class _Running(local):
    """What belongs to a forward, of which several threads may run one each: a recurrent layer and its weights."""

    made: tuple[nn.Module | None, list[Tensor]] = None, []


_running = _Running()


class RecurrentHolder(Holder):
    """A recurrent layer of torch, which hands all of its weights to one kernel: that gets plain tensors, made once in
    each forward, and no Python between the steps of a sequence."""

    _flat_weights_names: list[str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the plain type."""
        outer, _running.made = _running.made, (self, [self._plain(name) for name in self._flat_weights_names])
        try:
            return super().forward(*args, **kwargs)
        finally:
            _running.made = outer

    def _plain(self, name: str) -> Tensor:
        if name not in self.leaves:
            own: Tensor = getattr(self, name)
            return own
        held = self.get_submodule(HELD).get_submodule(name)
        assert isinstance(held, CompressedParameter)
        cores, gates = held.tt.tensors
        return held._dense([*cores, *gates])

    @property
    def _flat_weights(self) -> list[Tensor]:
        of, made = _running.made
        return made if of is self else [getattr(self, name) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, value: object) -> None:
        """torch keeps its list of parameters here, which would be stale."""

    def _init_flat_weights(self) -> None:
        self._flat_weight_refs: list[object] = []

    def _update_flat_weights(self) -> None:
        """There is no list to keep up to date."""

    def flatten_parameters(self) -> None:
        """Dense weights are made in each forward: there are none to lay out."""


def _reader(leaf: str) -> property:
    def read(self: nn.Module) -> Tensor:
        held = self._modules[HELD][leaf]  # type: ignore[index]
        weight: Tensor = held.weight
        return weight

    return property(read)


_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[Holder]] = {}


def _class_of(plain: type[nn.Module], leaves: tuple[str, ...]) -> type[Holder]:
    """The subclass of a type that reads these parameters from tensor trains, made once. It has the name of the type,
    by which libraries know their modules."""
    if (plain, leaves) not in _CLASSES:
        base: type[Holder] = Holder
        own: dict[str, Any] = {"plain_type": plain, "leaves": leaves}
        own |= {"__module__": plain.__module__, "__doc__": plain.__doc__}
        if issubclass(plain, nn.RNNBase):
            base = RecurrentHolder
            own["forward"] = torch.compiler.disable(base.forward)  # as the compiler leaves torch's own; slow to import
        made: Any = type(plain.__name__, (base, plain), own | {leaf: _reader(leaf) for leaf in leaves})
        _CLASSES[plain, leaves] = made
    return _CLASSES[plain, leaves]


def _blank(plain: type[nn.Module], leaves: tuple[str, ...]) -> Holder:
    """A module to be filled, for copies and pickles."""
    kind = _class_of(plain, leaves)
    return kind.__new__(kind)


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The type of a module, without what compressed parameters add to it."""
    return module.plain_type if isinstance(module, Holder) else type(module)


def hold_(module: nn.Module, leaf: str, tt: TensorTrain, layout: Layout) -> None:
    """Let a tensor train take the place of one of a module's parameters."""
    held = CompressedParameter(tt, layout)
    held.dense_type = plain_type(module)
    if not isinstance(module, Holder):
        module.add_module(HELD, nn.ModuleDict())
        module._modules[HELD].dense_order = tuple(module._parameters)  # type: ignore[union-attr, assignment]
    parts: Any = module._modules[HELD]
    parts[leaf] = held.train(module.training)
    del module._parameters[leaf]
    module.__class__ = _class_of(plain_type(module), tuple(parts))
    if isinstance(module, RecurrentHolder):
        vars(module).pop("_flat_weights", None)  # the dense parameter is in it
        module._init_flat_weights()


def give_back_(module: Holder) -> int:
    """Make a module's compressed parameters dense again: it is what it was before. Returns how many there were."""
    parts: Any = module._modules[HELD]
    dense = {leaf: held.weight.detach().clone(memory_format=torch.contiguous_format) for leaf, held in parts.items()}
    trained = {leaf: any(p.requires_grad for p in held.tt.parameters()) for leaf, held in parts.items()}
    marks = {leaf: marks_of(held.tt.cores[0]) for leaf, held in parts.items()}
    module.__class__ = module.plain_type  # type: ignore[assignment]
    del module._modules[HELD]
    for leaf, value in dense.items():
        module.register_parameter(leaf, nn.Parameter(value, requires_grad=trained[leaf]))
        vars(module._parameters[leaf]).update(marks[leaf])
    own = module._parameters  # in the order that they had: optimizers count them
    own |= {leaf: own.pop(leaf) for leaf in parts.dense_order if leaf in own}
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    return len(dense)
