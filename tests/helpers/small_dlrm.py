"""A small DLRM run on a generated log."""

from pathlib import Path

from comera.recipes.dlrm.criteo import CriteoConfig
from comera.recipes.dlrm.model import DLRMConfig
from comera.recipes.dlrm.recipe import CompressConfig, DLRMTaskConfig
from comera.trainer.config import TrainConfig

TABLES = (700, 40, 1500, 400, *[7] * 22)
ROWS, TRAIN, BATCH = 420, 360, 32


def small_log(cache: Path) -> CriteoConfig:
    """Generated clicks, prepared in a folder."""
    return CriteoConfig(synthetic_rows=ROWS, table_sizes=TABLES, workers=1, cache=str(cache))


def small_run(data: CriteoConfig, out: Path) -> DLRMTaskConfig:
    """An epoch early and two epochs in each of two late stages."""
    train = TrainConfig(
        epochs=1, batch_size=BATCH, lr=1e-3, core_lr=5e-3, max_grad_norm=1.0, log_every=1, progress=False, device="cpu"
    )
    return DLRMTaskConfig(
        out=str(out),
        late_targets=(0.6, 0.3),
        late_epochs=2.0,
        data=data,
        model=DLRMConfig(dim=8, bottom=(16,), top=(16,)),
        compress=CompressConfig(ratio=6, min_rows=300),
        train=train,
    )
