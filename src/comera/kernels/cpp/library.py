"""The compiled kernels: the one table of their C signatures, the one caller, and their operations in torch.

Operations are what profilers, FLOP counters and recomputation see. Lengths are checked here, before any pointer is
passed on: they raise RuntimeError with what was expected and what was given.
"""

import ctypes
import logging
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.utils._python_dispatch import _get_current_dispatch_mode

from comera._on_import import when_imported
from comera.kernels import recording
from comera.kernels.cpp import build, trial

# Kinds of arguments: i int, l long, f float, d double, p pointer, wN pointer to structs of N 64-bit words, t number of
# threads. The library derives the same text from its functions' types (exports.h) and is refused where the two differ.
SIGNATURES = {
    "adamw": "l p p w3 w2 p w4 d d d d t",
    "attention": "w7 w4 p l f f i p t",
    "attention_backward": "w7 w4 p l f f i p t",
    "block_product": "l l w17 p t",
    "block_product_backward": "l l w17 p p t",
    "clip": "l p p d p t",
    "cross_entropy": "l l p p l p p t",
    "dropout": "l p p i f p t",
    "gated": "i l p p p t",
    "gated_backward": "i l p p p p p t",
    "low_rank": "l l p l w9 l t",
    "low_rank_cross_entropy": "l l l p p i p p l p p p p t",
    "low_rank_output": "l l w9 l t",
    "low_rank_backward": "l l p l w9 l p t",
    "memory_held": "p p",
    "merge": "l p p f t",
    "merge_backward": "l p p f t",
    "mlp": "i l l p l w9 l l t",
    "mlp_backward": "i l l p l w9 l l p t",
    "ngrams": "w4 i w6 f p p t",
    "ngrams_backward": "w4 i w6 p p p p p t",
    "pair_rows": "l w20 p t",
    "pair_rows_backward": "l w20 p t",
    "random_words": "l l p",
    "release_memory": "",
    "residual_norm": "i l l p p p l p f p p i f f p p p p t",
    "residual_norm_backward": "i l l p p p p p p f p i f p p p p t",
    "rotary": "w6 w4 i t",
    "take_memory": "i p p",
}
_KINDS = {"i": ctypes.c_int, "t": ctypes.c_int, "l": ctypes.c_long, "f": ctypes.c_float, "d": ctypes.c_double}
# a tensor in the place of a number, as sizes are under torch.jit.trace, must not become an address
_IS_POINTER = {name: [kind[0] in "pw" for kind in kinds.split()] for name, kinds in SIGNATURES.items()}
_OF_MEMORY = ("take_memory", "memory_held", "release_memory")  # calls that a recording does not repeat
_FLOP_COUNTER = "torch.utils.flop_counter"
_log = logging.getLogger(__name__)
_one_thread = threading.Lock()

Result = TypeVar("Result")
T = TypeVar("T", Tensor, Tensor | None)
Functions = dict[str, Callable[..., int]]


class _Kernels(NamedTuple):
    """A library that is used. version: its file name without .so."""

    version: str
    functions: Functions


on_trial: Path | None = None
"""The one library that this process uses, whose trial it is (trial.py)."""

_library = torch.library.Library("comera", "FRAGMENT")
_flop_formulas: dict[str, Callable[..., int]] = {}


def unavailable_reason() -> str | None:
    """Why the kernels cannot be used here, in one line; None where they can."""
    functions = _functions()
    return functions if isinstance(functions, str) else None


def version() -> str:
    """What the kernels were compiled for, and from which sources; "" where there are none."""
    kernels = _kernels()
    return "" if isinstance(kernels, str) else kernels.version


@contextmanager
def dry_run() -> Iterator[None]:
    """Let tensors on the meta device stand for tensors on the CPU, in this thread: every choice is as there, and
    kernels make tensors on the meta device and compute nothing. For estimates of what a step takes."""
    before, _dry.running = _dry.running, True
    try:
        yield
    finally:
        _dry.running = before


def dry_running() -> bool:
    """Whether this thread is in a `dry_run`."""
    return _dry.running


def on_cpu(tensor: Tensor) -> bool:
    """Whether a tensor is on the CPU, or stands for one that is (`dry_run`)."""
    return tensor.is_cpu or (_dry.running and tensor.is_meta)


def device_type(device: torch.device) -> str:
    """Type of a device, or of the one that it stands for (`dry_run`)."""
    return "cpu" if _dry.running and device.type == "meta" else device.type


class _Dry(threading.local):
    running = False


_dry = _Dry()


def call(name: str, *operands: object) -> None:
    """Call the C function `name` of SIGNATURES, with torch's number of threads where it takes that.

    operands: numbers; for pointers tensors, `words`, addresses, or None for C's null pointer.
    Raises MemoryError when it could not get scratch memory, RuntimeError where there are no kernels, ValueError
    where the function itself refuses numbers in its operands.
    """
    if dry_running():
        return
    functions = _functions()
    if isinstance(functions, str):
        raise RuntimeError(f"expected compiled kernels for {name}, but {functions}: ask select.supports before")
    kinds = _IS_POINTER[name]
    given = [
        each.data_ptr() if pointer and isinstance(each, Tensor) else each
        for each, pointer in zip(operands, kinds, strict=False)  # the number of threads comes
    ]
    if SIGNATURES[name].endswith("t"):
        given.append(torch.get_num_threads())
    check(name, functions[name](*given))
    sink = recording.sink()
    if sink is not None and name not in _OF_MEMORY:
        sink.kernel(name, functions[name], given)


def check(name: str, status: int) -> None:
    """Raise what the status of a kernel's call means; nothing for 0."""
    if status == 2:
        raise ValueError(f"expected numbers that fit each other in the operands of the kernel {name}")
    if status:
        raise MemoryError(f"the kernel {name} could not get its scratch memory: use smaller batches or fewer threads")


def words(values: Iterable[int]) -> bytes:
    """64-bit integers (sizes, addresses) for a kernel, which live as long as its call."""
    return array("q", list(values)).tobytes()  # faster than one by one


def address(tensor: Tensor | None) -> int:
    """Where a tensor's elements are; 0, C's null pointer, for None."""
    return 0 if tensor is None else tensor.data_ptr()


def floats(name: str, tensor: Tensor) -> Tensor:
    """`tensor` as kernels read it: contiguous, and without torch's negative bit, which says that its elements in memory
    have the wrong sign. Raises RuntimeError unless it is float32 on the CPU."""
    if tensor.dtype is not torch.float32 or not on_cpu(tensor):
        raise RuntimeError(f"expected {name} of dtype float32 on the CPU, got {tensor.dtype} on {tensor.device}")
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.resolve_neg().contiguous()


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise RuntimeError unless `tensor` is of `shape`."""
    if tensor.shape != shape:
        raise RuntimeError(f"expected {name} of shape {list(shape)}, got {list(tensor.shape)}")


def checked(name: str, tensor: T, *shape: int) -> T:
    """`floats` after `check_shape`; None for None."""
    if tensor is None:
        return tensor
    check_shape(name, tensor, shape)
    return floats(name, tensor)


def strided(name: str, tensor: Tensor, *shape: int) -> Tensor:
    """`tensor` with a contiguous last dimension, otherwise as `checked` gives it."""
    check_shape(name, tensor, shape)
    plain = tensor.dtype is torch.float32 and on_cpu(tensor) and not tensor.is_neg()
    return tensor if plain and tensor.stride(-1) == 1 else floats(name, tensor)


def operation(flops: Callable[..., int] | None = None) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Make an annotated function the operation torch.ops.comera.NAME on the CPU.

    flops: takes the operands, shapes in place of tensors. The operation has no derivative: autograd functions call it.

    The decorated function goes through torch's dispatcher only while a mode or a profiler would see it. Through the
    dispatcher always: 8 µs more for a call of few tensors, 70 µs for a merge of 264, as it takes lists of tensors apart
    and puts them together again; a compressed training step makes some hundred calls. torch has no public question for
    the first: `is_in_torch_dispatch_mode` is one flag for all threads, which one that leaves a mode resets for another.
    """

    def decorate(run: Callable[..., Result]) -> Callable[..., Result]:
        name = run.__name__
        _library.define(torch.library.infer_schema(run, op_name=name, mutates_args=()))
        for device in ("CPU", "Meta"):  # Meta: in a dry run
            _library.impl(name, run, device)
        dispatched: Callable[..., Result] = getattr(torch.ops.comera, name).default
        if flops is not None:
            _flop_formulas[name] = flops
            if _FLOP_COUNTER in sys.modules:
                _register_flops(name)

        def call_operation(*operands: Any) -> Result:
            if _profiler_enabled() or _get_current_dispatch_mode() is not None:
                sink = recording.sink()
                if sink is None:
                    return dispatched(*operands)
                sink.keep(*operands)
            return run(*operands)

        call_operation.__name__, call_operation.__doc__ = run.__name__, run.__doc__
        return call_operation

    return decorate


def _register_flops(name: str) -> None:
    formula = _flop_formulas[name]
    register = sys.modules[_FLOP_COUNTER].register_flop_formula
    register(getattr(torch.ops.comera, name))(lambda *shapes, out_shape=None, **_: formula(*shapes))


def _register_all_flops() -> None:
    for name in _flop_formulas:
        _register_flops(name)


# Importing the counter from here would import triton: 0.25 s for something that few need.
when_imported(_FLOP_COUNTER, _register_all_flops)


@cache
def _functions() -> Functions | str:
    """The C functions by name, or why there are none."""
    kernels = _kernels()
    return kernels if isinstance(kernels, str) else kernels.functions


def _kernels() -> _Kernels | str:
    with _one_thread:
        return _chosen()


@cache
def _chosen() -> _Kernels | str:
    if on_trial is not None:
        return _bound(on_trial)
    chosen = build.choose(_tried)
    if isinstance(chosen, str):
        _log.warning("torch's own operations take the place of comera's C++ kernels: %s", chosen)
    return chosen


def _tried(path: Path) -> _Kernels | str:
    return trial.refusal(path) or _bound(path)


def _bound(path: Path) -> _Kernels | str:
    """The functions of a library; in one line why it does not fit. Raises OSError if it cannot be loaded."""
    _find_openmp()
    library = ctypes.CDLL(str(path))
    try:
        found = library.comera_signatures
    except AttributeError as error:
        return f"the compiled kernels could not be loaded: {error}"
    found.restype = ctypes.c_char_p
    exported = dict(item.split("=") for item in found().decode().split(";") if item)
    for name in sorted(SIGNATURES.keys() | exported.keys()):
        if exported.get(name) != SIGNATURES.get(name):
            given, expected = (each.get(name, "absent") for each in (exported, SIGNATURES))
            return f"the compiled kernels do not fit: expected {name} ({expected}), {library._name} has ({given})"
    functions: Functions = {name: getattr(library, name) for name in SIGNATURES}
    for name, kinds in SIGNATURES.items():
        functions[name].argtypes = [_KINDS.get(kind, ctypes.c_void_p) for kind in kinds.split()]  # type: ignore[attr-defined]
    return _Kernels(path.stem, functions)


def _find_openmp() -> None:
    """Let libraries find the functions of OpenMP (`compiler.make`): torch loads its own for all, unless it was built in
    an unusual way."""
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    bundled = (Path(torch.__file__).parent / "lib").glob("libgomp*.so*")
    with suppress(OSError):  # there is none: libraries that need it say so
        ctypes.CDLL(next(map(str, bundled), "libgomp.so.1"), mode=ctypes.RTLD_GLOBAL)
