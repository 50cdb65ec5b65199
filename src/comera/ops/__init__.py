"""How a compressed weight meets its input: plans, products, look-ups."""
