"""Other people's trainers, a module each; none is imported before its library is there.

comera.integrations.transformers  RankCallback for transformers' Trainer
"""

__all__: list[str] = []
