"""Related methods: those of others that go with compressed models. Nothing imports them before they are chosen."""

from comera.contrib.projected import AdaRankGrad, TensorGaLore

__all__ = ["AdaRankGrad", "TensorGaLore"]
