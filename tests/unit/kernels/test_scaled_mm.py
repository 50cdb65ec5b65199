"""The operands that torch's scaled product gets: layout, padding and scales; on a CPU torch runs it too, slowly."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from comera.kernels import scaled_mm as kernel
from comera.kernels import select

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(32, 48, 64), (1, 16, 16), (5, 7, 3), (1, 1, 1), (33, 30, 100), (16, 31, 16)]


def operands(shape, rowwise, left_dtype=E4M3):
    rows, contracted, columns = shape
    generator = torch.Generator().manual_seed(sum(shape))
    left = torch.randn(rows, contracted, generator=generator).to(left_dtype)
    right = torch.randn(columns, contracted, generator=generator).to(E4M3)
    scales = [2.0 ** torch.randint(-3, 4, (size if rowwise else 1, 1), generator=generator) for size in (rows, columns)]
    return left, scales[0], right, scales[1]


def exact(left, left_scale, right, right_scale):
    return (left.double() * left_scale) @ (right.double() * right_scale).t()


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("left_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_takes_the_operands(shape, left_dtype, rowwise):
    given = operands(shape, rowwise, left_dtype)
    found = kernel.scaled_mm(*given, torch.float32)
    assert (found.shape, found.dtype) == ((shape[0], shape[2]), torch.float32)
    # row-wise scaled products are rounded to bfloat16
    torch.testing.assert_close(found, exact(*given).float(), rtol=2**-8 if rowwise else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_a_device_demands(shape, rowwise, transposed, dtype, monkeypatch):
    calls = []

    def scaled_mm(mat1, mat2, scale1, recipe1, scale2, recipe2, output_dtype):
        calls.append((mat1, mat2, scale1, recipe1, scale2, recipe2, output_dtype))
        return torch.zeros(mat1.shape[0], mat2.shape[1], dtype=output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    left, left_scale, right, right_scale = operands(shape, rowwise, E5M2)
    if transposed:
        left, right = (each.t().contiguous().t() for each in (left, right))
    assert kernel.scaled_mm(left, left_scale, right, right_scale, dtype).dtype == dtype
    ((mat1, mat2, scale1, recipe1, scale2, recipe2, made),) = calls
    rows, contracted, columns = shape
    assert mat1.is_contiguous()  # row-major
    assert mat2.t().is_contiguous()  # column-major
    assert (mat1.dtype, mat2.dtype) == (E5M2, E4M3)
    assert mat1.shape[0] == rows
    assert mat1.shape[1] == mat2.shape[0]
    assert mat2.shape[0] % 16 == 0
    assert mat2.shape[1] % 16 == 0
    assert 0 <= mat2.shape[0] - contracted < 16
    assert 0 <= mat2.shape[1] - columns < 16
    assert scale1.dtype == scale2.dtype == torch.float32
    by_row = rowwise and max(rows, columns) > 1
    assert recipe1 == recipe2 == (ScalingType.RowWise if by_row else ScalingType.TensorWise)
    if by_row:
        assert (tuple(scale1.shape), tuple(scale2.shape)) == ((rows, 1), (1, mat2.shape[1]))
        assert scale1.is_contiguous()
        assert scale2.is_contiguous()
    else:
        assert scale1.numel() == scale2.numel() == 1
    assert made == (torch.bfloat16 if by_row else torch.float32 if dtype == torch.float64 else dtype)
    # what is padded is zero, so it adds nothing
    padded = torch.zeros(mat1.shape)
    padded[:, :contracted] = left.float()
    assert torch.equal(mat1.float(), padded)
    assert torch.equal(mat2.t()[:columns, :contracted].float(), right.float())
    assert mat2.float().count_nonzero() == right.float().count_nonzero()


def test_on_the_meta_device():
    """torch's own checks of shapes, without values."""
    left, left_scale, right, right_scale = (each.to("meta") for each in operands((33, 30, 100), rowwise=True))
    assert kernel.scaled_mm(left, left_scale, right, right_scale, torch.float32).shape == (33, 100)


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [
        ((9, 0), None, None),
        ((8, 9), None, None),
        ((12, 0), None, None),
        ((8, 6), None, "scaled products need a CUDA device of capability 8.9 or later, got 8.6"),
        ((9, 4), "6.4", "scaled products are used with CUDA only, got ROCm, whose float8 formats differ"),
    ],
)
def test_devices(capability, hip, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    device = torch.device("cuda", 0)
    assert kernel.unavailable_reason(device) == reason
    assert select.scaled_product_backend(device) == ("emulated" if reason else "scaled_mm")


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_other_devices(kind):
    device = torch.device(kind)
    assert kernel.unavailable_reason(device) == f"scaled products need a CUDA device, got {kind}"
    assert select.scaled_product_backend(device) == "emulated"
