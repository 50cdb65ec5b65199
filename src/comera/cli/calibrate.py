"""`comera calibrate`: the Triton kernels beside torch's products on this GPU; `kernels/select.py` reads what is found.

Forward and backward of the six-encoder layers and tables, float32 and bfloat16, both sides in turns in one process. A
kernel counts as faster where it is faster in every case.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from comera.errors import ConfigError
from comera.files import replace_file
from comera.kernels import select
from comera.ops.block_product import block_product
from comera.ops.lookup.kernel import triton_rows
from comera.ops.lookup.rows import pair_sums
from comera.ops.low_rank import LowRankFactors, low_rank
from comera.tt.shapes import btt_spec
from comera.tt.spec import BTTSpec

# rows of x, in, out, rank
PRODUCTS = [
    (rows, *layer) for rows in (128, 4096, 16384) for layer in ((768, 768, 30), (768, 3072, 30), (3072, 768, 30))
]
BLOCKS = [(rows, *layer) for rows in (128, 4096, 16384) for layer in ((768, 768, 1), (768, 3072, 2), (3072, 768, 2))]
# rows and columns of the left factor, rank, rows and columns of the right factor, ids
TABLES = [(320, 16, 30, 100, 48, 4096), (320, 16, 30, 100, 48, 16384), (3163, 8, 32, 3163, 8, 100_000)]
TINY_PRODUCTS, TINY_BLOCKS, TINY_TABLES = [(33, 12, 20, 3)], [(33, 12, 20, 2)], [(6, 4, 3, 5, 4, 40)]
REPEATS, WARM_UPS = 30, 3

Side = Callable[[], object]
Case = tuple[str, str, str, Side, Side]


def calibrate() -> int:
    """Measure this machine's GPU and keep what is faster there.

    Raises ConfigError without a GPU or without triton.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            f"expected a GPU, but torch {torch.__version__} sees none: nothing to calibrate, C++ kernels run on the CPU"
        )
    if not select.triton_available():
        raise ConfigError("expected triton, which comes with torch's builds for GPUs, but it is not installed")
    gpu, faster = torch.cuda.get_device_name(), set(select.TRITON)
    for kernel, dtype, case, ours, torchs in cases("cuda"):
        of_ours, of_torchs = medians(ours, torchs)
        print(f"{kernel}, {dtype}, {case}: {of_torchs / of_ours:.2f} times torch", flush=True)
        if of_ours >= of_torchs:
            faster.discard(kernel)
    path = keep(gpu, faster)
    print(f"{gpu}: {', '.join(sorted(faster)) or 'no Triton kernel'} will run, kept in {path}")
    return 0


def keep(gpu: str, faster: set[str]) -> str:
    """Write what is faster on a GPU beside what is known of others; returns the path."""
    path, (known, _) = select.calibration_file(), select.calibrations()
    known[gpu] = {"faster": sorted(faster), "versions": select.versions()}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(known, indent=1))
    select.calibrated.cache_clear()
    return str(path)


def medians(ours: Side, torchs: Side) -> tuple[float, float]:
    """Seconds of a call of each, in turns."""
    seconds: tuple[list[float], list[float]] = [], []
    for repeat in range(REPEATS + WARM_UPS):
        for side, kept in zip((ours, torchs), seconds, strict=True):
            torch.cuda.synchronize()
            started = time.perf_counter()
            side()
            torch.cuda.synchronize()
            if repeat >= WARM_UPS:
                kept.append(time.perf_counter() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def gradients(function: Callable[..., Tensor], operands: list[Tensor]) -> Side:
    """One forward and backward."""
    dy = torch.randn_like(function(*operands))
    return lambda: torch.autograd.grad(function(*operands), operands, dy)


def cases(device: str, *, tiny: bool = False) -> Iterator[Case]:
    """Kernel, dtype, description, the run with the kernel, the run with torch. tiny: sizes for Triton's interpreter."""

    def product(x: Tensor, a: Tensor, b: Tensor, bias: Tensor, backend: str) -> Tensor:
        return low_rank(x, LowRankFactors(a, b).with_bias(bias), backend=backend)[0]

    def sides(function: Callable[..., Tensor], operands: list[Tensor]) -> tuple[Side, Side]:
        ours, torchs = (gradients(partial(function, backend=each), operands) for each in ("triton", "torch"))
        return ours, torchs

    for dtype in (torch.float32, torch.bfloat16)[: 1 if tiny else 2]:
        for batch, features, out_features, rank in TINY_PRODUCTS if tiny else PRODUCTS:
            shapes = ((batch, features), (rank, features), (rank, out_features), (out_features,))
            operands = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
            case = f"{batch} x {features} -> {out_features}, rank {rank}"
            yield "low_rank", str(dtype)[6:], case, *sides(product, operands)
        for batch, features, out_features, rank in TINY_BLOCKS if tiny else BLOCKS:
            spec = btt_spec(features, out_features, rank=rank)
            (n, m), components = spec.sizes, spec.ranks[1]
            shapes = ((batch, features), (n, components), (components, m), (out_features,))
            operands = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]

            def blocks(
                x: Tensor, r_NK: Tensor, l_KM: Tensor, bias: Tensor, backend: str, spec: BTTSpec = spec
            ) -> Tensor:
                return block_product(x, r_NK, l_KM, spec, bias, backend=backend)

            case = f"{batch} x {features} -> {out_features}, rank {rank}"
            yield "block_product", str(dtype)[6:], case, *sides(blocks, operands)
    for rows_l, cols_l, rank, rows_r, cols_r, count in TINY_TABLES if tiny else TABLES:
        ids = torch.randint(0, rows_l * rows_r, (count,), device=device)
        each = torch.arange(count, device=device)
        left = torch.randn(rows_l, cols_l, rank, device=device).requires_grad_()
        right = torch.randn(rows_r, rank, cols_r, device=device).requires_grad_()

        def kernel(left: Tensor, right: Tensor, ids: Tensor = ids) -> Tensor:
            return triton_rows(ids, left, right)

        def products(left: Tensor, right: Tensor, ids: Tensor = ids, each: Tensor = each) -> Tensor:
            rows = right.shape[0]
            return pair_sums(ids // rows, ids % rows, each, len(ids), left, right.mT)

        case = f"{count} of {rows_l * rows_r} x {cols_l * cols_r}, rank {rank}"
        yield "lookup_rows", "float32", case, gradients(kernel, [left, right]), gradients(products, [left, right])
