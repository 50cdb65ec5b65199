"""FLOP counters see the kernels as the torch products that they stand for."""

import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from comera.kernels.cpp import compiler
from comera.kernels.cpp.library import operation
from comera.ops import mlp as mlp_room
from comera.ops.attention import attention
from comera.ops.block_product import block_product
from comera.ops.low_rank import low_rank, pairs
from comera.ops.merge import merge
from comera.tt.shapes import btt_spec, tt_spec

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")


def counted(run, setting, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", setting)
    with FlopCounterMode(display=False) as counter:
        run().sum().backward()
    return counter.get_total_flops()


def merging():
    spec = tt_spec(24, 30, order=6, rank=4)
    torch.manual_seed(0)
    trains = [
        [torch.randn(s, requires_grad=True) for s in (*spec.core_shapes, *((r,) for r in spec.inner_ranks))]
        for _ in range(3)
    ]
    factors = merge([spec] * 3, trains, 0.0, torch.float32)
    return torch.cat([factor.flatten() for pair in factors for factor in pair])


def mlp():
    torch.manual_seed(0)
    shapes = ((40, 12), (3, 12), (4, 24), (3, 24), (3, 12))
    x, *flat = (torch.randn(shape, requires_grad=True) for shape in shapes)
    up, down = pairs(flat)
    return mlp_room.mlp(x, [up], "gelu", down)


def projecting():
    torch.manual_seed(0)
    shapes = ((20, 12), (5, 12), (6, 30), (9, 12), (10, 8))
    x, *flat = (torch.randn(shape, requires_grad=True) for shape in shapes)
    return torch.cat(low_rank(x, *pairs(flat)), 1)


def attending():
    q, k, v = (torch.randn(2, 3, 40, 8, requires_grad=True) for _ in range(3))
    return attention(q, k, v, dropout=0.1)


def multiplying_blocks():
    torch.manual_seed(0)
    spec = btt_spec(24, 30, rank=2)
    shapes = (20, 24), (spec.sizes[0], spec.ranks[1]), (spec.ranks[1], spec.sizes[1]), (30,)
    x, r_NK, l_KM, bias = (torch.randn(shape, requires_grad=True) for shape in shapes)
    return block_product(x, r_NK, l_KM, spec, bias)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_and_profilers_see_the_kernels(monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "merge")
    plain = merging()
    with Names() as names:
        seen = merging()
        seen.sum().backward()
    assert [name for name in names.seen if "comera" in name] == [
        "comera.merge.default",
        "comera.merge_backward.default",
    ]
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        profiled_too = merging()
        profiled_too.sum().backward()
    assert {"comera::merge", "comera::merge_backward"} <= {event.key for event in profiled.key_averages()}
    assert torch.equal(plain, seen)
    assert torch.equal(plain, profiled_too)


def test_calls_go_through_the_dispatcher_only_while_something_sees_them():
    got = []

    @operation()
    def first_of(tensors: list[torch.Tensor]) -> torch.Tensor:
        got.append(tensors)
        return tensors[0].clone()

    given = [torch.ones(2), torch.zeros(3)]
    first_of(given)
    assert got[0] is given
    with Names() as names:
        first_of(given)
    assert got[1] is not given
    assert names.seen[0] == "comera.first_of.default"


@pytest.mark.parametrize("run", [projecting, mlp, attending])
def test_as_many_as_torchs(run, monkeypatch):
    assert counted(run, "low_rank,mlp,attention", monkeypatch) == counted(run, "none", monkeypatch) > 0


def test_the_backward_of_block_products_makes_the_first_product_again(monkeypatch):
    ours, torchs = (counted(multiplying_blocks, setting, monkeypatch) for setting in ("block_product", "none"))
    spec = btt_spec(24, 30, rank=2)
    assert ours - torchs == 2 * 20 * spec.ranks[1] * spec.sizes[0]
    assert torchs == 6 * 20 * spec.ranks[1] * sum(spec.sizes)


def test_modes_see_block_products():
    with Names() as names:
        multiplying_blocks().sum().backward()
    kernels = [name for name in names.seen if "comera" in name]
    assert kernels == ["comera.block_product.default", "comera.block_product_backward.default"]


def test_merging_makes_its_partial_products_twice(monkeypatch):
    ours, torchs = (counted(merging, setting, monkeypatch) for setting in ("merge", "none"))
    spec = tt_spec(24, 30, order=6, rank=4)
    assert 1 < ours / torchs < 4 / 3, spec


@pytest.mark.parametrize("first", ["torch.utils.flop_counter", "comera.kernels.cpp.low_rank"])
def test_formulas_are_registered_whatever_is_imported_first(first):
    code = (
        f"import {first}, comera.kernels.cpp.low_rank, torch.utils.flop_counter as counter;"
        "import torch; assert torch.ops.comera.low_rank in counter.flop_registry"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
