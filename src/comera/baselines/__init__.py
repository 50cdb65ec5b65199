"""What a user would pick instead of compressing, for comparisons on the same model, data and batch."""

from comera.extras import require

require("comera.baselines", "comera[train]", "accelerate", "filelock", "rich", "yaml")

from comera.baselines.cola import CoLA, cola_
from comera.baselines.common import Applied, Baseline, Replaced
from comera.baselines.embedding_tables import smaller_tables_
from comera.baselines.galore import GaLore
from comera.baselines.lte import LTE, lte_, merge_
from comera.baselines.narrow import Narrow, widest
from comera.baselines.registry import (
    BASELINES,
    COMMON_METHODS,
    LINEAR_METHODS,
    METHODS,
    TABLE_METHODS,
    TOKEN_METHODS,
    BaselineConfig,
    Conversion,
    Method,
    apply_method_,
    check_method,
    has_own_layers,
    installed,
    rates_by_method,
)
from comera.baselines.tensorly import Tensorly, tensorly_
from comera.baselines.tokens import HashedNGrams, NarrowConv, SummedTables

# fmt: off
__all__ = [
    "BASELINES", "COMMON_METHODS", "LINEAR_METHODS", "LTE", "METHODS", "TABLE_METHODS", "TOKEN_METHODS", "Applied",
    "Baseline", "BaselineConfig", "CoLA", "Conversion", "GaLore", "HashedNGrams", "Method", "Narrow", "NarrowConv",
    "Replaced", "SummedTables", "Tensorly", "apply_method_", "check_method", "cola_", "has_own_layers", "installed",
    "lte_", "merge_", "rates_by_method", "smaller_tables_", "tensorly_", "widest",
]
# fmt: on
