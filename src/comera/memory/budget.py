"""Bytes as people write them, and a batch in parts: what a memory budget is given in and spent on."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from comera.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SIZE = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?|\.\d+)\s*([kmg]i?)?b\s*", re.IGNORECASE)


def parse_bytes(size: str | int) -> int:
    """A number of bytes above 0, given as such or as text; a fraction of a byte is cut off.

    Raises ConfigError for anything else.

    Example:
        >>> from comera.memory.budget import parse_bytes
        >>> parse_bytes("28.5MB"), parse_bytes("24 MiB"), parse_bytes(1000)
        (28500000, 25165824, 1000)
    """
    nbytes = 0
    if isinstance(size, str):
        found = _SIZE.fullmatch(size)
        nbytes = int(float(found[1].replace("_", "")) * _UNITS[(found[2] or "").lower()]) if found else 0
    elif isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    if nbytes <= 0:
        raise ConfigError(
            "expected a budget above 0 in bytes, kB, MB, GB, KiB, MiB or GiB, such as '28.5MB' or 28_500_000, got "
            f"{size!r}"
        )
    return nbytes


def megabytes(nbytes: int) -> str:
    """Bytes in MB of a million, with two decimals."""
    return f"{nbytes / 1e6:,.2f} MB"


def batch_tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch."""
    return [leaf for leaf in tree_leaves(_plain(batch)) if isinstance(leaf, Tensor)]


def batch_size(batch: Any) -> int:
    """Samples of a batch: the first dimension of each of its tensors.

    Raises ConfigError for a batch that has none, or whose tensors differ in it.
    """
    sizes = {tensor.shape[0] for tensor in batch_tensors(batch) if tensor.ndim}
    if len(sizes) != 1 or sizes == {0}:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batch_tensors(batch)) or "no tensor"
        raise ConfigError(
            "expected a batch of tensors whose first dimension is the number of samples, one or more and the same for "
            f"all of them, got {shapes}"
        )
    return int(sizes.pop())


def parts(batch: Any, size: int) -> Iterator[tuple[Any, float]]:
    """A batch in as few parts of at most `size` samples as it takes, all about as large; each with its share of the
    samples. Tensors are sliced, without a copy; each part has whole what is no tensor, or one without dimensions."""
    samples = batch_size(batch)
    size = balanced(samples, size)
    for start in range(0, samples, size):
        yield _part(batch, start, start + size), (min(start + size, samples) - start) / samples


def balanced(samples: int, size: int) -> int:
    """The smallest size of parts, of as few parts as with `size`."""
    return -(-samples // -(-samples // size))


def _part(batch: Any, start: int, end: int) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor[start:end] if tensor.ndim else tensor, _plain(batch))


def _plain(batch: Any) -> Any:
    """Mappings of other libraries, such as transformers' BatchEncoding, as dicts, which torch looks into."""
    return dict(batch) if isinstance(batch, Mapping) else batch
