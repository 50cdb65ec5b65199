"""How the kernels are compiled: what their first use and the build of a wheel (hatch_build.py) have in common.

Imports nothing but Python's standard library: a wheel is built where neither torch nor comera is installed. The sources
do without torch's headers, so that one library serves every release of torch.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
# -fwrapv: bits of floats are shifted as signed integers; the last two let conversions and square roots be vectorized
FLAGS = ("-std=c++17", "-O2", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
NATIVE = "native"

_V2 = "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3"
_V3 = f"{_V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
# machine -> what the kernels of a wheel are compiled for (-march), the best first, and what /proc/cpuinfo says of a
# processor that has all of it
LEVELS = {
    "x86_64": {"x86-64-v4": f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl", "x86-64-v3": _V3, "x86-64-v2": _V2},
    "aarch64": {"armv8-a": "fp asimd"},
}
_SUM = hashlib.sha256().digest_size


def find() -> str | None:
    """Where the C++ compiler is; None if there is none. Folders relative to the working folder do not count."""
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    folders = os.pathsep.join(filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep)))
    found = (shutil.which(name, path=folders) for name in names)
    return next((path for path in found if path and os.path.isabs(path)), None)


def about(compiler: str) -> str:
    """What the compiler says of itself. Raises CalledProcessError."""
    return _run([compiler, "--version"])


def is_clang(compiler: str) -> bool:
    """Whether the compiler is Clang, which calls an OpenMP of its own. Raises CalledProcessError."""
    return "clang" in about(compiler)


def make(compiler: str, march: str, path: Path, *options: str) -> None:
    """Compile the kernels for processors of `march` into a library at `path`, one file a core at a time.

    The functions of OpenMP stay undefined: they are those of the library that torch has loaded, whatever its file is
    called, since a second one would compete for the same cores. Clang's are others, in a library that it brings.
    options: for the linker. Raises CalledProcessError if the compiler fails.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(prefix="comera-") as folder:
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        commands = [
            [compiler, *FLAGS, "-fopenmp", f"-march={march}", "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        openmp = ["-fopenmp"] if is_clang(compiler) else []
        _run([compiler, *FLAGS, *openmp, "-shared", *objects, "-o", str(path), *options])


def seal(path: Path, name: str) -> None:
    """Append its checksum to the library `name`, at `path` for now."""
    with open(path, "r+b") as file:
        checksum = _checksum(name, file.read())
        file.write(checksum)


def is_whole(path: Path) -> bool:
    """Whether this is a library as it was sealed, under its own name. Raises OSError if it cannot be read."""
    content = path.read_bytes()
    return content[-_SUM:] == _checksum(path.name, content[:-_SUM])


def source_texts() -> list[str]:
    """Everything that a library is made of, besides the compiler and the processor."""
    return [*FLAGS, *(source.read_text("utf-8") for source in sorted(SOURCES.glob("*.[ch]*")))]


def digest(texts: list[str]) -> str:
    """16 hexadecimal digits that stand for these texts."""
    return hashlib.sha256(chr(0).join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def prebuilt_name(level: str, version: str) -> str:
    """The file name of a wheel's library. version: the digest of its `source_texts`, so that no other one is loaded."""
    return f"{level}-{version}.so"


def levels() -> list[str]:
    """The levels of this machine's kind that its processor has, the best first."""
    words = set(processor().split())
    return [level for level, needed in LEVELS.get(platform.machine(), {}).items() if words.issuperset(needed.split())]


def processor() -> str:
    """What distinguishes kinds of processors: several machines may share a cache folder."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.exists() else []
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)})) or platform.processor()


def _run(command: list[str]) -> str:
    run = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace")
    return run.stdout


def _checksum(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest()
