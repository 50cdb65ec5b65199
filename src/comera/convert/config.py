"""What to make of a model: formats for its layers, by kind and by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from comera.errors import ConversionError, SpecError
from comera.tt.shapes import tt_spec, ttm_spec
from comera.tt.spec import TTMSpec, TTSpec


@dataclass(frozen=True)
class TT:
    """A tensor train for linear layers.

    order: number of cores; where both lists of modes are given, they tell it.
    rank: one integer, clipped bond by bond to what the modes allow, or all ranks with the ones at both ends.
    in_modes, out_modes: factored dimensions; chosen for each layer if left out.
    Raises SpecError for values that no layer could have.
    """

    order: int = 6
    rank: int | tuple[int, ...] = 30
    in_modes: tuple[int, ...] | None = None
    out_modes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_chain(self, "in_modes", "out_modes", least_order=2)

    def spec(self, in_features: int, out_features: int) -> TTSpec:
        """Modes and ranks for a layer of these sizes. Raises SpecError when they do not fit."""
        modes = (self.in_modes, self.out_modes)
        order = self.order if None in modes else sum(len(m) for m in modes if m)
        return tt_spec(in_features, out_features, order=order, rank=self.rank, in_modes=modes[0], out_modes=modes[1])


@dataclass(frozen=True)
class TTM:
    """A tensor-train matrix for embedding tables.

    order: number of cores; a list of modes, where given, tells it.
    rank: one integer, clipped bond by bond to what the modes allow, or all ranks with the ones at both ends.
    row_modes, col_modes: factored dimensions; chosen for each table if left out.
    Raises SpecError for values that no table could have.
    """

    order: int = 4
    rank: int | tuple[int, ...] = 32
    row_modes: tuple[int, ...] | None = None
    col_modes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_chain(self, "row_modes", "col_modes", least_order=1)

    def spec(self, num_embeddings: int, embedding_dim: int) -> TTMSpec:
        """Modes and ranks for a table of these sizes. Raises SpecError when they do not fit."""
        modes = self.row_modes or self.col_modes
        order = len(modes) if modes else self.order
        return ttm_spec(
            num_embeddings,
            embedding_dim,
            order=order,
            rank=self.rank,
            row_modes=self.row_modes,
            col_modes=self.col_modes,
        )


def _check_chain(chain: TT | TTM, left: str, right: str, least_order: int) -> None:
    """Validate and make tuples of what both formats have."""

    def whole(value: object, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    kind = type(chain).__name__
    if not whole(chain.order, least_order):
        raise SpecError(f"{kind} needs an order of at least {least_order} (cores), got {chain.order!r}")
    for name in ("rank", left, right):
        value = getattr(chain, name)
        if isinstance(value, list | tuple):
            value = tuple(value)
            object.__setattr__(chain, name, value)
        single = value is None if name != "rank" else whole(value, 0)
        if not single and not (isinstance(value, tuple) and value and all(whole(v, name != "rank") for v in value)):
            allowed = "an integer >= 0 or a tuple of them" if name == "rank" else "a tuple of positive integers or None"
            raise SpecError(f"{kind} needs {name} to be {allowed}, got {value!r}")


@dataclass(frozen=True)
class TensorizeConfig:
    """What `tensorize_` makes of a model.

    linear, embedding: format of linear layers and of embedding tables; None leaves them dense.
    overrides: glob pattern on qualified module names ("encoder.*.query", "lm_head") -> a format, or None to leave
        dense. Where several match, the last one written wins: write the general ones first.
    tied: what becomes of layers that hold one and the same weight. "share": one chain for all of them, with an
        embedding and an output head both on the embedding's TTM; "untie": a chain each.
    init: "random" cores, or "decompose" the weight that is there (TT-SVD).
    init_std: standard deviation of the materialised random weight; None takes that of the weight which is replaced,
        or of its layer's own initialisation where the weight has none (meta device, constant).
    min_ratio: a layer is left dense unless dense numbers / stored numbers is above it.
    threshold: rank parameters at or below it are inactive (τ, METHOD §2).
    Raises ConversionError for values of another kind or out of range.
    """

    linear: TT | None = field(default_factory=TT)
    embedding: TTM | None = field(default_factory=TTM)
    overrides: Mapping[str, TT | TTM | None] = field(default_factory=dict, hash=False)
    tied: Literal["share", "untie"] = "share"
    init: Literal["random", "decompose"] = "random"
    init_std: float | None = None
    min_ratio: float = 1.0
    threshold: float = 1e-2

    def __post_init__(self) -> None:
        def require(good: bool, name: str, expected: str) -> None:
            if not good:
                raise ConversionError(f"{name} must be {expected}, got {getattr(self, name)!r}")

        require(isinstance(self.linear, TT | None), "linear", "a TT or None")
        require(isinstance(self.embedding, TTM | None), "embedding", "a TTM or None")
        entries = self.overrides.items() if isinstance(self.overrides, Mapping) else [(None, None)]
        good = all(isinstance(key, str) and isinstance(value, TT | TTM | None) for key, value in entries)
        require(good, "overrides", "a mapping from name patterns to TT, TTM or None")
        object.__setattr__(self, "overrides", dict(self.overrides))
        require(self.tied in ("share", "untie"), "tied", "'share' or 'untie'")
        require(self.init in ("random", "decompose"), "init", "'random' or 'decompose'")
        require(self.init_std is None or 0 < self.init_std < float("inf"), "init_std", "a number > 0 or None")
        require(0 <= self.min_ratio < float("inf"), "min_ratio", "a number >= 0")
        require(0 <= self.threshold < 1, "threshold", "in [0, 1): rank parameters start at 1")
