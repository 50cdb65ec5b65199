"""Steps that are recorded once and replayed without their Python: CUDA graphs, and recordings on a CPU."""

from comera.graphs.graphed import GraphedStep

__all__ = ["GraphedStep"]
