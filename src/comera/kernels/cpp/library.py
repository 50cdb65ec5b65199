"""The compiled kernels: the one caller of their functions, which they list themselves, and their operations in torch.

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
from comera.kernels.cpp import compiler

# of arguments, as exports.h writes them; p, and wN for structs of N words, are pointers
_KINDS = {"i": ctypes.c_int, "t": ctypes.c_int, "l": ctypes.c_long, "f": ctypes.c_float, "d": ctypes.c_double}
_OF_MEMORY = ("take_memory", "memory_held", "release_memory")  # calls that a recording does not repeat
_FLOP_COUNTER = "torch.utils.flop_counter"
_log = logging.getLogger(__name__)
_one_thread = threading.Lock()

Result = TypeVar("Result")
T = TypeVar("T", Tensor, Tensor | None)


class Function(NamedTuple):
    """A C function. sizes: of each operand 0 for a number, for a pointer the bytes of what it points to, 1 for any;
    without the number of threads, which comes last where it is taken."""

    run: Callable[..., int]
    sizes: tuple[int, ...]
    takes_threads: bool


Functions = dict[str, Function]


class _Kernels(NamedTuple):
    """A library that is used. version: its file name without .so."""

    version: str
    functions: Functions


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
    """Call the C function `name`, with torch's number of threads where it takes that.

    operands: numbers; for pointers tensors, `words`, addresses, or None for C's null pointer.
    Raises MemoryError when it could not get scratch memory, RuntimeError where there are no kernels, ValueError
    for operands that the function does not take, in number or length, and where it refuses numbers in them.
    """
    if dry_running():
        return
    functions = _functions()
    if isinstance(functions, str):
        raise RuntimeError(f"expected compiled kernels for {name}, but {functions}: ask select.supports before")
    function = functions[name]
    given: list[object] = []
    for each, size in zip(operands, function.sizes, strict=True):
        # a tensor in the place of a number, as sizes are under torch.jit.trace, must not become an address
        given.append(each.data_ptr() if size and isinstance(each, Tensor) else each)
        if size and isinstance(each, bytes) and len(each) % size:
            raise ValueError(f"expected structs of {size} bytes for the kernel {name}, got {len(each)} bytes")
    if function.takes_threads:
        given.append(torch.get_num_threads())
    check(name, function.run(*given))
    sink = recording.sink()
    if sink is not None and name not in _OF_MEMORY:
        sink.kernel(name, function.run, given)


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
    reasons: list[str] = []
    for path in compiler.built():
        kernels = _bound(path)
        if not isinstance(kernels, str):
            if reasons:
                _log.warning("not the best of comera's C++ kernels are used: %s", "; ".join(reasons))
            return kernels
        reasons.append(kernels)
    why = "; ".join(reasons) or "none are compiled from these sources for this processor"
    reason = f"{why}: python -m comera.kernels.cpp.compiler compiles them, or says why not"
    _log.warning("torch's own operations take the place of comera's C++ kernels: %s", reason)
    return reason


def _bound(path: Path) -> _Kernels | str:
    """The functions of a library; in one line why it is not to be used."""
    try:
        if not compiler.is_whole(path):
            return f"{path} is damaged"
        _find_openmp()
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path} could not be loaded: {compiler.one_line(str(error))}"
    library.comera_wrong.restype = library.comera_signatures.restype = ctypes.c_char_p
    if wrong := library.comera_wrong():
        return f"{path} computes {wrong.decode()} wrongly"
    functions: Functions = {}
    for item in filter(None, library.comera_signatures().decode().split(";")):
        name, _, text = item.partition("=")
        kinds = text.split()
        run = getattr(library, name)
        run.argtypes = [_KINDS.get(kind, ctypes.c_void_p) for kind in kinds]
        sizes = tuple(8 * int(kind[1:]) if kind[0] == "w" else int(kind == "p") for kind in kinds if kind != "t")
        functions[name] = Function(run, sizes, kinds[-1:] == ["t"])
    return _Kernels(path.stem, functions)


def _find_openmp() -> None:
    """Let libraries find the functions of OpenMP (`compiler.make`): torch loads its own for all, unless it was built in
    an unusual way."""
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    bundled = (Path(torch.__file__).parent / "lib").glob("libgomp*.so*")
    with suppress(OSError):  # there is none: libraries that need it say so
        ctypes.CDLL(next(map(str, bundled), "libgomp.so.1"), mode=ctypes.RTLD_GLOBAL)
