"""Write docs/gpu.md from results/gpu_dry.csv, gpu_roofline.csv and gpu_inductor.csv.

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

In the tables of kernels: `registers` a thread; `spills`, bytes of them a thread in memory; `shared`, kilobytes of a
program; `occupancy`, resident threads over the most that fit, by the GPU's limits; `matrix`, matrix instructions in
the code; `least MB`, every operand read or written once; `moved MB`, what all programs ask of the caches. How much of
the rest reaches memory is up to those: an A100 has 40 MB, an H100 50 MB of second level.
"""

ROOFLINE = """## A training step on an H100: its roofline

**Computed, not run.** Every operation of a whole step is counted on fake tensors (`benchmarks/gpu_roofline.py`, commit
{commit}): 4,096 tokens, parameters and AdamW in float32, bfloat16 by autocast, clipping, fused models, attention by
torch's flash kernel, everything else by torch's operations as CUDA has them, no Triton kernel, no adaptation of ranks.
BERT-base is ten times smaller, the Llamas are the presets of `comera train lm`. Published of an H100 SXM: 989 TFLOP/s
of dense bfloat16, 67 of float32, 3.35 TB/s, 50 MB of second-level cache; assumed: 5 µs for a launch in an eager step,
none in a recorded one.

`GB`: operands and results, each once an operation; `beyond`, those of operations that exceed the cache, and `memory`
the time of these alone. `least`: the sum over operations of the larger of compute and memory, and no less than all
launches where steps are eager; `bound`, the largest part of that.

{head}
{table}

- **Compression takes away FLOPs, and what remains is launches and memory.** An eager step of BERT-base takes more of
  both than the dense one; record it (`mode="graph"`). The large models gain, though far less than their FLOPs fall.
  Dense, llama-7b could not run on an H100 of 80 GB: its weights, gradients and moments take 16 bytes a parameter.
- **Where the operations come from**, of {operations} in BERT-base: blocks of different ranks, as a ratio gives them,
  take {ragged} to pad, gather and scatter; one rank for all takes none of these. Casts are {casts} (dense
  {dense_casts}): the one input of queries, keys and values is cast three times, and our cores and their gradients one
  by one. The permutation between the two products copies as many numbers a row as there are components, forward and
  backward; the Triton kernels, where `comera calibrate` has chosen them, copy nothing.
- Not all counts are floors: causal attention is counted whole, and gradients are added out of place, as autograd does
  while it is watched. On the other side, an operation counts as one launch, though a scatter, an embedding's gradient,
  and fused AdamW and norms of many tensors are several.
"""

COMPILED = """## The same step compiled: Inductor's kernels

**Computed, not run.** Inductor lowers forward and backward of `TrainStep(mode="compile")` to Triton code for an H100,
which nothing compiles further or runs (`benchmarks/gpu_inductor.py`, at {commit}). Stood in: the device's
properties and Triton's driver. Two things differ from a real H100: products are not padded, which Inductor decides by
measuring, and uniform constants are not folded. Models of 1, 2 and 3 blocks are lowered, and what the third adds is
added for each further one; {linear}.

`Triton`: launches of Inductor's kernels; `extern`: of torch's, as products and attention; `rest`: clipping and AdamW,
which stay eager. `GB` is what Inductor's scheduler counts, each operand of a kernel once. `operations` and the last
column repeat the eager step; a launch takes 5 µs, but none in a recorded step. `compiled and recorded` is what would
be left without launches: `TrainStep` compiles or records, it does not do both.

{head}
{table}

- **Compiled, compressed BERT-base launches {fewer} as many kernels as eager operations, dense {dense_fewer}.** It still
  launches {times} times as many as dense.
- **More bytes count as `beyond`** than in the eager step where a fused kernel exceeds the cache and its parts did not.
- **Avoidable**: {padding} of {triton} Triton kernels of compressed BERT-base pad blocks of different ranks or scatter
  their gradients, some with other work fused in. {casts} are casts alone, by name (dense {dense_casts}).
{missing}"""

COLUMNS = "step; ; parameters, millions; operations; GB; beyond; TFLOP; compute, ms; memory, ms; launches, ms; "
COLUMNS += "least, ms: eager, bound by; least, ms: recorded, bound by"


def roofline(rows: list[dict[str, str]]) -> str:
    """The section of the roofline."""
    table = []
    for row in rows:
        compute, memory, launches, least = (
            float(row[f"{name}_ms"]) for name in ("compute", "memory", "launch", "least")
        )
        recorded = "compute" if compute > memory else "memory"
        cells = [f"{row['case']}, {row['batch']}", row["side"], f"{int(row['parameters']) / 1e6:,.0f}"]
        cells += [f"{int(row['operations']):,}", row["gb"], row["gb_beyond_cache"], row["tflop"]]
        cells += [f"{ms:.1f}" for ms in (compute, memory, launches)]
        cells += [
            f"{max(least, launches):.1f}, {recorded if least > launches else 'launches'}",
            f"{least:.1f}, {recorded}",
        ]
        table.append(f"| {' | '.join(cells)} |")
    of = {(row["case"], row["side"]): row for row in rows}
    dense, ours = of["BERT-base", "dense"], of["BERT-base", "compressed"]
    return ROOFLINE.format(
        commit=ours["commit"],
        head=f"| {COLUMNS.replace('; ', ' | ')} |\n{'|---' * 12}|",
        table="\n".join(table),
        operations=f"{int(ours['operations']):,}",
        ragged=ours["ragged"],
        casts=ours["casts"],
        dense_casts=dense["casts"],
    )


def compiled(rows: list[dict[str, str]], eager: list[dict[str, str]]) -> str:
    """The section of Inductor's kernels; rows as they were measured, the eager ones for all of them."""
    operations = {(row["case"], row["side"]): row for row in eager}
    columns = "step; ; Triton; extern; rest; launches; operations; GB; beyond; "
    columns += "least, ms: compiled, bound by; least, ms: compiled and recorded; least, ms: eager"
    table = [f"| {columns.replace('; ', ' | ')} |\n{'|---' * 12}|"]
    for row in rows:
        other = operations[row["case"], row["side"]]
        kinds = {kind: float(row[f"{kind}_ms"]) for kind in ("compute", "memory", "launch")}
        least, eager_least = (max(float(each["least_ms"]), float(each["launch_ms"])) for each in (row, other))
        bound = "launches" if kinds["launch"] == least else max(("compute", "memory"), key=kinds.__getitem__)
        counts = (row["triton"], row["extern"], row["rest"], row["launches"], other["operations"])
        cells = [f"{row['case']}, {row['batch']}", row["side"], *(f"{int(count):,}" for count in counts)]
        cells += [f"{float(row['gb']):.2f}", f"{float(row['gb_beyond_cache']):.2f}"]
        recorded = f"{float(row['least_ms']):.1f}", f"{eager_least:.1f}"
        table.append(f"| {' | '.join([*cells, f'{least:.1f}, {bound}', *recorded])} |")
    dense, ours = rows[0], rows[1]
    share = [
        100 * int(row["launches"]) / int(operations[row["case"], row["side"]]["operations"]) for row in (ours, dense)
    ]
    odd = [f"{row['case']}, {row['side']}" for row in rows if row["linear"] != "True"]
    missing = sorted({row["case"] for row in eager} - {row["case"] for row in rows})
    return COMPILED.format(
        commit=", ".join(dict.fromkeys(row["commit"] for row in rows)),
        linear=f"not as many launches as the second in {'; '.join(odd)}, so an estimate there"
        if odd
        else "the second added as many launches",
        head=table[0],
        table="\n".join(table[1:]),
        fewer=f"{share[0]:.0f}%",
        dense_fewer=f"{share[1]:.0f}%",
        times=f"{int(ours['launches']) / int(dense['launches']):.1f}",
        casts=ours["casts"],
        dense_casts=dense["casts"],
        padding=ours["padding"],
        triton=f"{int(ours['triton']):,}",
        missing=f"- Not counted yet: {', '.join(missing)}.\n" if missing else "",
    )


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
    yield roofline(measured("gpu_roofline"))
    yield compiled(measured("gpu_inductor"), measured("gpu_roofline"))
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
