"""Kernels without memory for their work, under sanitizers over random shapes, and memory over many steps."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from comera.kernels.cpp import compiler
from comera.kernels.cpp import memory as kernel_memory
from comera.kernels.select import unavailable_reason

from ..unit.kernels import test_sanitizers as sanitizers
from .children import settle
from .models import bert, optimizer_of, step

Record = Callable[[str, object], None]
needs_compiler = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

LIMITED = """
import resource, sys, torch
from comera.kernels.cpp import attention, block_product, low_rank, merge, mlp
from tests.helpers.odd_operands import *
from tests.helpers.odd_operands import call_all
torch.manual_seed(0)
torch.set_num_threads(2)
call_all()  # threads and their small memory are there
calls = {
    "low_rank": (low_rank.low_rank_backward, (*low_rank_operands(2048, 1024, 1024, 256), True, True, True)),
    "mlp": (mlp.mlp_backward, (*mlp_operands(2048, 512, 2048, 512, (200, 200), 200), "gelu", True)),
    "attention": (
        attention.attention, (*attention_operands(2, 4, 2, 2048, 2048, 64, 64)[:3], None, None, 0.0, 1.0, False)
    ),
    "block_product": (
        block_product.block_product_backward, (*block_product_operands(2048, (32, 32, 64, 48), 8), True, True, True)
    ),
    "merge": (merge.merge, (*merge_operands((4, 2, 2048, 2048, 64, 32, 32, 64, 1, 64, 128, 64, 1)), 0.0)),
}
run, operands = calls[sys.argv[1]]
def size():
    status = open("/proc/self/status").read().split()
    return 1024 * int(status[status.index("VmSize:") + 1])
def flat(outputs):
    return [t for each in outputs for t in (each if isinstance(each, (list, tuple)) else [each]) if t is not None]
errors = 0
held = size()
for k in range(int(sys.argv[2])):
    resource.setrlimit(resource.RLIMIT_AS, (held + (k << 20) // 2, -1))
    try:
        run(*operands)
    except (MemoryError, RuntimeError) as error:
        errors += "memory" in str(error)
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
one, other = flat(run(*operands)), flat(run(*operands))
assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(one, other, strict=True))
print(errors)
"""
RANDOM = """
import random, sys, torch
from tests.helpers.odd_operands import *
rng = random.Random(int(sys.argv[2]))
torch.manual_seed(0)
seed = torch.tensor(3)
size = lambda most: rng.choice((0, 1, rng.randrange(most), rng.randrange(most)))
for k in range(int(sys.argv[1])):
    torch.set_num_threads(rng.randrange(1, 4))
    operands = low_rank_operands(size(150), size(120), size(140), size(40), rng.randrange(2))
    low_rank.low_rank_backward(*operands, True, True, True)
    blocks = (size(6), size(40), size(6), size(40))
    cut = (size(50), size(50))
    operands = x, dys, *weights = block_product_operands(size(250), blocks, size(4), cut, rng.randrange(2))
    block_product.block_product(x, *weights, [dy.shape[1] for dy in dys])
    block_product.block_product_backward(*operands, *(rng.random() < 0.7 for _ in range(3)))
    ranks = [size(20) for _ in range(rng.randrange(1, 3))]
    operands = mlp_operands(size(90), size(60), size(120), size(60), ranks, size(30), rng.randrange(2))
    mlp.mlp_backward(*operands, rng.choice(mlp.ACTIVATIONS), True)
    sizes = (1 + size(2), 4, rng.choice((1, 2, 4)), size(70), size(100), 1 + size(40), 1 + size(40))
    q, k_, v, mask, do = attention_operands(*sizes)
    settings = (rng.choice((mask, None)), *rng.choice(((seed, 0.1), (None, 0.0))), 0.7, rng.random() < 0.5)
    o, norms = attention.attention(q, k_, v, *settings)
    attention.attention_backward(do, o, norms, q, k_, v, *settings)
    order = rng.randrange(2, 6)
    split = rng.randrange(1, order)
    modes, inner = [rng.randrange(1, 7) for _ in range(order)], [size(12) for _ in range(order - 1)]
    rows = max(1, torch.Size(modes[:split]).numel() - rng.randrange(2))
    columns = max(1, torch.Size(modes[split:]).numel() - rng.randrange(2))
    layout = (order, split, rows, columns, *modes, 1, *inner, 1)
    parameters, biases, layouts = merge_operands(layout, rng.randrange(1, 4))
    factors = merge.merge(parameters, biases, layouts, 0.1)
    merge.merge_backward([torch.randn_like(f) for f in factors], parameters, biases, layouts, 0.1)
    shape = (size(40), size(900))
    z, x, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    _, s, mean, rstd = residual_norm.residual_norm(z, x, weight, weight, seed, 0.2, 1e-5)
    residual_norm.residual_norm_backward(z, s, mean, rstd, weight, seed, 0.2)
    _, s, mean, rstd = residual_norm.residual_norm(z, x, weight, None, None, 0.0, 1e-5, 1.0, True)
    residual_norm.residual_norm_backward(z, s, mean, rstd, weight, None, 0.0, 1.0, True, x)
    gated.gated_backward(gated.gated(z, x, "silu"), z, x, "silu")
    gradients.clip_([torch.randn(size(3000)) for _ in range(3)], 0.1)
print("all kernels ran")
"""


def _python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(sanitizers.ROOT), os.environ.get("PYTHONPATH"))))
    given = os.environ | {"PYTHONPATH": path, "COMERA_KERNELS": "all"} | environment
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


@needs_compiler
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits a process's memory")
@pytest.mark.parametrize("limits", [12, pytest.param(160, marks=pytest.mark.faults)])
def test_scratch_memory_that_cannot_be_had_is_an_error(limits: int, record_property: Record) -> None:
    wrong = []
    kernels = ("low_rank", "mlp", "attention", "merge", "block_product")
    for name in kernels if limits > 12 else kernels[:2]:
        run = _python(LIMITED, name, str(limits))
        if run.returncode != 0:
            wrong.append(f"{name}: status {run.returncode} {run.stderr[-300:]}")
        elif int(run.stdout) == 0:
            wrong.append(f"{name}: always had enough")
    settle(record_property, "no memory for a kernel", limits * (5 if limits > 12 else 2), wrong)


@pytest.mark.faults
@pytest.mark.skipif(sanitizers._runtime() is None, reason="the compiler has no address sanitizer")
def test_random_shapes_under_sanitizers(tmp_path: Path, record_property: Record) -> None:
    runtime, use = sanitizers._runtime(), sanitizers.sanitized(tmp_path)
    assert runtime is not None
    wrong, rounds = [], 60
    for seed in range(4):
        options = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
        run = _python(use + RANDOM, str(rounds), str(seed), **options)
        if run.returncode != 0 or "all kernels ran" not in run.stdout:
            wrong.append(f"seed {seed}: {run.stderr[-1500:]}")
    settle(record_property, "sanitizers: rounds of all kernels, random shapes", 4 * rounds, wrong)


@pytest.mark.faults
def test_memory_is_flat_over_many_steps(record_property: Record) -> None:
    model = bert()
    optimizer = optimizer_of(model)

    def most() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(500):
        step(model, optimizer)
    before, steps, wrong = most(), 5000, []
    for _ in range(steps):
        step(model, optimizer)
    if (grown := most() - before) > 8 << 10:
        wrong.append(f"{grown} KB more than after 500 steps")
    if unavailable_reason() is None and kernel_memory.held().in_use:
        wrong.append(f"{kernel_memory.held().in_use} bytes of kernels' memory in use")
    settle(record_property, "soak: steps with memory unchanged", steps, wrong)
