"""Configurations of recipes: what all of them have, those that run in stages, and the formats of compressed layers."""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from torch import nn

from comera.baselines import METHODS, Method, check_method
from comera.convert import BTT, TT, TTM, NGrams, ngrams_
from comera.errors import ConfigError, check_fields
from comera.files import typed_path

Format = Literal["tt", "btt", "dense"]


@dataclass(frozen=True)
class RecipeConfig:
    """A recipe's configuration: the fields of its subclass are the command-line options, and the text under each one
    its help. It has the field `train`, too. recipe, methods, presets: the recipe's name and what it offers."""

    method: Method = "comera"
    preset: str = ""
    out: str | None = None
    """Folder of the runs; default: runs/RECIPE-METHOD."""

    recipe = ""
    methods = METHODS
    presets = tuple[str, ...]()

    def __post_init__(self) -> None:
        check_method(self.method, self.methods)
        check_fields(self, "", {"preset": (self.preset in self.presets, f"one of {', '.join(self.presets)}")})

    @property
    def name(self) -> str:
        """The name under which its runs are known."""
        return self.recipe

    @property
    def folder(self) -> Path:
        """The folder of all runs."""
        return typed_path(f"runs/{self.name}-{self.method}" if self.out is None else self.out, "out")


@dataclass(frozen=True)
class StagedConfig(RecipeConfig):
    """Of a recipe that runs in stages. `train`: settings of the early stage."""

    late_targets: tuple[float, ...] = ()
    """Target sizes, as fractions of the size after the early stage; each gets its own late stage."""
    late_epochs: float = 1.0
    """Passes over the training data in each late stage (train.epochs sets those of the early stage). The size shrinks
    during the first half of them, unless train.late.steps is set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        targets = tuple(self.late_targets)  # YAML has only lists
        object.__setattr__(self, "late_targets", targets)
        for target in targets:
            if isinstance(target, bool) or not 0 < target < 1:
                raise ConfigError(f"late_targets must be fractions of the early size, > 0 and < 1, got {target!r}")
        if len({f"{target:g}" for target in targets}) < len(targets):
            raise ConfigError(f"late_targets must differ, since each names a folder, got {targets}")
        check_fields(self, "", {"late_epochs": (0 < self.late_epochs < inf, "a number > 0")})
        late = vars(self)["train"].late
        if late.target_size is not None or late.starts:
            raise ConfigError(
                "train.late must have no target_size and no start here: set late_targets and train.epochs"
            )


@dataclass(frozen=True)
class Formats:
    """Formats of the compressed layers; only the method comera uses them."""

    format: Format | None = None
    """Format of linear layers: tt, a tensor train, as published, which goes to the smallest sizes; btt, a block tensor
    train, which learns most for what it costs; dense leaves them as they are, for models so narrow that the vocabulary
    is most of them."""
    order: int | None = None
    """Cores in the tensor train of a linear layer; tt only."""
    rank: int | tuple[int, ...] | None = None
    """Initial rank of linear layers: one value, clipped where the modes or blocks allow less, or for tt all order + 1,
    ones at both ends."""
    blocks: tuple[int, int] | None = None
    """Input and output blocks of linear layers; btt only. None: about the square roots of the features."""
    embedding: Literal["ttm", "low_rank", "dense"] = "ttm"
    """Format of the token embedding: ttm, a TT-matrix, as published, or low_rank, a product of two matrices in which
    every token has `embedding_rank` parameters of its own; it learns more, and is larger."""
    embedding_order: int | None = None
    """Cores in the TT-matrix of the token embedding; ttm only."""
    embedding_rank: int | tuple[int, ...] | None = None
    """Initial rank of the token embedding."""
    ngrams: int | None = None
    """The longest n-gram of a table beside the token embedding, which makes a row for every n-gram from products of
    small tables; None: no such table."""
    ngram_rank: int | None = None
    """Initial rank of the n-gram table: columns of its tables. Default: 160."""
    ngram_heads: int | None = None
    """Heads of an n-gram table that is a tensor train, of ngram_rank features in all; None: one of products of columns
    (CP), which learns more."""

    embeddings = tuple[str, ...](("ttm", "low_rank"))

    def __post_init__(self) -> None:
        for name, known in (("format", ("tt", "btt", "dense")), ("embedding", self.embeddings)):
            words = f"{', '.join(known[:-1])} or {known[-1]}"
            check_fields(self, "compress.", {name: (getattr(self, name) in (None, *known), words)})
        self._ngrams()

    def linear(self, rank: Any, blocks: tuple[int, int] | None = None) -> TT | BTT | None:
        """The format of linear layers; None for dense ones. rank: one, or for tt several."""
        if self.format == "dense":
            return None
        order: Any = self.order
        return TT(order=order, rank=rank) if self.format == "tt" else BTT(rank=rank, blocks=blocks)

    def table(self) -> TTM | None:
        """The format of the token embedding; None for a dense one."""
        if self.embedding == "low_rank":
            return TTM.low_rank(self.embedding_rank)
        return TTM(order=self.embedding_order, rank=self.embedding_rank) if self.embedding == "ttm" else None

    def add_ngrams_(self, model: nn.Module) -> None:
        """Put the n-gram table beside the token embedding, if there is to be one."""
        ngrams = self._ngrams()
        if ngrams is not None:
            ngrams_(model, ngrams)

    def _ngrams(self) -> NGrams | None:
        if self.ngrams is None:
            return None
        heads: dict[str, Any] = {} if self.ngram_heads is None else {"form": "tt", "heads": self.ngram_heads}
        return NGrams(order=self.ngrams, rank=160 if self.ngram_rank is None else self.ngram_rank, **heads)
