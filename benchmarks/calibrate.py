"""Measure the constants of the planner's cost model (ops/planner/cost.py) on this machine and print the line to set.

    python benchmarks/calibrate.py [--device cuda] [--threads 1] [--seconds 0.3]

Products of the sizes that plans compare, from a few hundred operations to a whole layer, run under autograd, forward
and both gradients, as the cost model counts them. The constants minimize the squared relative errors of its formula.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from common import about, write

from comera.ops.dtypes import product

SIZES = [
    *[(1024, 768, 768), (256, 768, 768), (64, 768, 768), (8, 768, 768), (1, 768, 768), (256, 768, 3072)],
    *[(30, 768, 1024), (30, 768, 128), (30, 768, 8), (64, 1024, 1024), (30, 3072, 256), (16, 1024, 512)],
    *[(1024, 30, 768), (128, 30, 768), (8, 30, 768), (1024, 64, 1024), (256, 30, 3072), (512, 16, 1024)],
    *[(8, 30, 240), (96, 12, 240), (240, 30, 96), (12, 12, 64), (30, 96, 512), (30, 240, 64), (4096, 30, 192)],
]


def seconds(run: Callable[[], object], device: str, budget: float) -> float:
    """The 20th percentile of the times of `run` over about `budget` seconds: other load only adds to them."""
    times: list[float] = []
    run()
    while sum(times) < budget or len(times) < 5:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 5]


def measured(dtype: torch.dtype, device: str, budget: float) -> list[float]:
    """Seconds of one of the three products, for each size."""
    found = []
    for m, k, n in SIZES:
        copies = range(4)  # in one backward, so that its fixed cost is not counted as a product's
        a, b, dy = ([torch.randn(s, device=device).to(dtype) for _ in copies] for s in ((m, k), (k, n), (m, n)))
        leaves = [leaf.requires_grad_() for leaf in (*a, *b)]

        def run(a=a, b=b, dy=dy, leaves=leaves) -> object:  # type: ignore[no-untyped-def]
            return torch.autograd.grad([product(*operands) for operands in zip(a, b, strict=True)], leaves, dy)

        found.append(seconds(run, device, budget) / (3 * len(copies)))
    return found


def fit(columns: list[list[float]], times: list[float]) -> list[float]:
    """Non-negative coefficients of the columns that minimize the squared relative errors of their sum."""
    rows = torch.tensor(columns, dtype=torch.float64).t() / torch.tensor(times, dtype=torch.float64)[:, None]
    active = list(range(len(columns)))
    while True:
        found = torch.linalg.lstsq(rows[:, active], torch.ones(len(times), 1, dtype=torch.float64)).solution[:, 0]
        if (found > 0).all():
            break
        active.pop(int(found.argmin()))
    coefficients = [0.0] * len(columns)
    for column, value in zip(active, found.tolist(), strict=True):
        coefficients[column] = value
    return coefficients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring, per size and dtype")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    flops = [2.0 * m * k * n for m, k, n in SIZES]
    elements = [float(m * k + k * n + m * n) for m, k, n in SIZES]
    single = measured(torch.float32, options.device, options.seconds)
    call, per_flop, per_element = fit([[1.0] * len(SIZES), flops, elements], single)
    print(f"{'m × k × n':>18}{'µs':>10}{'formula':>10}")
    for (m, k, n), found, f, x in zip(SIZES, single, flops, elements, strict=True):
        print(f"{f'{m} × {k} × {n}':>18}{found * 1e6:>10.1f}{(call + f * per_flop + x * per_element) * 1e6:>10.1f}")

    rows = [{"dtype": "float32", "flops_per_second": 1 / per_flop, "bytes_per_number": 4.0}]
    for dtype in (torch.bfloat16, torch.float64):
        times = measured(dtype, options.device, options.seconds)
        beyond_call = [max(t - call, 0.1 * t) for t in times]
        f, x = fit([flops, elements], beyond_call)
        width = x / per_element * 4 if per_element else float("nan")
        rows.append(
            {"dtype": str(dtype)[6:], "flops_per_second": 1 / f if f else float("inf"), "bytes_per_number": width}
        )
    rate = {row["dtype"]: row["flops_per_second"] for row in rows}
    print(
        f"Machine(single={rate['float32']:.2g}, half={rate['bfloat16']:.2g}, double={rate['float64']:.2g}, "
        f"bytes={4 / per_element if per_element else float('inf'):.2g}, call={call:.2g}, "
        f"half_bytes={rows[1]['bytes_per_number']:.1f})  # float64: {rows[2]['bytes_per_number']:.1f} bytes per element"
    )
    write("calibrate", [{**row, "bytes_per_second": 4 / per_element, "call_seconds": call, **about()} for row in rows])


if __name__ == "__main__":
    main()
