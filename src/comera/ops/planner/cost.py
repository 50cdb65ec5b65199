"""The cost of a product: operations, bytes, calls, and the time that they take on a kind of machine.

In training every product (m × k) @ (k × n) runs three times on the same operands, once forward and twice backward (less
often where a gradient is not needed). Merging the small cores counts like any other product. One product takes

    time = call + flops / flops_per_second + bytes / bytes_per_second

The bytes make skinny products slow, as they are. Only ratios decide between plans.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Speed of a kind of device, as benchmarks/calibrate.py measures it.

    single, half, double: operations per second in float32, in bfloat16 and float16, and in float64.
    bytes: bytes moved per second. call: seconds per call.
    half_bytes: bytes that a half-precision element costs in a product: 2, or more where it is first cast to float32.
    """

    single: float
    half: float
    double: float
    bytes: float
    call: float
    half_bytes: int = 2

    def flops(self, itemsize: int) -> float:
        """Operations per second on elements of `itemsize` bytes."""
        return {2: self.half, 8: self.double}.get(itemsize, self.single)


# One core of an AMD EPYC 7003 (AVX2, MKL), measured; half precision is cast to float32 there (ops/dtypes.py). With
# these the plans of the six-encoder layers, batch 1 to 4,096, take at most 1.15 times the fastest of all partitions.
CPU = Machine(single=80e9, half=80e9, double=36e9, bytes=13e9, call=12e-6, half_bytes=9)
# Not measured: two thirds of the published rates of an NVIDIA H100 SXM (float32 without TF32), a launch in eager mode.
ACCELERATOR = Machine(single=45e12, half=650e12, double=45e12, bytes=2.2e12, call=5e-6)


def machine(device: str) -> Machine:
    """The constants for a type of device, as `torch.device.type` names it."""
    return CPU if device in ("cpu", "meta") else ACCELERATOR


@dataclass(frozen=True)
class Cost:
    """Work of some products, forward and backward: floating-point operations, bytes moved, calls; estimated seconds."""

    flops: int = 0
    bytes: int = 0
    calls: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        flops, moved, calls = self.flops + other.flops, self.bytes + other.bytes, self.calls + other.calls
        return Cost(flops, moved, calls, self.seconds + other.seconds)


def work(on: Machine, itemsize: int, flops: int = 0, moved: int = 0, calls: int = 0) -> Cost:
    """Cost of `flops` operations on elements of `itemsize` bytes that move `moved` bytes, by the formula above."""
    return Cost(flops, moved, calls, calls * on.call + flops / on.flops(itemsize) + moved / on.bytes)


def product(on: Machine, m: int, k: int, n: int, itemsize: int, *, times: int = 1, passes: int = 3) -> Cost:
    """Cost of `times` products (m × k) @ (k × n) in one call, once forward and `passes - 1` times backward."""
    elements = times * (m * k + k * n + m * n)
    width = on.half_bytes if itemsize == 2 else itemsize
    return work(on, itemsize, passes * times * 2 * m * k * n, passes * elements * width, passes)
