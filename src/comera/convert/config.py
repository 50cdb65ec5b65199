"""What `tensorize_` makes of a model: formats for its layers, by kind and by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, Self

from comera.errors import ConversionError, SpecError, check_fields, is_integer
from comera.tt.shapes import btt_spec, tt_spec, ttm_spec
from comera.tt.spec import BTTSpec, TTMSpec, TTSpec, check_activation


@dataclass(frozen=True)
class TT:
    """Tensor-train format for linear layers and convolutions (docs/method.md §1; [CoMERA] eq. 3).

    Args:
        order: number of cores. If both lists of modes are given, they determine it.
        rank: one integer, clipped at each inner rank to what the modes allow; or all order+1 ranks, with ones at both
            ends. None leaves it to the `ratio` of `tensorize_`.
        in_modes, out_modes: factors of in_features and out_features (a product above them is padding). By default,
            chosen for each layer. The input features of a convolution are the channels (of a group) × kernel positions.
        activation: "silu", "gelu", "gelu_tanh" or "relu" between the input cores and the output cores: layers compute
            y = act(x A) B instead of a product with a weight (CoLA). That is another architecture, to be trained from
            scratch: it has no dense weight to come from or go back to, and ranks fall by `prune_` alone.

    Raises:
        SpecError: values that fit no layer.

    Example:
        >>> import comera
        >>> print(comera.TT(order=6, rank=30).spec(768, 3072))
        TT 12·8·8 / 12·16·16 ranks 12-30-30-30-16
        >>> print(comera.TT(rank=10, in_modes=(16, 48), out_modes=(64, 48)).spec(768, 3072))
        TT 16·48 / 64·48 ranks 10-10-10
        >>> print(comera.TT(order=2, rank=192, activation="silu").spec(768, 3072))
        TT 768 / 3072 ranks 192 silu
    """

    order: int = 6
    rank: int | tuple[int, ...] | None = None
    in_modes: tuple[int, ...] | None = None
    out_modes: tuple[int, ...] | None = None
    activation: str | None = None

    def __post_init__(self) -> None:
        _check_format(self, "in_modes", "out_modes", least_order=2)
        check_activation("TT", self.activation)

    def spec(self, in_features: int, out_features: int, kernel_size: tuple[int, ...] = ()) -> TTSpec:
        """Modes and ranks for a layer of these sizes. Raises SpecError if they do not fit.

        kernel_size: of a convolution, whose input features are channels (of a group) × kernel positions.
        """
        modes = {"in_modes": self.in_modes, "out_modes": self.out_modes}
        order = sum(map(len, modes.values())) if all(modes.values()) else self.order  # type: ignore[arg-type]
        spec = tt_spec(in_features, out_features, order=order, rank=_chosen(self), **modes, kernel_size=kernel_size)
        return replace(spec, activation=self.activation)


@dataclass(frozen=True)
class BTT:
    """Block-tensor-train format for linear layers (docs/method.md §1; Qiu et al. 2024).

    No parameter is shared between blocks of the weight. At equal parameters and cost it learns more per step than TT;
    TT goes to much smaller sizes.

    Args:
        rank: of every block, one integer, clipped to what the blocks allow. None leaves it to the `ratio` of
            `tensorize_`.
        blocks: number of input and of output blocks. By default, about the square roots of the features; (4, 4) with a
            higher rank learned more inside a language model, less in its output head (docs/log.md).

    Raises:
        SpecError: values that fit no layer.

    Example:
        >>> import comera
        >>> print(comera.BTT(rank=2).spec(768, 3072))
        BTT 24·32 / 64·48 rank 2
    """

    rank: int | None = None
    blocks: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and not is_integer(self.rank, 1):
            raise SpecError(f"BTT needs rank to be an integer >= 1 or None, got {self.rank!r}")
        if self.blocks is not None:
            good = isinstance(self.blocks, list | tuple) and len(self.blocks) == 2
            if not good or not all(is_integer(count, 1) for count in self.blocks):
                raise SpecError(f"BTT needs blocks to be two integers >= 1 or None, got {self.blocks!r}")
            object.__setattr__(self, "blocks", tuple(self.blocks))

    def spec(self, in_features: int, out_features: int, experts: int = 1) -> BTTSpec:
        """Blocks and ranks for a layer of these sizes. Raises SpecError if they do not fit.

        experts: how many such matrices, each of which gets all of these blocks.
        """
        return btt_spec(in_features, out_features, rank=_chosen(self), blocks=self.blocks, experts=experts)


@dataclass(frozen=True)
class TTM:
    """Tensor-train-matrix format for embedding tables (docs/method.md §1; [CoMERA] eq. 4).

    Args:
        order: number of cores. A list of modes, if given, determines it. By default 4; a table to which an output layer
            is tied becomes one of plain low rank, if a `ratio` leaves each row enough parameters for that.
        rank: one integer, clipped at each inner rank to what the modes allow; or all order+1 ranks, with ones at both
            ends. None leaves it to the `ratio` of `tensorize_`.
        row_modes, col_modes: factors of num_embeddings and embedding_dim (a product above them is padding); one of
            each may be -1, for what the others leave. By default, chosen for each table. (-1, 1) and (1, -1) are a
            table of plain low rank, E = U V, in which every row has parameters of its own: see `low_rank`.

    Raises:
        SpecError: values that fit no table.

    Example:
        >>> import comera
        >>> print(comera.TTM(order=4, rank=32).spec(30522, 768))
        TTM 14·12·13·14 × 8·4·4·6 ranks 32-32-32
        >>> print(comera.TTM.low_rank(64).spec(30522, 768))
        TTM 30522·1 × 1·768 ranks 64
    """

    order: int | None = None
    rank: int | tuple[int, ...] | None = None
    row_modes: tuple[int, ...] | None = None
    col_modes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_format(self, "row_modes", "col_modes", least_order=1)

    @classmethod
    def low_rank(cls, rank: int | tuple[int, ...] | None = None) -> Self:
        """Plain low rank, E = U V, as ALBERT's factorized embedding: each row has parameters of its own.

        A head that is tied to such a table costs rank / columns of a dense one; a TT-matrix of more cores goes to much
        smaller sizes.

        Args:
            rank: parameters of each row, clipped to the columns, or (1, rank, 1); None leaves it to the `ratio` of
                `tensorize_`.

        Returns:
            The format, with all rows in the first core and all columns in the second.

        Example:
            >>> import comera
            >>> comera.TTM.low_rank(64).spec(30522, 768).core_shapes
            ((1, 30522, 1, 64), (64, 1, 768, 1))

        Source: docs/method.md §1; Lan et al. 2020, arXiv:1909.11942.
        """
        return cls(order=2, rank=rank, row_modes=(-1, 1), col_modes=(1, -1))

    def spec(self, num_embeddings: int, embedding_dim: int) -> TTMSpec:
        """Modes and ranks for a table of these sizes. Raises SpecError if they do not fit."""
        rows, cols = _whole(self.row_modes, num_embeddings), _whole(self.col_modes, embedding_dim)
        modes = rows or cols
        order = len(modes) if modes else self.order or _TABLE_ORDER
        rank = 1 if order == 1 else _chosen(self)  # a single core has no inner rank
        return ttm_spec(num_embeddings, embedding_dim, order=order, rank=rank, row_modes=rows, col_modes=cols)


def _whole(modes: tuple[int, ...] | None, features: int) -> tuple[int, ...] | None:
    """The modes with what the others leave of the features in place of -1."""
    if modes is None:
        return None
    rest = -(-features // prod(mode for mode in modes if mode != -1))
    return tuple(rest if mode == -1 else mode for mode in modes)


def _chosen(format_: TT | TTM | BTT) -> Any:
    """Its rank; raises SpecError if it has none."""
    if format_.rank is None:
        kind = type(format_).__name__
        raise SpecError(
            f"{kind}() has no rank: give it one, as in {kind}(rank={_EXAMPLES[kind]}), or give tensorize_ a ratio "
            "instead of all ranks; None in place of the format leaves such layers dense"
        )
    return format_.rank


_TABLE_ORDER = 4
_EXAMPLES = {"TT": 30, "TTM": 32, "BTT": 2}


def _check_format(format_: TT | TTM, left: str, right: str, least_order: int) -> None:
    """Validate the fields that both formats have, and convert lists to tuples."""
    kind, rest = type(format_).__name__, isinstance(format_, TTM)
    if not (is_integer(format_.order, least_order) or (rest and format_.order is None)):
        raise SpecError(f"{kind} needs an order of at least {least_order} (cores), got {format_.order!r}")
    for name in ("rank", left, right):
        value = getattr(format_, name)
        if isinstance(value, list | tuple):
            value = tuple(value)
            object.__setattr__(format_, name, value)
        if name == "rank":
            good, allowed = is_integer(value, 1) or _are_integers(value, 1), "an integer >= 1, a tuple of them"
        else:
            good, allowed = _are_integers(value, 1, rest), "a tuple of positive integers"
            allowed += ", one of which may be -1," if rest else ""
        if not (good or value is None):
            raise SpecError(f"{kind} needs {name} to be {allowed} or None, got {value!r}")


def _are_integers(values: object, least: int, rest: bool = False) -> bool:
    """Whether it is a tuple of integers of at least `least`; with `rest`, one may be -1."""
    if not isinstance(values, tuple) or not values:
        return False
    given = [value for value in values if value != -1] if rest and values.count(-1) == 1 else values
    return all(is_integer(value, least) for value in given)


@dataclass(frozen=True)
class TensorizeConfig:
    """What `tensorize_` makes of a model.

    Args:
        linear, embedding: format of linear layers and of embedding tables; None leaves them dense. Linear layers are
            block tensor trains by default, which learn most for what they cost; `TT` goes to much smaller sizes.
        conv: format of 1-, 2- and 3-dimensional convolutions. By default all of them stay dense, whatever the overrides
            say.
        experts: format of the matrices of experts that a module holds as one parameter, (experts, out, in). `BTT` makes
            one block tensor train for each expert, `TT` one train in which the expert is a mode more. By default they
            stay dense, too.
        overrides: glob pattern on qualified module names ("encoder.*.query", "lm_head") -> a format, or None to leave
            the layer dense. If several match, the last one wins, so put general patterns first.
        tied: what happens to layers that share one weight. "share": they share one tensor train (if an embedding is
            among them, its TTM, also where other linear layers stay dense); "untie": each gets its own.
        init: "random" cores, or "decompose" the present weight (TT-SVD; an SVD of each block).
        init_std: standard deviation of the materialized random weight. None takes that of the weight it replaces, or
            that of the layer's own initialization if the weight has none (meta device, constant).
        min_ratio: a layer stays dense unless dense parameters / stored parameters exceeds it.
        threshold: gates at or below it are pruned (τ, docs/method.md §2).

    Raises:
        ConversionError: values of another kind or out of range.

    Example:
        >>> import comera
        >>> config = comera.TensorizeConfig(
        ...     linear=comera.TT(order=6, rank=30),
        ...     embedding=comera.TTM(order=4, rank=32),
        ...     overrides={"encoder.*": comera.TT(rank=16), "encoder.0.*": None},
        ... )
        >>> config.overrides["encoder.*"].rank
        16
    """

    linear: TT | BTT | None = field(default_factory=BTT)
    embedding: TTM | None = field(default_factory=TTM)
    conv: TT | None = field(default=None, kw_only=True)
    experts: TT | BTT | None = field(default=None, kw_only=True)
    overrides: Mapping[str, TT | TTM | BTT | None] = field(default_factory=dict, hash=False)
    tied: Literal["share", "untie"] = "share"
    init: Literal["random", "decompose"] = "random"
    init_std: float | None = None
    min_ratio: float = 1.0
    threshold: float = 1e-2

    def __post_init__(self) -> None:
        entries = self.overrides.items() if isinstance(self.overrides, Mapping) else [(None, None)]
        good = all(isinstance(key, str) and isinstance(value, TT | TTM | BTT | None) for key, value in entries)
        checks = {
            "linear": (isinstance(self.linear, TT | BTT | None), "a TT, a BTT or None"),
            "embedding": (isinstance(self.embedding, TTM | None), "a TTM or None"),
            "conv": (isinstance(self.conv, TT | None), "a TT or None"),
            "experts": (isinstance(self.experts, TT | BTT | None), "a TT, a BTT or None"),
            "overrides": (good, "a mapping from name patterns to TT, BTT, TTM or None"),
            "tied": (self.tied in ("share", "untie"), "'share' or 'untie'"),
            "init": (self.init in ("random", "decompose"), "'random' or 'decompose'"),
            "init_std": (self.init_std is None or 0 < self.init_std < float("inf"), "a number > 0 or None"),
            "min_ratio": (0 <= self.min_ratio < float("inf"), "a number >= 0"),
            "threshold": (0 <= self.threshold < 1, "in [0, 1): rank parameters start at 1"),
        }
        check_fields(self, "", checks, ConversionError)
        object.__setattr__(self, "overrides", dict(self.overrides))

    @property
    def formats(self) -> dict[str, TT | TTM | BTT | None]:
        """Every format in it, by the name of its field or its pattern."""
        kinds = {"linear": self.linear, "embedding": self.embedding, "conv": self.conv, "experts": self.experts}
        return {**kinds, **self.overrides}
