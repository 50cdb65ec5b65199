"""The Triton kernels, compiled for GPUs that are not here: registers, spills, shared memory, matrix instructions.

The launchers of comera.kernels run on tensors of the meta device; instead of a launch, Triton compiles the kernel for
each GPU, with the types, strides and divisibility that it would see there. What the assembler and the disassembler,
which come with Triton, say of the result is a row of results/gpu_dry.csv. Occupancy follows from that and the limits of
the GPU's multiprocessors; `least_mb` are the operands, each read or written once. Nothing is run: no row says how fast
a kernel is.

    python benchmarks/gpu_dry.py [--gpus sm_90 ...] [--kernels low_rank] [--dtypes bfloat16 ...] [--dry]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
    """A GPU and the limits of one of its multiprocessors (CUDA C++ Programming Guide, table of compute capabilities).

    matrix: the instructions of its matrix units, in its assembler.
    """

    name: str
    capability: int
    threads: int
    shared: int
    processors: int
    matrix: str
    registers: int = 65_536
    blocks: int = 32


GPUS = {
    "sm_80": GPU("A100", 80, 2048, 164 * 1024, 108, r"HMMA"),
    "sm_90": GPU("H100", 90, 2048, 228 * 1024, 132, r"HGMMA|HMMA"),
    "sm_100": GPU("B200", 100, 2048, 228 * 1024, 148, r"UTC\w*MMA|HMMA"),
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
        return triton.compile(source, target=GPUTarget("cuda", gpu.capability, 32), options=launch)


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


def cases() -> Iterator[tuple[str, str, str, int, Launch]]:
    """Kernel, dtype, sizes, the least bytes, the launch."""
    for name, dtype in DTYPES.items():

        def made(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=of, device="meta")

        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        for rows, fan_in, fan_out, rank in PRODUCTS:
            given = [made(rows, fan_in), made(rank, fan_in), made(rank, fan_out), made(fan_out)]
            launch = launched(rows_and_products, rows_and_products.low_rank, *given)
            least = made().element_size() * (sum(t.numel() for t in given) + rows * (fan_out + rank))
            yield "low_rank", name, f"{rows} x {fan_in} to {fan_out}, rank {rank}", least, launch
        for rows, fan_in, fan_out, rank in BLOCKS:
            for kernel, least, launch in _blocks(made, rows, fan_in, fan_out, rank):
                yield kernel, name, f"{rows} x {fan_in} to {fan_out}, block rank {rank}", least, launch
        if name in ("float32", "bfloat16"):  # its sums are in float32 whatever its factors are
            for m_l, n_l, rank, m_r, n_r, ids in TABLES:
                left, right = made(m_l, n_l, rank), made(m_r, rank, n_r)
                given = [made(ids, of=torch.int64), left, right]
                size = f"{ids} ids, {m_l} x {n_l} by {m_r} x {n_r}, rank {rank}"
                table, moved = left.element_size(), ids * n_l * n_r
                least = 8 * ids + table * (left.numel() + right.numel() + moved)
                launch = launched(rows_and_products, rows_and_products.lookup_rows, *given)
                yield "lookup_rows", name, size, least, launch
                given.append(made(ids, n_l * n_r))
                launch = launched(rows_and_products, rows_and_products.lookup_rows_backward, *given)
                yield "lookup_rows, backward", name, size, least + 4 * (left.numel() + right.numel()), launch


def _blocks(made: Callable[..., Tensor], rows: int, fan_in: int, fan_out: int, rank: int) -> Iterator[Any]:
    """Kernel, least bytes and launch of the products of a block tensor train, and of the gradient of its R."""
    spec = btt_spec(fan_in, fan_out, rank=rank)
    inputs, outputs = _sides(spec, torch.device("meta"))
    x, r, l = made(rows, fan_in), made(spec.sizes[0], spec.ranks[1]), made(spec.ranks[1], spec.sizes[1])  # noqa: E741
    h, bias = made(rows, spec.ranks[1]), made(fan_out)
    of_r, of_l = (1, r.shape[1]), (l.shape[1], 1)
    blocks = triton_blocks
    for kernel, run, given, moved in (
        ("R", blocks.to_components, (x, r, of_r, inputs), (x, r, h)),
        ("L", blocks.to_features, (h, l, of_l, outputs, bias), (h, l, bias, made(rows, fan_out))),
        ("gradient", blocks.weight_gradient, (x, h, of_r, inputs, r), (x, h, r)),
    ):
        least = x.element_size() * sum(each.numel() for each in moved)
        yield f"block product, {kernel}", least, launched(blocks, run, *given)


def row(kernel: str, dtype: str, sizes: str, least: int, launch: Launch, target: str) -> dict[str, Any]:
    """What is known of a kernel that is compiled for a GPU."""
    gpu, made = GPUS[target], launch.compile(GPUS[target])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, code = _tool("cuobjdump", "--dump-resource-usage", file.name), _tool("nvdisasm", file.name)
    registers, stack = (int(found) for found in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    warps, shared = made.metadata.num_warps, made.metadata.shared
    matrix = len(re.findall(rf"\b(?:{gpu.matrix})\b", code))
    programs = 1
    for count in launch.grid:
        programs *= count
    resident = min(
        gpu.blocks,
        gpu.threads // (32 * warps),
        gpu.registers // (-(-registers // 8) * 8 * 32 * warps),
        gpu.shared // (shared + 1024),  # the driver takes a kilobyte of each program
    )
    return {
        "gpu": gpu.name,
        "target": target,
        "kernel": kernel,
        "dtype": dtype,
        "case": sizes,
        "registers": registers,
        "spilled_bytes": stack,
        "spill_instructions": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "shared_bytes": shared,
        "warps": warps,
        "occupancy": f"{resident * 32 * warps / gpu.threads:.2f}",
        "programs": programs,
        "matrix_instructions": matrix,
        "needs_matrix": dtype != "float32" and not kernel.startswith("lookup"),
        "least_mb": f"{least / 1e6:.3f}",
        "triton": triton.__version__,
    }


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", default=list(GPUS), choices=list(GPUS))
    parser.add_argument("--kernels", default="", help="only kernels whose name begins so")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--dry", action="store_true", help="write no results")
    chosen = parser.parse_args()
    failed = []
    for kernel, dtype, sizes, least, launch in cases():
        if not kernel.startswith(chosen.kernels) or dtype not in chosen.dtypes:
            continue
        for target in chosen.gpus:
            found = row(kernel, dtype, sizes, least, launch, target)
            shown = (
                "target",
                "kernel",
                "dtype",
                "case",
                "registers",
                "spilled_bytes",
                "occupancy",
                "matrix_instructions",
            )
            print(*(found[name] for name in shown), sep="  ", flush=True)
            if found["spilled_bytes"] or (found["needs_matrix"] and not found["matrix_instructions"]):
                failed.append(found)
            if not chosen.dry:
                update("gpu_dry", [found | about()], key=("target", "kernel", "dtype", "case"))
    print(f"{len(failed)} kernels spill or lack matrix instructions")


if __name__ == "__main__":
    main()
