"""Chooses the backend of each operation: a C++ kernel, a Triton kernel, or torch's own operations.

COMERA_KERNELS overrides the choice: "all", "none", or names of kernels separated by commas.

Shapes: B batch, I in features; M/N rows and columns, R rank of the left and right factor of a table.
"""

import json
import os
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comera._version import __version__
from comera.errors import ConfigError
from comera.kernels import float32_products
from comera.kernels.cpp import compiler, library
from comera.kernels.cpp.library import on_cpu
from comera.kernels.cpp.library import unavailable_reason as unavailable_reason
from comera.kernels.scaled_mm import unavailable_reason as scaled_mm_unavailable_reason
from comera.kernels.tracing import constant_when_traced, traced

TRITON = ("low_rank", "block_product", "lookup_rows")
CPP = tuple(sorted(path.stem for path in compiler.SOURCES.glob("*.cpp") if path.stem != "exports"))
NAMES = tuple(dict.fromkeys((*TRITON, *CPP)))

# The C++ low-rank products beside torch's, forward and backward together, 768 features, two cores of an AMD EPYC 7003:
# at rank 30 1.4 times faster with 128 rows, for one weight and for three, 1.5 with 8, 1.2 with 4,096; 1.0 to 1.2 at
# rank 128, as fast at 256. An AMD EPYC with AVX-512 (family 26), 614 and 1,024 rows, 3,072 to 50,265 features, rank 160
# to 256: 2.0 times faster than torch's by MKL, as fast as by oneDNN (benchmarks/heads.py).
LOW_RANK_LEAST_ROWS, LOW_RANK_MOST_RANK = 2, 256

# The C++ MLP beside torch in chunks, forward and backward, two cores of an AMD EPYC 7003: 4,096 rows 2.0 times faster
# at rank 64, 1.4 at 256, 512 rows 1.05 at 256; at rank 30 as fast with 16 rows, half as fast with one.
MLP_LEAST_ROWS, MLP_MOST_RANK = 16, 256

# The loss of a head by low_rank_cross_entropy.cpp beside chunks of logits, with all gradients, 1,024 rows and 32,768
# classes, a core of an AMD EPYC with AVX-512: 2.4 times faster at rank 8, 1.7 at 32, 1.5 at 64, 1.4 at 128; 614 rows
# and 50,265 classes 1.7 at 160. A dense head, two cores: of 56 features 1.75, of 96 1.55, of 128 1.5, of 192 1.1; 154
# rows and 8,192 classes 1.2 at 96 features, 0.9 at 128. With AVX2, 256 to 4,096 rows and 32,768 classes, 1.1 to 1.5 at
# 96 to 256 features; 1,024 rows and 8,192 classes 1.13 at 96, 1.06 at 128, 0.96 at 192.
HEAD_MOST_RANK, HEAD_MANY_CLASSES = 256, 16_384
HEAD_MOST_FEATURES, HEAD_MOST_FEATURES_OF_MANY = 96, 192

# Largest rank whose P stays in a Triton program's registers, and largest row that one program makes.
TRITON_MOST_RANK, TRITON_MOST_COLUMNS = 128, 4096

_PLAIN = (Tensor, nn.Parameter)  # subclasses may have no memory of their own


def supports(kernel: str, *tensors: Tensor) -> bool:
    """Whether the C++ `kernel` supports these operands: at least one, float32 in CPU memory, strided, not traced."""
    if traced() or not tensors or asked(kernel) is False:
        return False
    plain = (type(t) in _PLAIN and t.dtype == torch.float32 and on_cpu(t) and not t.is_neg() for t in tensors)
    regular = (t.layout is torch.strided and not t.is_nested for t in tensors)
    return all(plain) and all(regular) and unavailable_reason() is None


def is_irregular(tensor: Tensor) -> bool:
    """Whether a tensor is sparse or nested: then it has no rows at known places in memory."""
    return tensor.layout is not torch.strided or tensor.is_nested


def low_rank_backend(x_BI: Tensor, factors: Sequence[Tensor]) -> Literal["cpp", "triton", "torch"]:
    """The backend for y_k = x A_k B_k of all weights that share x. factors: A_1, B_1 (or [bias; B_1]), A_2, ..."""
    most_rank = max(a.shape[0] for a in factors[::2])
    if x_BI.device.type == "cuda":
        fits = min(a.shape[0] for a in factors[::2]) > 0 and most_rank <= TRITON_MOST_RANK
        one_dtype = all(factor.dtype == x_BI.dtype != torch.float64 for factor in factors)
        return "triton" if fits and one_dtype and triton_enabled("low_rank", x_BI.device) else "torch"
    fits = x_BI.shape[0] >= LOW_RANK_LEAST_ROWS and most_rank <= LOW_RANK_MOST_RANK
    return "cpp" if fits and supports("low_rank", x_BI, *factors) else "torch"


def block_product_backend(operands: Sequence[Tensor | None]) -> Literal["cpp", "triton", "torch"]:
    """The backend for products of a batch with block tensor trains.

    operands: x (B, I); R (N, K), L (K, M), bias or None and gates or None of each.
    """
    tensors = [each for each in operands if each is not None]
    x_BI = tensors[0]
    if x_BI.device.type == "cuda":
        fits = all(r_NK is not None and r_NK.shape[1] > 0 for r_NK in operands[1::4])
        one_dtype = all(each.dtype == x_BI.dtype != torch.float64 for each in tensors)
        return "triton" if fits and one_dtype and triton_enabled("block_product", x_BI.device) else "torch"
    return "cpp" if supports("block_product", *tensors) else "torch"


def mlp_backend(x_BI: Tensor, factors: Sequence[Tensor]) -> Literal["cpp", "torch"]:
    """The backend for an MLP. factors: A, B (or [bias; B]) of one or two weights of x, then of that to the output."""
    fits = max(a.shape[0] for a in factors[::2]) <= MLP_MOST_RANK and x_BI.shape[0] >= MLP_LEAST_ROWS
    return "cpp" if fits and supports("mlp", x_BI, *factors) else "torch"


def merge_backend(dtype: torch.dtype, tensors: Sequence[Tensor]) -> Literal["cpp", "torch"]:
    """The backend that merges cores into factors of `dtype`. tensors: all cores, gates and biases."""
    return "cpp" if dtype == torch.float32 and supports("merge", *tensors) else "torch"


def low_rank_head_backend(p_BR: Tensor, *weight: Tensor) -> Literal["cpp", "torch"]:
    """The backend for the loss of the logits P B + bias, with gradients. weight: [bias; B], B, or Bᵀ and the bias."""
    fits = p_BR.shape[1] <= HEAD_MOST_RANK
    return "cpp" if fits and supports("low_rank_cross_entropy", p_BR, *weight) else "torch"


def is_low_rank_head(weight_VI: Tensor, x_BI: Tensor) -> bool:
    """Whether a dense output layer is best treated as one of low rank, with its inputs as P."""
    classes, features = weight_VI.shape
    most = HEAD_MOST_FEATURES if classes < HEAD_MANY_CLASSES else HEAD_MOST_FEATURES_OF_MANY
    few = features <= most and not torch.is_autocast_enabled("cpu")
    return few and supports("low_rank_cross_entropy", x_BI, weight_VI)


def lookup_rows_backend(left_MNR: Tensor, right_MRN: Tensor) -> Literal["triton", "torch"]:
    """The backend for products of rows of a table's left factor with columns of its right one."""
    columns = power_of_two(left_MNR.shape[1]) * power_of_two(right_MRN.shape[2])
    fits = left_MNR.device.type == "cuda" and left_MNR.dtype != torch.float64 and columns <= TRITON_MOST_COLUMNS
    return "triton" if fits and triton_enabled("lookup_rows", left_MNR.device) else "torch"


@constant_when_traced
def scaled_product_backend(device: torch.device) -> Literal["scaled_mm", "emulated"]:
    """The backend for float8 products: torch's scaled product where the device has it, else a product in float32."""
    return "scaled_mm" if scaled_mm_unavailable_reason(device) is None else "emulated"


def triton_available() -> bool:
    """Whether triton is installed."""
    return find_spec("triton") is not None


def triton_enabled(kernel: str, device: torch.device | str) -> bool:
    """Whether the Triton `kernel`, a name in TRITON, is to run on this device: measured faster there, or asked for.

    Never under torch.compile, which fuses torch's own operations. Raises ConfigError for an unknown COMERA_KERNELS.
    """
    device = torch.device(device)
    if device.type != "cuda" or traced() or not triton_available():
        return False
    wanted = asked(kernel)
    if wanted is not None:
        return wanted
    return kernel in calibrated(torch.cuda.get_device_name(device))


def calibration_file() -> Path:
    """Where `comera calibrate` keeps which Triton kernels are faster than torch's products, by the GPU's name."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "comera" / "gpus.json"


def versions() -> str:
    """What a calibration holds for."""
    return f"torch {torch.__version__}, triton {metadata.version('triton')}, comera {__version__}"


def calibrations() -> tuple[dict[str, Any], str]:
    """What `comera calibrate` has kept, by the GPU's name, and what is wrong with the file; then nothing is taken."""
    try:
        known = json.loads(calibration_file().read_text("utf-8"))
        for gpu in known.values():
            if not isinstance(gpu["versions"], str) or not set(gpu["faster"]) <= set(TRITON):
                return {}, f"expected names of {', '.join(TRITON)} and versions, got {gpu}"
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        return {}, f"{type(error).__name__}: {error}"
    return known, ""


@cache
def calibrated(gpu: str) -> frozenset[str]:
    """The Triton kernels that `comera calibrate` found to be faster on a GPU, by its name; none where it never ran.

    Warns of a file that is damaged, or of other versions than those at hand; then there are none.
    """
    known, problem = calibrations()
    found = known.get(gpu)
    if found and found["versions"] != versions():
        problem = f"it is of {found['versions']}, here are {versions()}"
    if problem:
        warnings.warn(
            f"{calibration_file()}: {problem}. Torch's operations run in place of Triton kernels: run "
            "`comera calibrate` again",
            stacklevel=2,
        )
    return frozenset(found["faster"]) if found and not problem else frozenset()


def asked(kernel: str) -> bool | None:
    """Whether the user asks for `kernel`, a name in NAMES; None where the user leaves the choice to the measurements.

    Raises ConfigError when COMERA_KERNELS names an unknown kernel.
    """
    names = _names(os.environ.get("COMERA_KERNELS", ""))
    return None if names is None else kernel in names


def kernels_in_use(device: torch.device) -> str:
    """Names and version of the kernels that may compute on a device, "none" for torch's own operations, and the library
    of torch's products where that is not its default.

    Results of other ones differ by rounding. The version of the C++ kernels stands for source, flags and level.
    """
    products = ""
    if device.type == "cpu":
        names = cpp_in_use()
        version = library.version() if names else ""
        products = ", products by oneDNN" if float32_products.by_onednn() else ""
    else:
        names = [name for name in TRITON if triton_enabled(name, device)]
        version = f"triton {metadata.version('triton')}, comera {__version__}" if names else ""
    return (f"{' '.join(names)} ({version})" if names else "none") + products


def cpp_in_use() -> list[str]:
    """Names of the C++ kernels that may compute."""
    return [name for name in CPP if asked(name) is not False and unavailable_reason() is None]


def power_of_two(size: int) -> int:
    """The next power of two, in which Triton's blocks come."""
    return 1 << max(0, size - 1).bit_length()


@lru_cache(maxsize=8)
def _names(setting: str) -> frozenset[str] | None:
    if not setting:
        return None
    names = frozenset({"all": NAMES, "none": ()}.get(setting, tuple(setting.split(","))))
    if not names <= set(NAMES):
        raise ConfigError(f"expected COMERA_KERNELS to be all, none or some of {', '.join(NAMES)}; got {setting!r}")
    return names
