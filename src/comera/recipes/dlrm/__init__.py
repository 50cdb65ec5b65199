"""Click prediction: `recipe` trains, `criteo` prepares the click log, `score` applies a trained model."""

from comera.extras import require

require("comera.recipes.dlrm", "comera[train]", "accelerate", "polars", "rich", "yaml")

__all__ = ["click_metrics", "criteo", "model", "recipe", "score", "table_budget"]
