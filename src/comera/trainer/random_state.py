"""The random state of a process, JSON-ready: taken, checked and restored."""

import random
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy
import torch
from torch import Tensor

_WORDS = 624  # of a Mersenne Twister, 32 bits each
_NUMPY = "MT19937"
_CUDA_BYTES = 16  # of a CUDA device's state: seed and offset


def rng_state() -> dict[str, Any]:
    """Random state of this process, JSON-ready: Python, torch, every CUDA device, and NumPy."""
    kind, keys, *rest = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(s) for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "numpy": [kind, numpy.asarray(keys).tolist(), *rest],
    }


def check_rng_state(state: Any) -> None:
    """Raise ValueError unless it is an `rng_state`, through JSON or not; changes nothing."""
    try:
        fits = _fits_python(*state["python"]) and ("numpy" not in state or _fits_numpy(*state["numpy"]))
        fits = fits and all(len(_unhex(device)) == _CUDA_BYTES for device in state["cuda"])
        torch.Generator().set_state(_unhex(state["torch"]))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"a damaged one ({error!r:.200})") from error
    if not fits:
        raise ValueError("one of another kind, or out of range")


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore an `rng_state`, through JSON or not; CUDA devices that no longer exist are ignored.

    Raises ValueError if it is none; nothing is changed then.
    """
    check_rng_state(state)
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    torch.set_rng_state(_unhex(state["torch"]))
    for device, value in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(_unhex(value), device)
    if "numpy" in state:
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def _fits_python(version: int, words: Sequence[int], gauss: float | None) -> bool:
    return version == random.getstate()[0] and _fit(words[:-1], words[-1]) and (gauss is None or isfinite(gauss))


def _fits_numpy(kind: str, words: Sequence[int], place: int, has_gauss: int, gauss: float) -> bool:
    return kind == _NUMPY and _fit(words, place) and has_gauss in (0, 1) and isfinite(gauss)


def _fit(words: Sequence[int], place: int) -> bool:
    sound = len(words) == _WORDS and all(type(word) is int and 0 <= word < 2**32 for word in words)
    return sound and type(place) is int and 0 <= place <= _WORDS


def _hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _unhex(state: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
