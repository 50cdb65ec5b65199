"""Which library makes torch's float32 products, on processors of either kind."""

import os
from contextlib import suppress

import pytest
import torch

from comera.kernels import float32_products
from comera.kernels.float32_products import by_onednn, fastest, mkl_is_slow
from comera.kernels.select import kernels_in_use

AMD = "model name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f avx512_bf16"
INTEL = "model name\t: Intel(R) Xeon(R) Processor\nflags\t\t: fpu avx2 avx512f amx_tile"
OLDER_AMD = "model name\t: AMD EPYC 7003\nflags\t\t: fpu avx2"


@pytest.fixture(autouse=True)
def _fresh():
    mkl_is_slow.cache_clear()
    float32_products._keeps_float32.cache_clear()
    torch.set_float32_matmul_precision("highest")
    yield
    mkl_is_slow.cache_clear()
    float32_products._keeps_float32.cache_clear()
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def on(monkeypatch):
    def choose(words):
        monkeypatch.setattr(float32_products, "processor", lambda: words)

    return choose


@pytest.mark.parametrize(("words", "slow"), [(AMD, True), (INTEL, False), (OLDER_AMD, False), ("", False)])
def test_mkl_is_slow_on_amd_with_avx512(on, words, slow):
    on(words)
    assert mkl_is_slow() is (slow and torch.backends.mkl.is_available())


def test_onednn_multiplies_until_the_end_of_the_context(on, monkeypatch):
    on(AMD)
    monkeypatch.setattr(float32_products, "_error", lambda a, b: 4e-7)
    cpu = torch.device("cpu")
    assert not by_onednn()
    with suppress(KeyError), fastest("cpu"):
        assert by_onednn()
        assert kernels_in_use(cpu).endswith(", products by oneDNN")
        raise KeyError
    assert not by_onednn()
    assert "oneDNN" not in kernels_in_use(cpu)


def test_a_product_that_is_rounded_further_is_refused(on, monkeypatch):
    on(AMD)
    monkeypatch.setattr(float32_products, "_error", lambda a, b: 2e-3)
    with fastest("cpu"):
        assert not by_onednn()


def test_products_stay_exact_on_this_processor():
    """With the trial as it is: whatever is chosen here multiplies in float32."""
    a, b = torch.randn(96, 200), torch.randn(200, 64)
    with fastest("cpu"):
        assert float32_products._error(a, b) < 1e-5


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_users_own_choice_stays(on, precision):
    on(AMD)
    torch.set_float32_matmul_precision(precision)
    with fastest("cpu"):
        assert torch.get_float32_matmul_precision() == precision
    assert torch.get_float32_matmul_precision() == precision


def test_a_choice_for_one_backend_stays(on):
    on(AMD)
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    try:
        with fastest("cpu"):
            assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_onednn_keeps_few_shapes_unless_the_user_says_how_many(on, monkeypatch):
    on(AMD)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")  # to be restored
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "200")
    with fastest("cpu"):
        assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "128"
        assert os.environ["LRU_CACHE_CAPACITY"] == "200"


def test_other_devices_are_left_alone(on):
    on(AMD)
    with fastest("cuda"):
        assert not by_onednn()
