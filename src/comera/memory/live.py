"""The bytes that are alive at each moment of a computation, on any device; on the meta device without any memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Follows every storage that operations make, until it is freed.

    now, peak: bytes of them that are alive, and the most that were at once. resident: the most that they took, with
    what the C library's heap holds between them. `known` tensors count as if they were not there. What an operation
    takes for itself and frees again is not seen.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = self.resident = 0
        self._heap = Heap()
        self._known = [tensor.untyped_storage() for tensor in known]  # held, so that no other gets the address of one
        self._alive: dict[int, ref[torch.UntypedStorage]] = {}
        self._ignored = {storage._cdata for storage in self._known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                for part in stored_parts(tensor):
                    self._add(part.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if not nbytes or key in self._ignored or key in self._alive:
            return
        at = self._heap.take(nbytes)

        def freed(_: object) -> None:
            del self._alive[key]
            self.now -= nbytes
            self._heap.give(at, nbytes)

        self._alive[key] = ref(storage, freed)
        self.now += nbytes
        self.peak, self.resident = max(self.peak, self.now), max(self.resident, self._heap.held)

    def restart(self) -> None:
        """Count both peaks from here on."""
        self.peak, self.resident = self.now, self._heap.held


def stored_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the elements of a tensor: of a sparse gradient its indices and values."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


class Heap:
    """Where glibc puts aligned memory, to the accuracy that estimates need: large requests get pages of their own, the
    others the smallest gap that holds them, else the end of the heap.

    A gap must be larger than the request by its alignment. A tensor that is freed between two others leaves one that a
    tensor of the same size does not fit, a quarter and more of what training takes on a CPU.
    """

    LARGE, TRIM, SPARE = 2**25, 2**26, 160  # own pages above; the end is given back above; for alignment and headers

    def __init__(self) -> None:
        self._gaps: dict[int, int] = {}  # start -> size
        self._end = self._large = 0

    @property
    def held(self) -> int:
        """Bytes that the process holds."""
        return self._end + self._large

    def take(self, nbytes: int) -> int:
        """The address of a new request; -1 for pages of its own."""
        if nbytes > self.LARGE:
            self._large += nbytes
            return -1
        size = _aligned(nbytes)
        fits = [(gap, start) for start, gap in self._gaps.items() if gap >= size + self.SPARE]
        if fits:
            gap, start = min(fits)
            del self._gaps[start]
            self._gaps[start + size] = gap - size
            return start
        last = next((start for start, gap in self._gaps.items() if start + gap == self._end), self._end)
        self._gaps.pop(last, None)
        self._end = last + size
        return last

    def give(self, start: int, nbytes: int) -> None:
        """Take a request back."""
        if start < 0:
            self._large -= nbytes
            return
        end = start + _aligned(nbytes)
        end += self._gaps.pop(end, 0)
        before = next((at for at, gap in self._gaps.items() if at + gap == start), start)
        self._gaps.pop(before, None)
        if end == self._end and end - before > self.TRIM:
            self._end = before
        else:
            self._gaps[before] = end - before


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16 + 16


class FusedAttention(TorchFunctionMode):
    """Attention on the meta device as processors compute it: without score matrices, where there is no dropout.

    torch has only the composition of plain operations for tensors on the meta device.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            fused = _fused(*args, **kwargs)
            if fused is not None:
                return fused
        return func(*args, **kwargs)


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if dropout_p or q.ndim != 4 or (attn_mask is not None and attn_mask.requires_grad):
        return None
    if enable_gqa:
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
    attend: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = attend(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out


def run_backward(loss: Tensor) -> None:
    """loss.backward() that stays inside modes of torch's functions: blocks that recompute need `FusedAttention`."""
    torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
