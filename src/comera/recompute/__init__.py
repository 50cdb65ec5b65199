"""Wide activations rebuilt in the backward."""
