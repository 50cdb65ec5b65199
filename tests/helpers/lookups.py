"""Tables to look rows up in, every way to do that, and ids."""

import math

import pytest
import torch

from comera.ops.planner.plan import plan_lookup

from .specs import ttm

SPECS = [
    ttm((7,), (5,), 1),
    ttm((4, 5), (3, 2), 4, pad_rows=3),
    ttm((3, 4, 2), (2, 3, 2), 3, pad_rows=5, pad_cols=1),
    ttm((4, 5), (3, 2), 0),
    ttm((2, 3, 2, 2), (2, 1, 2, 3), 1, pad_rows=1),
]


def each_option(specs, planned=plan_lookup, *, dense=True):
    """For parametrize: each spec with each way that its plan knows, those of the whole table too if wanted."""
    cases = [(spec, option) for spec in specs for option in planned(spec, 8).options]
    cases = [(spec, option) for spec, option in cases if dense or option.strategy != "dense"]
    names = [f"{spec}-{option.strategy}-{option.ends}" for spec, option in cases]
    return pytest.mark.parametrize(("spec", "option"), cases, ids=names)


def cores_of(spec, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    cores = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in spec.core_shapes]
    return [(core / math.sqrt(max(1, core.shape[0]))).to(dtype).requires_grad_() for core in cores]


def some_ids(spec, *shape, dtype=torch.int64):
    """Repeated ids, the first and the last row among them where there is room."""
    ids = torch.randint(0, spec.num_embeddings, shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    if ids.numel() > 2:
        ids.view(-1)[:2] = torch.tensor([0, spec.num_embeddings - 1])
    return ids
