"""Peak bytes of torch's allocator on the CPU, as the profiler sees them: scratch memory inside operations included."""

import ctypes
import gc
import sys
from collections.abc import Callable

from torch.autograd.profiler import profile


def peak_allocated(run: Callable[[], object]) -> int:
    """The most bytes that `run` has allocated at once, beyond what is there before it."""
    # not torch.profiler's, which makes a tree of Python objects of the events: that takes longer than the run
    with profile(profile_memory=True) as profiled:
        run()
    now = peak = 0
    results = profiled.kineto_results
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    del profiled, results
    _return_freed_memory()
    return peak


def _return_freed_memory() -> None:
    """Give back what the events took, a gigabyte: the C library would hand it to whatever is measured next."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
