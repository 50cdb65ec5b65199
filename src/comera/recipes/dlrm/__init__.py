"""Click prediction: `recipe` trains, `criteo` prepares the click log, `score` applies a trained model."""

__all__ = ["click_metrics", "criteo", "model", "recipe", "score", "table_budget"]
