"""Full training jobs on real input."""
