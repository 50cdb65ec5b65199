"""Contraction plans: which cores to merge before a product with the batch, chosen by estimated cost."""

__all__: list[str] = []
