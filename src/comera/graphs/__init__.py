"""Steps that are recorded once and replayed without their Python: CUDA graphs, and recordings on a CPU."""

__all__: list[str] = []
