"""Dropout from a seed (random.h, residual_norm.cpp): its random numbers, its masks and its derivatives."""

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from comera.fusion.dropout import Dropout
from comera.kernels import select
from comera.kernels.cpp import residual_norm as kernels
from comera.kernels.cpp.library import call
from comera.ops.dropout import new_seed

from ...helpers.live import Live

pytestmark = pytest.mark.skipif(
    select.unavailable_reason() is not None, reason=f"no C++ kernels: {select.unavailable_reason()}"
)


def seed(number: int = 5) -> Tensor:
    return torch.tensor(number)


def factors(shape: tuple[int, ...], p: float, number: int = 5) -> Tensor:
    return kernels.dropout(torch.ones(shape), seed(number), p)


def threefry(counter: list[int], key: list[int], rounds: int) -> list[int]:
    """Salmon et al. (SC11), in numpy's arrays, which wrap around."""
    turns = [(10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20)]
    keys = np.array([*key, 0x1BD11BDA ^ key[0] ^ key[1] ^ key[2] ^ key[3]], np.uint32)
    x = np.array(counter, np.uint32) + keys[:4]
    for k in range(rounds):
        partners, turn = ([1, 3] if k % 2 == 0 else [3, 1]), np.array(turns[k % 8], np.uint32)
        x[[0, 2]] += x[partners]
        x[partners] = (x[partners] << turn | x[partners] >> (32 - turn)) ^ x[[0, 2]]
        if k % 4 == 3:
            x += np.roll(keys, -((k + 1) // 4))[:4]
            x[3:] += np.uint32((k + 1) // 4)
    return [int(word) for word in x]


def test_the_reference_is_threefry() -> None:
    # of Random123's known answers
    assert threefry([0] * 4, [0] * 4, 13) == [0x531C7E4F, 0x39491EE5, 0x2C855A92, 0x3D6ABF9A]
    assert threefry([0] * 4, [0] * 4, 20) == [0x9C6CA96A, 0xE17EAE66, 0xFC10ECD4, 0x5256A7D8]


@pytest.mark.parametrize(("key", "block"), [(0, 0), (7, 1), (2**64 - 3, 2**40 + 9), (2**33 + 1, 12345)])
def test_words_are_those_of_the_reference(key: int, block: int) -> None:
    words = (ctypes.c_uint32 * 32)()
    call("random_words", key - 2**64 if key >= 2**63 else key, block, words)
    low = 2**32 - 1
    for lane in range(8):
        exact = threefry([block & low, block >> 32, lane, 0], [key & low, key >> 32, 0, 0], 12)
        assert list(words)[lane::8] == exact


def test_entries_follow_the_words_in_the_order_of_memory() -> None:
    words = (ctypes.c_uint32 * 32)()
    p, found = 0.3, factors((4, 64), 0.3, -5)
    dropped, scale = kernels.rounded(p)
    for block in range(4):
        call("random_words", -5, block, words)
        halves = np.array(words, np.uint32).view(np.int16).reshape(4, 8, 2).transpose(0, 2, 1).reshape(64)
        exact = torch.from_numpy(np.where(halves.astype(int) >= dropped - 2**15, scale, 0)).float()
        assert torch.equal(found[block], exact)


@pytest.mark.parametrize("p", [1e-6, 1e-4, 0.1, 0.5, 0.9, 0.99999999])
def test_shares_and_scales(p: float) -> None:
    dropped, scale = kernels.rounded(p)
    share, n = 1 - dropped / 2**16, 2**20
    kept = factors((n,), p) > 0
    sigma = (share * (1 - share) / n) ** 0.5
    assert abs(kept.double().mean().item() - share) <= 4 * sigma
    assert scale * share == pytest.approx(1)
    assert factors((n,), p).max().item() == pytest.approx(scale)


def test_masks_have_no_pattern() -> None:
    kept = (factors((1024, 1024), 0.3) > 0).double()
    for means in (kept.mean(0), kept.mean(1)):
        assert means.std().item() == pytest.approx((0.21 / 1024) ** 0.5, rel=0.15)
    assert (kept.view(-1, 64).mean(0) - kept.mean()).abs().max() < 5 * (0.21 * 64) ** 0.5 / 1024  # places in a block
    flat = kept.flatten() - kept.mean()
    for apart in (1, 2, 7, 8, 16, 32, 64, 512, 1024):
        assert abs((flat[:-apart] * flat[apart:]).mean().item()) < 4 * 0.21 / 1024


def test_seeds_fix_masks_and_differ() -> None:
    torch.manual_seed(3)
    first, second = new_seed(), new_seed()
    torch.manual_seed(3)
    assert torch.equal(new_seed(), first)
    masks = [kernels.dropout(torch.ones(4096), s, 0.5) > 0 for s in (first, second, first)]
    assert torch.equal(masks[0], masks[2])
    assert abs((masks[0] == masks[1]).double().mean().item() - 0.5) < 4 * 0.5 / 64


@pytest.mark.parametrize(
    "shape", [(5, 9, 768), (3, 767), (70, 7), (6, 1), (17,), (0, 8), (4, 0), (3, 5000), ()], ids=str
)
def test_dropout_is_the_product_with_its_factors(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    flat = factors((x.numel(),), 0.4).view(shape)
    assert torch.equal(kernels.dropout(x, seed(), 0.4), x * flat)


def test_dropout_of_other_layouts() -> None:
    x = torch.randn(6, 50, 10).transpose(0, 2)
    y = kernels.dropout(x, seed(), 0.4)
    assert y.is_contiguous()
    assert torch.equal(y, x * factors((10, 50, 6), 0.4))


def test_dropout_layer_keeps_a_seed_and_has_derivatives_of_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Dropout(0.3), torch.randn(40, 50, requires_grad=True)
    with Live(layer) as live:
        y = layer(x)
        assert live.nbytes == y.nbytes + 8
    torch.manual_seed(1)
    y = layer(x)
    torch.manual_seed(1)
    f = layer(torch.ones(40, 50))
    assert torch.equal(y, x * f)
    (dx,) = torch.autograd.grad(y, x, 2 * x, create_graph=True)
    torch.testing.assert_close(dx, 2 * x * f)
    (ddx,) = torch.autograd.grad(dx.square().sum(), x)
    torch.testing.assert_close(ddx, 8 * x * f * f)
    monkeypatch.setenv("COMERA_KERNELS", "none")
    assert "Masked" in layer(x).grad_fn.name()
