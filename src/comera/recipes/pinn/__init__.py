"""Physics-informed networks: `recipe` trains, `model` is the network, `equation` what it solves."""

from comera.extras import require

require("comera.recipes.pinn", "comera[train]", "accelerate", "rich", "yaml")

__all__ = ["equation", "model", "recipe"]
