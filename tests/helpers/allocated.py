"""Peak bytes of torch's allocator on the CPU, as the profiler sees them: scratch memory inside operations included."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_allocated(run: Callable[[], object]) -> int:
    """The most bytes that `run` has allocated at once, beyond what is there before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    now = peak = 0
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
