"""The Triton kernels against torch's own products on a GPU: which of them to list in FASTER of kernels/select.py.

Forward and backward of the six-encoder layers and tables, float32 and bfloat16, the two sides alternating in one
process. A kernel counts as faster on this device when it is faster in every case; the line to set is printed. Rows are
written as they come; cases that do not fit into `--seconds` are skipped, and then nothing counts as faster.

    python benchmarks/gpu_kernels.py [--seconds 60] [--dry]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from common import about, in_turns, update
from torch import Tensor

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

Side = Callable[[], object]
Case = tuple[str, str, str, Side, Side]


def gradients(function: Callable[..., Tensor], operands: list[Tensor]) -> Side:
    """One forward and backward."""
    dy = torch.randn_like(function(*operands))
    return lambda: torch.autograd.grad(function(*operands), operands, dy)


def cases(device: str, dry: bool) -> Iterator[Case]:
    """Kernel, dtype, description, the run with the kernel, the run with torch."""
    from comera.kernels import select
    from comera.ops.block_product import block_product
    from comera.ops.lookup.kernel import triton_rows
    from comera.ops.lookup.rows import pair_sums
    from comera.ops.low_rank import LowRankFactors, low_rank

    def product(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return low_rank(x, LowRankFactors(a, b).with_bias(bias))[0]

    def product_by_triton(*operands: Tensor) -> Tensor:
        with patch.object(select, "low_rank_backend", lambda *_: "triton"):
            return product(*operands)

    for dtype in (torch.float32, torch.bfloat16)[: 1 if dry else 2]:
        for batch, features, out_features, rank in TINY_PRODUCTS if dry else PRODUCTS:
            shapes = ((batch, features), (rank, features), (rank, out_features), (out_features,))
            operands = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
            case = f"{batch} x {features} -> {out_features}, rank {rank}"
            yield "low_rank", str(dtype)[6:], case, gradients(product_by_triton, operands), gradients(product, operands)
        for batch, features, out_features, rank in TINY_BLOCKS if dry else BLOCKS:
            spec = btt_spec(features, out_features, rank=rank)
            (n, m), components = spec.sizes, spec.ranks[1]
            shapes = ((batch, features), (n, components), (components, m), (out_features,))
            operands = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]

            def blocks(x: Tensor, r_NK: Tensor, l_KM: Tensor, bias: Tensor, spec: BTTSpec = spec) -> Tensor:
                return block_product(x, r_NK, l_KM, spec, bias)

            def blocks_by_triton(*operands: Tensor, blocks: Callable[..., Tensor] = blocks) -> Tensor:
                with patch.object(select, "block_product_backend", lambda *_: "triton"):
                    y: Tensor = blocks(*operands)
                return y

            case = f"{batch} x {features} -> {out_features}, rank {rank}"
            yield (
                "block_product",
                str(dtype)[6:],
                case,
                gradients(blocks_by_triton, operands),
                gradients(blocks, operands),
            )
    for rows_l, cols_l, rank, rows_r, cols_r, count in TINY_TABLES if dry else TABLES:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--dry", action="store_true", help="tiny cases in Triton's CPU interpreter; writes nothing")
    options = parser.parse_args()
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    elif not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, torch sees none: --dry runs tiny cases on the CPU")
    os.environ["COMERA_KERNELS"] = "none"  # kernels called by name still run; what dispatches uses torch's products
    from comera.kernels.select import TRITON

    started = time.perf_counter()
    faster, complete = set(TRITON), True
    for kernel, dtype, case, ours, torchs in cases("cpu" if options.dry else "cuda", options.dry):
        if time.perf_counter() - started > options.seconds:
            complete = False
            print(f"out of time: skipping {kernel}, {dtype}, {case} and the rest")
            break
        wait: Side = int if options.dry else torch.cuda.synchronize
        seconds = in_turns({"ours": ours, "torch": torchs}, 2 if options.dry else 50, warm_ups=3, wait=wait)
        ms = {side: statistics.median(times) * 1e3 for side, times in seconds.items()}
        if ms["ours"] >= ms["torch"]:
            faster.discard(kernel)
        row = {
            "kernel": kernel,
            "dtype": dtype,
            "case": case,
            "ours_ms": f"{ms['ours']:.4f}",
            "torch_ms": f"{ms['torch']:.4f}",
            "times_torch": f"{ms['torch'] / ms['ours']:.2f}",
        }
        print(" ".join(f"{value!s:>10}" for value in row.values()), flush=True)
        if not options.dry:
            update("gpu_kernels", [row | about()], key=("kernel", "dtype", "case"))
    if not options.dry:
        print(f"FASTER: {torch.cuda.get_device_name()!r}: {sorted(faster) if complete else []}")


if __name__ == "__main__":
    main()
