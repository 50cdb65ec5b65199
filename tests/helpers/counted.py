"""How often fused operations run."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from comera.fusion import decoder_attention, embedding_norm, mlp, norm, qkv, sums

# where an operation is called, its name there, and what it is counted as
OPERATIONS: tuple[tuple[Any, str, str], ...] = (
    (mlp, "mlp", "mlp"),
    (mlp, "gated", "gated activation"),
    (mlp, "activated", "activation"),
    (qkv, "low_rank", "qkv"),
    (qkv, "btt_linears", "qkv"),
    (norm, "residual_rms_norm", "norm"),
    (sums, "residual_layer_norm", "residual norm"),
    (embedding_norm, "residual_layer_norm", "embedding norm"),
    (decoder_attention, "rotary", "rotary attention"),
)


def counted(monkeypatch: pytest.MonkeyPatch, operations: Iterable[tuple[Any, str, str]]) -> Counter[str]:
    """The calls of each operation from now on, as a test goes on."""
    counts: Counter[str] = Counter()

    def spy(room: Any, name: str, kind: str) -> None:
        operation: Callable[..., Any] = getattr(room, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return operation(*args, **kwargs)

        monkeypatch.setattr(room, name, run)

    for each in operations:
        spy(*each)
    return counts
