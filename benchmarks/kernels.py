"""The Triton kernels beside torch's own products on a GPU: which of them to list in contract/kernels.FASTER.

    python benchmarks/kernels.py

Forward and backward of the six-encoder layers and tables, float32 and bfloat16, the two sides alternating in one
process; times by CUDA events. Prints the ratio of every case and the line to set: a kernel counts as faster on this
device when it is so in every case.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

import torch
from common import about, write
from torch import Tensor

from comera.contract import kernels
from comera.contract.lookup import _Rows
from comera.contract.two_sided import two_sided

# rows of x, in, out, rank
PRODUCTS = [
    (rows, *layer) for rows in (128, 4096, 16384) for layer in ((768, 768, 30), (768, 3072, 30), (3072, 768, 30))
]
# rows and columns of the left half, rank, rows and columns of the right half, ids
TABLES = [(320, 16, 30, 100, 48, 4096), (320, 16, 30, 100, 48, 16384), (3163, 8, 32, 3163, 8, 100_000)]


def sides(ours: Callable[[], object], torchs: Callable[[], object], repeats: int = 50) -> tuple[float, float]:
    """Median milliseconds of both, alternating."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 5):
        for side, run in zip(times, (ours, torchs), strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            if repeat >= 5:  # compiled and warm
                side.append(start.elapsed_time(end))
    return statistics.median(times[0]), statistics.median(times[1])


def gradients(function: Callable[..., Tensor], operands: list[Tensor]) -> Callable[[], object]:
    """One forward and backward."""
    dy = torch.randn_like(function(*operands))
    return lambda: torch.autograd.grad(function(*operands), operands, dy)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, torch sees none")
    os.environ["COMERA_KERNELS"] = "none"  # what is called by name runs, what dispatches takes torch's products
    results = []
    for dtype in (torch.float32, torch.bfloat16):

        def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()

        for batch, features, out_features, rank in PRODUCTS:
            operands = [draw(batch, features), draw(rank, features), draw(rank, out_features), draw(out_features)]
            ours, torchs = sides(gradients(kernels.two_sided, operands), gradients(two_sided, operands))
            case = f"{batch} x {features} -> {out_features}, rank {rank}"
            results.append(("two_sided", str(dtype)[6:], case, ours, torchs))
    for rows_l, cols_l, rank, rows_r, cols_r, count in TABLES:
        ids = torch.randint(0, rows_l * rows_r, (count,), device="cuda")
        halves = [
            torch.randn(s, device="cuda").requires_grad_() for s in ((rows_l, cols_l, rank), (rows_r, rank, cols_r))
        ]
        ours, torchs = sides(
            gradients(lambda *t, ids=ids: kernels.rows(ids, *t), halves),
            gradients(lambda *t, ids=ids: _Rows.apply(ids, *t), halves),
        )
        results.append(
            ("rows", "float32", f"{count} of {rows_l * rows_r} x {cols_l * cols_r}, rank {rank}", ours, torchs)
        )

    for kernel, dtype_name, case, ours, torchs in results:
        print(f"{kernel:<10}{dtype_name:<10}{case:<40}{ours:>9.3f} ms, torch {torchs:>9.3f} ms: {torchs / ours:.2f}x")
    faster = [
        name for name in kernels.NAMES if all(ours < torchs for kernel, _, _, ours, torchs in results if kernel == name)
    ]
    print(f"FASTER: {torch.cuda.get_device_name()!r}: {faster}")
    columns = ("kernel", "dtype", "case", "ours_ms", "torch_ms")
    write("kernels", [dict(zip(columns, row, strict=True)) | about() for row in results])


if __name__ == "__main__":
    main()
