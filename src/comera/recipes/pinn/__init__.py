"""Physics-informed networks: `recipe` trains, `model` is the network, `equation` what it solves, `derivatives` how its
derivatives follow from values."""

from comera.extras import require

require("comera.recipes.pinn", "comera[train]", "accelerate", "rich", "yaml")

__all__ = ["derivatives", "equation", "model", "recipe"]
