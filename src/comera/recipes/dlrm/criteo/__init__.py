"""Criteo's click log: read, cleaned and stored as columns once, then served as batches."""

from comera.recipes.dlrm.criteo.batches import ClickBatch, ClickData, RowEncoder
from comera.recipes.dlrm.criteo.config import KAGGLE_TABLES, CriteoConfig
from comera.recipes.dlrm.criteo.preparation import prepare

__all__ = ["KAGGLE_TABLES", "ClickBatch", "ClickData", "CriteoConfig", "RowEncoder", "prepare"]
