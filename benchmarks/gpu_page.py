"""Write docs/gpu.md from results/gpu_dry.csv.

python benchmarks/gpu_page.py
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from common import measured
from gpu_dry import GPUS, fails

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
HEAD = """# GPUs that are not here

**Computed, not run.** No GPU was at hand: nothing on this page says how fast anything is. `make gpu-dry` compiles every
Triton kernel for GPUs by the compiler that it would have there and reads the result (`benchmarks/gpu_dry.py`;
`python benchmarks/gpu_page.py` writes this page). What the kernels compute is tested under Triton's interpreter.

{count} kernels, by type and sizes, for {gpus}; Triton {triton}, commit
{commit}. Of these **{spill} spill registers; of the {products} products that could use the matrix units, {lack} lack
their instructions**.

- **Where they run**: `comera calibrate` measures them against torch's products on your GPU and keeps which are faster
  there in all cases; it is made to take about a minute, and has run on no GPU yet. Without it torch's operations run.
  `COMERA_KERNELS=all` or `none` overrides it.
- **No host reads**: training steps of BERT, Llama and DLRM, compressed, fused and not, while ranks adapt and in the
  late stage, read no value on the host and copy nothing between devices, on fake tensors of a device that stands for
  a GPU (float32; `tests/unit/trainer/test_fake_gpu.py`). Two things do read: the steps of the late stage that
  zero gates, every 20th where it has 400 steps or more, else a twentieth of its steps apart; and the masks of
  transformers, one value in a forward, dense or compressed.
    - **Compiled** steps are one graph forward and one backward, of `torch.compile` of the model or of its loss, with no
      break, no copy and no recompilation; unproved without CUDA: that Inductor's kernels compute what the graphs say.
    - **Recorded** steps launch the same operations again, with the same constants, on the same memory, draw from no
      generator of their own, and leave nothing in the graphs' memory but their results; unproved without CUDA: that
      its driver and libraries capture each of these kernels, and what the caching allocator does in the pool.
- **float32** means exact sums: NVIDIA's matrix units have none, AMD's do. `tf32` is what PyTorch calls
  `allow_tf32`. The lookup's blocks are too small for matrix units.

In the tables: `registers` a thread; `spills`, bytes of them a thread in memory; `shared`, kilobytes a program;
`occupancy`, resident threads over the most that fit, by the GPU's limits; `matrix`, matrix instructions in the code;
`least MB`, every operand read or written once; `moved MB`, what all programs ask of the caches. How much of the rest
reaches memory is up to those: an A100 has 40 MB, an H100 50 MB of second level.
"""


def page(rows: list[dict[str, str]]) -> Iterator[str]:
    """The parts of the page."""
    products = [row for row in rows if row["needs_matrix"] == "True"]
    spill = sum(int(row["spilled_bytes"]) > 0 for row in rows)
    yield HEAD.format(
        count=len(rows),
        gpus=", ".join(f"{gpu.name} ({target})" for target, gpu in GPUS.items()),
        spill=spill or "none",
        lack=sum(fails(row) and row["spilled_bytes"] == "0" for row in products) or "none",
        products=len(products),
        triton=rows[0]["triton"],
        commit=rows[0]["commit"],
    )
    for target, of_gpu in groupby(rows, lambda row: row["target"]):
        yield f"## {GPUS[target].name} ({target})\n"
        columns = "kernel, dtype, case, registers, spills, shared, occupancy, programs, matrix, least MB, moved MB"
        yield "| " + columns.replace(", ", " | ") + " |\n" + "|---" * 11 + "|"
        for row in of_gpu:
            cells = [row[name] for name in ("kernel", "dtype", "case", "registers", "spilled_bytes")]
            cells += [f"{int(row['shared_bytes']) / 1024:.3g}", row["occupancy"], f"{int(row['programs']):,}"]
            megabytes = (float(row[name]) for name in ("least_mb", "moved_mb"))
            cells += [row["matrix_instructions"], *(f"{mb:,.0f}" if mb >= 100 else f"{mb:.3g}" for mb in megabytes)]
            yield f"| {' | '.join(cells)} |"
        yield ""


def main() -> None:
    PAGE.write_text("\n".join(page(measured("gpu_dry"))), encoding="utf-8")


if __name__ == "__main__":
    main()
