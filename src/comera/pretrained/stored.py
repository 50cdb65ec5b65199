"""Tensors in a folder: in one safetensors file, or in shards with an index, as transformers names them.

    model.safetensors                                   up to SHARD bytes; more of them:
    model-00001-of-00003.safetensors, ...               shards
    model.safetensors.index.json                        which shard holds a tensor; written last: it completes the save

Writing holds one shard in memory, beside what is written, and reading less than that. Where an index lies in the folder
already, checksums in their names keep new shards from replacing those that it names.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from comera.errors import CheckpointError
from comera.files import replace_file
from comera.pretrained.sharded import whole

WEIGHTS = "model.safetensors"
"""Name of the file with the tensors, and with the manifest in its header; of many tensors, in that of its index."""
INDEX = ".index.json"  # follows the name of the file that the shards stand for
SHARD = 2**30  # bytes of tensors in a file; a larger tensor has one of its own
MAPPED = 2**27  # bytes that are read from a file before it is opened anew: until then they stay in memory
MANIFEST_ENTRY = "comera"  # in the header or the index of what this library has written


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name, read from their files when they are asked for; or `held` ones.

    shapes, types ("F32"): by name, of those in files. files: that hold them. metadata: of the file or the index.
    """

    def __init__(self, held: Mapping[str, Tensor] | None = None) -> None:
        self.shapes = {name: tuple(value.shape) for name, value in (held or {}).items()}
        self.types: dict[str, str] = {}
        self.files: list[Path] = []
        self.metadata: dict[str, Any] = {}
        self._places: dict[str, Tensor | tuple[Path, str]] = dict(held or {})
        self._opened: Any = None
        self._file, self._mapped = Path(), 0  # that is open, and bytes that were read from it

    @classmethod
    def open(cls, folder: Path, file: str = WEIGHTS) -> StoredTensors:
        """Those of a file or of its shards; reads their headers.

        Raises FileNotFoundError if there is neither, CheckpointError for what is damaged or not whole.
        """
        stored, index = cls(), folder / f"{file}{INDEX}"
        shards: dict[str, set[str]] = {}
        if index.exists() and not (folder / file).exists():
            try:
                about = json.loads(index.read_bytes())
                stored.metadata = dict(about.get("metadata") or {})
                for name, shard in about["weight_map"].items():
                    shards.setdefault(Path(shard).name, set()).add(name)  # of this folder, no other
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{index} is truncated or damaged ({error!r}): take another copy") from error
        for shard, names in sorted(shards.items()) or [(file, set[str]())]:
            path = folder / shard
            try:
                with safe_open(path, framework="pt") as opened:
                    stored.metadata = stored.metadata if shards else opened.metadata() or {}
                    headers = {name: opened.get_slice(name) for name in opened.keys() if not names or name in names}  # noqa: SIM118
                    stored.shapes |= {name: tuple(header.get_shape()) for name, header in headers.items()}
                    stored.types |= {name: header.get_dtype() for name, header in headers.items()}
            except FileNotFoundError as error:
                if not shards:
                    raise
                raise CheckpointError(f"the shard {path} is missing: take another copy") from error
            except (OSError, SafetensorError) as error:
                what = (
                    f"the shard {path} is truncated or damaged"
                    if shards
                    else f"{path} is truncated or no safetensors file"
                )
                raise CheckpointError(f"{what} ({error}): take another copy") from error
            if lost := names - headers.keys():
                raise CheckpointError(f"the shard {path} lacks {min(lost)}: take another copy")
            stored.files.append(path)
            stored._places |= {name: (path, name) for name in headers}
        return stored

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        if isinstance(place, Tensor):
            return place
        file, key = place
        try:
            if file != self._file or self._mapped > MAPPED:
                self._opened, self._file, self._mapped = safe_open(file, framework="pt"), file, 0
            tensor: Tensor = self._opened.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} changed while it was read ({error}): load once more") from error
        self._mapped += tensor.nbytes
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def tie(self, name: str, source: str) -> None:
        """Let `name` stand for the tensor `source`, too. Raises KeyError if that is not there."""
        self._places[name], self.shapes[name] = self._places[source], self.shapes[source]

    def sums(self) -> str | dict[str, str]:
        """The checksum of all tensors, or that of each shard; before any `tie`."""
        if len(self.files) == 1:
            return checksum(self)
        return {
            path.name: checksum(self, [n for n, at in self._places.items() if at[0] == path]) for path in self.files
        }


def checksum(tensors: Mapping[str, Tensor], names: list[str] | None = None) -> str:
    """Of names, dtypes, shapes and elements of contiguous tensors on the CPU. names: only these."""
    found = xxhash.xxh3_128()
    for name in sorted(tensors if names is None else names):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            found.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return found.hexdigest()


def packed(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Names in their order, in groups of at most `limit` bytes; what is larger has a group of its own."""
    groups: list[list[str]] = [[]]
    room = limit
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()  # of all of it, where processes hold parts
        if size > room and groups[-1]:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


def write_tensors(
    folder: Path,
    file: str,
    tensors: Mapping[str, Tensor],
    about: Callable[[str | dict[str, str]], dict[str, str]] | None = None,
    *,
    writer: bool = True,
) -> None:
    """Write tensors to a file or to shards, in the place of those that this library wrote there before.

    about: given the checksum of the file or those of the shards, what its header or the index says. writer: whether
    this process writes; every process has to call this for tensors that are spread over them. Raises CheckpointError
    or OSError for a file that cannot be written: the folder holds what it held.
    """
    groups, index = packed(tensors, SHARD), folder / f"{file}{INDEX}"
    before, one = _shards_in(index), len(groups) == 1
    sums: dict[str, str] = {}  # by file
    places: dict[str, str] = {}  # file by name of the tensor
    failed: OSError | SafetensorError | None = None
    for k, names in enumerate(groups, 1):
        held = _to_write({name: tensors[name] for name in names})
        if failed or not writer:
            continue  # the others wait for this process where a tensor is spread
        found = "" if one and about is None else checksum(held)
        tag = f"-{found[:8]}" if index.exists() else ""
        to = file if one else f"{Path(file).stem}-{k:05}-of-{len(groups):05}{tag}.safetensors"
        sums[to] = found
        places |= dict.fromkeys(names, to)
        header = (about and about(found)) if one else {"format": "pt"}
        try:
            replace_file(folder / to, partial(save_file, held, metadata=header))
            if k == len(groups) > 1:
                size = sum(t.numel() * t.element_size() for t in tensors.values())
                metadata = {"total_size": size, **(about(sums) if about else {})}
                replace_file(index, json.dumps({"metadata": metadata, "weight_map": places}, indent=1) + "\n")
        except (OSError, SafetensorError) as error:
            failed = error
    if not writer:
        return
    for shard in (sums.keys() - before - {file}) if failed else (before | {file}) - sums.keys():
        (folder / shard).unlink(missing_ok=True)
    if isinstance(failed, SafetensorError):
        raise CheckpointError(f"{file} could not be written in {folder}: {failed}") from failed
    if failed:
        raise failed
    if one and before:
        index.unlink()


def _to_write(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the CPU, each in memory of its own, as safetensors asks."""
    memory: set[int] = set()
    made = {}
    for name, value in tensors.items():
        tensor = whole(value.detach()).cpu().resolve_conj().resolve_neg().contiguous()
        where = tensor.untyped_storage().data_ptr()
        if where in memory and tensor.numel():  # another view of the same memory
            tensor = tensor.clone()
        memory.add(where)
        made[name] = tensor
    return made


def _shards_in(index: Path) -> set[str]:
    """Names of the shards of an index that this library has written."""
    try:
        about = json.loads(index.read_bytes())
        return (
            {Path(shard).name for shard in about["weight_map"].values()}
            if MANIFEST_ENTRY in about["metadata"]
            else set()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
