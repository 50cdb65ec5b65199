"""The Triton kernels, compiled for GPUs that are not here: registers, spills, shared memory, matrix instructions.

The launchers of comera.kernels run on tensors of the meta device; instead of a launch, Triton compiles the kernel for
each GPU, with the types, strides and divisibility that it would see there. What the assembler and the disassembler,
which come with Triton, say of the result is a row of results/gpu_dry.csv. Occupancy follows from that and the limits of
the GPU's multiprocessors. `least_mb`: the operands, each read or written once; `moved_mb`: what all programs ask of the
caches, each tile as often as a program reads or writes it. Nothing is run: no row says how fast a kernel is.
docs/gpu.md is made from these rows by gpu_page.py.

    python benchmarks/gpu_dry.py [--gpus sm_90 ...] [--kernels low_rank] [--dtypes bfloat16 ...] [--dry]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as on a GPU; Triton warns where it is not set

import torch
import triton
from common import about, update
from torch import Tensor
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from comera.kernels import triton as rows_and_products
from comera.kernels import triton_blocks
from comera.ops.block_product import _sides
from comera.tt.shapes import btt_spec

TOOLS = Path(nvidia.__file__).parent / "bin"


@dataclass(frozen=True)
class GPU:
    """A GPU and the limits of one of its multiprocessors (CUDA C++ Programming Guide, table of compute capabilities;
    AMD Instinct MI300 ISA, for a compute unit of four SIMDs).

    matrix: the instructions of its matrix units, in its assembler; registers: of 32 bits; granule: in which a thread
    gets them; reserved: bytes of shared memory that the driver takes of each program.
    """

    name: str
    capability: int | str
    threads: int
    shared: int
    processors: int
    matrix: str
    registers: int = 65_536
    blocks: int = 32
    granule: int = 8
    lanes: int = 32
    reserved: int = 1024


GPUS = {
    "sm_80": GPU("A100", 80, 2048, 164 * 1024, 108, r"HMMA"),
    "sm_90": GPU("H100", 90, 2048, 228 * 1024, 132, r"HGMMA|HMMA"),
    "sm_100": GPU("B200", 100, 2048, 228 * 1024, 148, r"UTC\w*MMA|HMMA"),
    "gfx942": GPU("MI300X", "gfx942", 2048, 64 * 1024, 304, r"v_s?mfmac?_\w+", 131_072, 32, 8, 64, 0),
}
# rows, in, out, rank: a layer of the six encoders, one of a model 4,096 wide, odd sizes
PRODUCTS = [
    (4096, 768, 3072, 30),
    (4096, 768, 3072, 32),
    (4096, 4096, 4096, 64),
    (4096, 4096, 4096, 128),
    (33, 12, 20, 3),
]
BLOCKS = [(4096, 768, 3072, 2), (4096, 4096, 4096, 2), (33, 12, 20, 2)]
# rows and columns of the left factor, rank, rows and columns of the right factor, ids
TABLES = [(320, 16, 30, 100, 48, 4096), (3163, 8, 32, 3163, 8, 100_000)]
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments of one launch."""

    kernel: Any
    grid: Sequence[int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self, gpu: GPU) -> Any:
        """Triton's result for a GPU: like its own launch, with 1 as a constant and what 16 divides marked."""
        names = self.kernel.arg_names
        values = dict(zip(names, self.arguments, strict=False)) | self.options
        launch = {name: values.pop(name) for name in ("num_warps", "num_stages") if name in values}
        signature, constants, attributes = {}, {}, {}
        for k, name in enumerate(names):
            value = values[name]
            constant = next(p.is_constexpr for p in self.kernel.params if p.name == name)
            if isinstance(value, Tensor):
                signature[name] = "*" + TYPES[value.dtype]
            elif constant or value == 1:
                signature[name], constants[(k,)] = "constexpr", value
                continue
            else:
                signature[name] = "i32"
            if isinstance(value, Tensor) or value % 16 == 0:
                attributes[(k,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        target = GPUTarget("cuda" if isinstance(gpu.capability, int) else "hip", gpu.capability, gpu.lanes)
        return triton.compile(source, target=target, options=launch)


SHOWN = ("target", "kernel", "dtype", "case", "registers", "spilled_bytes", "occupancy", "matrix_instructions")
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
}


class _Watched:
    """In place of a kernel: keeps its launches."""

    def __init__(self, kernel: Any, into: list[Launch]) -> None:
        self._kernel, self._into = kernel, into

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return lambda *given, **options: self._into.append(Launch(self._kernel, grid, given, options))


def launched(module: Any, run: Callable[..., object], *given: Any) -> Launch:
    """What a launcher of a module launches, one of its kernels, once."""
    found: list[Launch] = []
    kernels = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    with patch.dict(vars(module), {name: _Watched(kernel, found) for name, kernel in kernels.items()}):
        run(*given)
    (launch,) = found
    return launch


def cases() -> Iterator[tuple[str, str, str, int, int, Launch]]:
    """Kernel, dtype, sizes, the least bytes, the bytes that its programs ask for, the launch."""
    for name, dtype in DTYPES.items():

        def made(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=of, device="meta")

        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        for rows, fan_in, fan_out, rank in PRODUCTS:
            given = x, a, b, bias = made(rows, fan_in), made(rank, fan_in), made(rank, fan_out), made(fan_out)
            launch = launched(rows_and_products, rows_and_products.low_rank, *given)
            (tiles, shares), made_too = launch.grid, rows * (fan_out + rank)
            moved = shares * (x.numel() + tiles * a.numel()) + tiles * (b.numel() + bias.numel()) + made_too
            size, least = made().element_size(), sum(t.numel() for t in given) + made_too
            yield "low_rank", name, f"{rows} x {fan_in} to {fan_out}, rank {rank}", size * least, size * moved, launch
        for rows, fan_in, fan_out, rank in BLOCKS:
            for kernel, least, moved, launch in _blocks(made, rows, fan_in, fan_out, rank):
                yield kernel, name, f"{rows} x {fan_in} to {fan_out}, block rank {rank}", least, moved, launch
        if name in ("float32", "bfloat16"):  # its sums are in float32 whatever its factors are
            for m_l, n_l, rank, m_r, n_r, ids in TABLES:
                left, right, id_U = made(m_l, n_l, rank), made(m_r, rank, n_r), made(ids, of=torch.int64)
                sizes = f"{ids} ids, {m_l} x {n_l} by {m_r} x {n_r}, rank {rank}"
                table, each, both = left.element_size(), ids * rank * (n_l + n_r), left.numel() + right.numel()
                rows_too = 8 * ids + table * ids * n_l * n_r
                launch = launched(rows_and_products, rows_and_products.lookup_rows, id_U, left, right)
                yield "lookup_rows", name, sizes, rows_too + table * both, rows_too + table * each, launch
                drows = made(ids, n_l * n_r)
                launch = launched(rows_and_products, rows_and_products.lookup_rows_backward, id_U, left, right, drows)
                least, moved = rows_too + (table + 4) * both, rows_too + (table + 4) * each  # gradients in float32
                yield "lookup_rows, backward", name, sizes, least, moved, launch


def _blocks(made: Callable[..., Tensor], rows: int, fan_in: int, fan_out: int, rank: int) -> Iterator[Any]:
    """Kernel, least bytes, bytes asked for and launch of the products of a block tensor train, and of R's gradient."""
    spec = btt_spec(fan_in, fan_out, rank=rank)
    inputs, outputs = _sides(spec, torch.device("meta"))
    x, r, l = made(rows, fan_in), made(spec.sizes[0], spec.ranks[1]), made(spec.ranks[1], spec.sizes[1])  # noqa: E741
    h, bias, y = made(rows, spec.ranks[1]), made(fan_out), made(rows, fan_out)
    of_r, of_l = (1, r.shape[1]), (l.shape[1], 1)
    blocks = triton_blocks
    tiles_f, tiles_k = triton.cdiv(inputs.size, blocks.BLOCK), triton.cdiv(inputs.most, blocks.BLOCK)
    for kernel, run, given, repeated, once in (
        ("R", blocks.to_components, (x, r, of_r, inputs), ((x, 2), (r, 0)), (h,)),
        ("L", blocks.to_features, (h, l, of_l, outputs, bias), ((h, 2), (l, 0), (bias, 0)), (y,)),
        ("gradient", blocks.weight_gradient, (x, h, of_r, inputs, r), ((x, tiles_k), (h, tiles_f)), (r,)),
    ):
        launch = launched(blocks, run, *given)
        elements = sum(each.numel() for each in once)
        least = elements + sum(each.numel() for each, _ in repeated)
        # a product's x is read for each tile of columns (its grid's third side), its weight for each tile of rows
        times = launch.grid if kernel != "gradient" else range(max(tiles_f, tiles_k) + 1)
        moved = elements + sum(each.numel() * times[by] for each, by in repeated)
        yield f"block product, {kernel}", least * x.element_size(), moved * x.element_size(), launch


def row(kernel: str, dtype: str, sizes: str, least: int, moved: int, launch: Launch, target: str) -> dict[str, Any]:
    """What is known of a kernel that is compiled for a GPU."""
    gpu, made = GPUS[target], launch.compile(GPUS[target])
    if "amdgcn" in made.asm:
        code = made.asm["amdgcn"]
        registers, stack = _said(r"\.vgpr_count: +(\d+)", code), _said(r"\.private_segment_fixed_size: +(\d+)", code)
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            usage, code = _tool("cuobjdump", "--dump-resource-usage", file.name), _tool("nvdisasm", file.name)
        registers, stack = _said(r"REG:(\d+)", usage), _said(r"STACK:(\d+)", usage)
    warps, shared = made.metadata.num_warps, made.metadata.shared
    threads = gpu.lanes * warps
    matrix = len(re.findall(rf"\b(?:{gpu.matrix})\b", code))
    programs = 1
    for count in launch.grid:
        programs *= count
    resident = min(
        gpu.blocks,
        gpu.threads // threads,
        gpu.registers // (-(-registers // gpu.granule) * gpu.granule * threads),
        gpu.shared // max(1, shared + gpu.reserved),
    )
    return {
        "gpu": gpu.name,
        "target": target,
        "kernel": kernel,
        "dtype": dtype,
        "case": sizes,
        "registers": registers,
        "spilled_bytes": stack,
        "spill_instructions": len(re.findall(r"\b(?:STL|LDL|scratch_(?:load|store)_\w+)\b", code)),
        "shared_bytes": shared,
        "warps": warps,
        "occupancy": f"{resident * threads / gpu.threads:.2f}",
        "programs": programs,
        "matrix_instructions": matrix,
        "needs_matrix": dtype != "float32" and not kernel.startswith("lookup"),
        "least_mb": f"{least / 1e6:.3f}",
        "moved_mb": f"{moved / 1e6:.3f}",
        "triton": triton.__version__,
    }


def _said(pattern: str, text: str) -> int:
    """The number that the first match of a pattern names."""
    found = re.search(pattern, text)
    assert found, f"the compiler says nothing like {pattern}"
    return int(found[1])


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def fails(found: Mapping[str, Any]) -> bool:
    """Whether a row's kernel spills registers, or has a product without the matrix units."""
    lacks = str(found["needs_matrix"]) == "True" and int(found["matrix_instructions"]) == 0
    return int(found["spilled_bytes"]) > 0 or lacks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", default=list(GPUS), choices=list(GPUS))
    parser.add_argument("--kernels", default="", help="only kernels whose name begins so")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--dry", action="store_true", help="write no results")
    chosen = parser.parse_args()
    found = []
    for target in chosen.gpus:
        # as many programs as this GPU would get
        with patch.object(rows_and_products, "_processors", lambda _, gpu=GPUS[target]: gpu.processors):
            for kernel, dtype, sizes, least, moved, launch in cases():
                if kernel.startswith(chosen.kernels) and dtype in chosen.dtypes:
                    found.append(row(kernel, dtype, sizes, least, moved, launch, target))
                    print(*(found[-1][name] for name in SHOWN), sep="  ", flush=True)
    if not chosen.dry:
        common = about()
        update("gpu_dry", [each | common for each in found], key=("target", "kernel", "dtype", "case"))
    failed = [each for each in found if fails(each)]
    print(f"{len(failed)} kernels spill or lack matrix instructions")


if __name__ == "__main__":
    main()
