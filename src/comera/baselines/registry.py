"""The one list of methods: CoMERA, the dense baseline, and what a user would otherwise pick.

A new baseline needs a module with its settings (see `Baseline`), a name in `Method` and a field in `BaselineConfig`;
command line, recipes, estimates and reports follow."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from torch import nn

from comera.baselines.cola import CoLA
from comera.baselines.common import Baseline, Replaced
from comera.baselines.embedding_tables import TABLES
from comera.baselines.galore import GaLore
from comera.baselines.lte import LTE
from comera.baselines.narrow import Narrow
from comera.baselines.tensorly import Tensorly
from comera.baselines.tokens import HashedNGrams, NarrowConv, SummedTables
from comera.convert import TensorizeConfig, TensorizeReport, tensorize_
from comera.errors import ConfigError
from comera.trainer.config import TrainConfig

Method = Literal[
    "comera",
    "dense",
    "galore",
    "lte",
    "cola",
    "tensorly",
    "narrow",
    "hashed_ngrams",
    "summed_tables",
    "narrow_conv",
    "hashing",
    "quotient_remainder",
    "narrow_tables",
]
"""Name of a method, as `--method` takes it."""
METHODS: tuple[Method, ...] = get_args(Method)
"""All of them."""
TABLE_METHODS: tuple[Method, ...] = tuple(method for method in METHODS if method in TABLES)
"""Those that replace embedding tables, see `smaller_tables_`; the recipe dlrm alone has them."""
TOKEN_METHODS: tuple[Method, ...] = ("hashed_ngrams", "summed_tables", "narrow_conv")
"""Those that let a narrow dense model read more than one token at a position; the recipe lm alone has them."""
LINEAR_METHODS: tuple[Method, ...] = tuple(method for method in METHODS if method not in (*TABLES, *TOKEN_METHODS))
"""The others: they compress linear layers, or train the dense ones; CoMERA compresses tables, too."""
COMMON_METHODS: tuple[Method, ...] = tuple(method for method in LINEAR_METHODS if method != "narrow")
"""Those that any model with linear layers can have; narrow needs one that is built in any width, and what a step of it
costs."""
BASELINES: tuple[Method, ...] = (
    *(method for method in LINEAR_METHODS if method not in ("comera", "dense")),
    *TOKEN_METHODS,
)
"""Those that have settings of their own, in `BaselineConfig`."""

Conversion = TensorizeReport | Replaced | None
"""What a method returns of a model's conversion; None for dense."""


@dataclass(frozen=True)
class BaselineConfig:
    """Settings of the baselines; a run reads those of its own method alone.

    Example:
        >>> from comera.baselines import BaselineConfig, CoLA
        >>> settings = BaselineConfig(cola=CoLA(rank=16))
        >>> settings["cola"].rank, settings["lte"].heads
        (16, 32)
        >>> settings.identity("cola")
        {'baselines.cola.rank': 16}
    """

    galore: GaLore = field(default_factory=GaLore)
    """Dense weights; gradients are projected to low rank for the optimizer (galore-torch)."""
    lte: LTE = field(default_factory=LTE)
    """Parallel low-rank adapters, merged into the weights every few steps (arXiv:2402.16828)."""
    cola: CoLA = field(default_factory=CoLA)
    """Low-rank layers with an activation between the factors (arXiv:2502.10940)."""
    tensorly: Tensorly = field(default_factory=Tensorly)
    """Tensor-train layers of fixed rank (tensorly-torch)."""
    narrow: Narrow = field(default_factory=Narrow)
    """A dense model of fewer channels that costs as much as the compressed one; recipes lm and classify
    only."""
    hashed_ngrams: HashedNGrams = field(default_factory=HashedNGrams)
    """Narrow, and hashed tables of n-grams beside the token embedding (arXiv:2501.16975); recipe lm only."""
    summed_tables: SummedTables = field(default_factory=SummedTables)
    """Narrow, and the sum of a row for each id before, from a table of its position; recipe lm only."""
    narrow_conv: NarrowConv = field(default_factory=NarrowConv)
    """Narrow, and short causal convolutions before attention and MLP (arXiv:2109.08668); recipe lm only."""

    def __getitem__(self, method: str) -> Baseline:
        """The settings of a baseline."""
        settings: Baseline = getattr(self, method)
        return settings

    def identity(self, method: str) -> dict[str, Any]:
        """The settings that decide what a run of this method learns, by dotted name; empty for comera and dense."""
        settings = asdict(self).get(method, {})
        return {f"baselines.{method}.{name}": value for name, value in settings.items()}


def installed(method: Method) -> bool:
    """Whether everything that a method needs is installed; imports nothing.

    Example:
        >>> from comera.baselines import installed
        >>> installed("cola")  # it needs no package
        True
    """
    package = BaselineConfig()[method].package if method in BASELINES else None
    return package is None or package.installed


def check_method(method: str, known: Sequence[Method] = COMMON_METHODS) -> None:
    """Raise ConfigError for an unknown method, one that is not among `known`, those of the recipe, or one whose package
    is not installed; imports nothing.

    Example:
        >>> from comera.baselines import check_method
        >>> check_method("cola")
        >>> check_method("sparse")
        Traceback (most recent call last):
        comera.errors.ConfigError: method must be one of comera, dense, ..., narrow_tables, got 'sparse'
    """
    if method not in METHODS:
        raise ConfigError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if method not in known:
        raise ConfigError(
            f"method {method} needs a recipe that offers it, this one has {', '.join(known)}: take one of these, or "
            f"the recipe {'dlrm' if method in TABLE_METHODS else 'lm'}, which has it"
        )
    if method in BASELINES and (package := BaselineConfig()[method].package):
        package.check()


def has_own_layers(method: str) -> bool:
    """Whether a method's model has layers that are neither dense nor CoMERA's.

    Example:
        >>> from comera.baselines import METHODS, has_own_layers
        >>> [method for method in METHODS if has_own_layers(method)]
        ['lte', 'cola', 'tensorly', 'hashed_ngrams', 'summed_tables', 'narrow_conv', 'hashing', ...]
    """
    return method in TABLE_METHODS or (method in BASELINES and not BaselineConfig()[method].dense_layers)


def apply_method_(
    model: nn.Module, method: Method, formats: TensorizeConfig, baselines: BaselineConfig, skip: Sequence[str] = ()
) -> Conversion:
    """Convert a dense model in place, as the method does. formats: of the compressed layers, for comera. baselines,
    skip: settings of the baselines, and glob patterns of layers that they leave dense. Raises ConfigError for a method
    that replaces embedding tables: `smaller_tables_` does.

    Example:
        >>> import torch, comera
        >>> from comera.baselines import BaselineConfig, CoLA, apply_method_
        >>> formats, settings = comera.TensorizeConfig(comera.BTT(rank=1)), BaselineConfig(cola=CoLA(rank=4))
        >>> for method in ("dense", "comera", "cola"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        ...     done = apply_method_(model, method, formats, settings)
        ...     notes = {row.after for row in done.rows if row.layer} if done is not None else {"as it was"}
        ...     print(method, comera.model_size(model).total, notes)
        dense 8320 {'as it was'}
        comera 2304 {'BTTLinear'}
        cola 1152 {'CoLALinear'}
    """
    check_method(method, LINEAR_METHODS)
    if method == "dense":
        return None
    return tensorize_(model, formats) if method == "comera" else baselines[method].apply_(model, skip)


def rates_by_method(comera: TrainConfig, dense: TrainConfig) -> dict[Method, TrainConfig]:
    """Training settings of LINEAR_METHODS and TOKEN_METHODS from those of comera and dense, for presets. `core_lr` is
    the rate of whatever replaces the linear weights. Its ratio to the dense rate was measured on short runs of a small
    model, for none at full size.

    Example:
        >>> from comera.baselines import rates_by_method
        >>> from comera.trainer import TrainConfig
        >>> rates = rates_by_method(TrainConfig(steps=9, lr=2e-3), TrainConfig(steps=9, lr=1e-3))
        >>> {method: (rates[method].lr, rates[method].core_lr) for method in ("comera", "narrow", "cola")}
        {'comera': (0.002, None), 'narrow': (0.001, 0.001), 'cola': (0.001, 0.005)}
    """
    rates: dict[Method, TrainConfig] = {"comera": comera, "dense": dense}
    for method in BASELINES:
        ratio = BaselineConfig()[method].rate
        own = (comera.lr, comera.core_lr) if ratio is None else (dense.lr, dense.lr * ratio)
        rates[method] = replace(dense, lr=own[0], core_lr=own[1])
    return rates
