"""Compiles the kernels when comera is installed, and finds the library for this processor.

    python -m comera.kernels.cpp.compiler

compiles them for this processor into prebuilt/, beside the sources: what an editable installation does, and what a
checkout without one needs, or one whose csrc/ has changed. A wheel brings them for several levels of its processors
(hatch_build.py). A library is used only if its name has the digest of the sources and flags that are here, and its last
bytes are the checksum of its name and content; it is trusted as the Python files beside it are.

Imports nothing but Python's standard library: a wheel is built where neither torch nor comera is installed. The sources
do without torch's headers, so that one library serves every release of torch.
"""

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
# -fwrapv: bits of floats are shifted as signed integers; the last two let conversions and square roots be vectorized
FLAGS = ("-std=c++17", "-O2", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-fPIC")

_V2 = "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3"
_V3 = f"{_V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
# machine -> what kernels are compiled for (-march), the best first, and what /proc/cpuinfo says of a processor that has
# all of it
LEVELS = {
    "x86_64": {"x86-64-v4": f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl", "x86-64-v3": _V3, "x86-64-v2": _V2},
    "aarch64": {"armv8-a": "fp asimd"},
}
_SUM = hashlib.sha256().digest_size
_PATIENCE = 60  # seconds that a library's test of itself, which takes some milliseconds, may take
_TEST = (
    "import ctypes, sys; ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL); wrong = ctypes.CDLL(sys.argv[2]).comera_wrong;"
    "wrong.restype = ctypes.c_char_p; found = wrong(); sys.exit(found and 'wrong ' + found.decode())"
)


def find() -> str | None:
    """Where the C++ compiler is; None if there is none. Folders relative to the working folder do not count."""
    names = filter(None, (os.environ.get("CXX"), "c++", "g++"))
    folders = os.pathsep.join(filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep)))
    found = (shutil.which(name, path=folders) for name in names)
    return next((path for path in found if path and os.path.isabs(path)), None)


def install(folder: Path, wanted: Sequence[str]) -> list[Path] | str:
    """Compile the kernels for the levels `wanted` into a folder, and remove those of other sources from it.

    A library that this processor can run is tested by a process of its own, which may die of it (comera_wrong in
    exports.cpp). Returns the libraries; in one line why there are none.
    """
    program = find()
    if sys.platform != "linux" or not wanted:
        return "there are kernels for Linux on x86-64 and aarch64"
    if program is None:
        return "no C++ compiler was found (CXX, c++, g++)"
    made = [folder / name for name in names(wanted)]
    try:
        if "clang" in _run([program, "--version"]):
            return f"{program} is Clang, whose OpenMP is not torch's: set CXX to a GCC"
        folder.mkdir(exist_ok=True)
        for level, path in zip(wanted, made, strict=True):
            make(program, level, path)
            if level in levels() and (reason := _failure(program, path)):
                path.unlink()
                return f"{path.name} failed its test: {reason}"
        for left in set(folder.iterdir()) - {folder / name for name in names(LEVELS[platform.machine()])}:
            left.unlink(missing_ok=True)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        why = next((line for line in lines if "error" in line), lines[-1] if lines else f"status {error.returncode}")
        return f"{error.cmd[0]} could not compile them: {one_line(why)}"
    except OSError as error:
        return f"they could not be compiled: {one_line(str(error))}"
    return made


def make(compiler: str, level: str, path: Path) -> None:
    """Compile the kernels for processors of a level, one file a core at a time, into a library that is whole from the
    moment that it is at `path`. Raises CalledProcessError if the compiler fails, OSError if the folder cannot be used.

    The functions of OpenMP stay undefined: they are those of the library that torch has loaded, whatever its file is
    called, since a second one would compete for the same cores.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(prefix="comera-") as folder:
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        commands = [
            [compiler, *FLAGS, "-fopenmp", f"-march={level}", "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = Path(folder, path.name)
        _run([compiler, *FLAGS, "-shared", *objects, "-o", str(linked)])
        content = linked.read_bytes()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content + _checksum(path.name, content))
    beside.replace(path)


def is_whole(path: Path) -> bool:
    """Whether this is a library as it was made, under its own name. Raises OSError if it cannot be read."""
    content = path.read_bytes()
    return content[-_SUM:] == _checksum(path.name, content[:-_SUM])


def built() -> list[Path]:
    """The libraries of these sources for this processor, the best first."""
    return [path for name in names(levels()) if (path := PREBUILT / name).exists()]


def names(wanted: Iterable[str]) -> list[str]:
    """The file names of the libraries for these levels: with a digest of all that they are made of but the compiler."""
    texts = [*FLAGS, *(source.read_text("utf-8") for source in sorted(SOURCES.glob("*.[ch]*")))]
    digest = hashlib.sha256(chr(0).join(texts).encode()).hexdigest()[:16]
    return [f"{level}-{digest}.so" for level in wanted]


def levels() -> list[str]:
    """The levels of this machine's kind that its processor has, the best first."""
    words = set(processor().split())
    return [level for level, needed in LEVELS.get(platform.machine(), {}).items() if words.issuperset(needed.split())]


def processor() -> str:
    """What distinguishes kinds of processors."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.exists() else []
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)})) or platform.processor()


def one_line(text: str) -> str:
    """Text without line breaks."""
    return " ".join(text.split())


def _failure(program: str, path: Path) -> str | None:
    """Why a library must not be used; None if it passes its test."""
    openmp = _run([program, "-print-file-name=libgomp.so.1"]).strip()
    try:
        _run([sys.executable, "-I", "-c", _TEST, openmp, str(path)], timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return f"it did not end in {_PATIENCE} seconds"
    except subprocess.CalledProcessError as error:
        died = error.returncode < 0
        return signal.Signals(-error.returncode).name if died else one_line(error.stderr.strip().rpartition("\n")[2])
    return None


def _run(command: list[str], timeout: float | None = None) -> str:
    options = dict[str, object](encoding="utf-8", errors="replace", timeout=timeout)
    run = subprocess.run(command, check=True, capture_output=True, **options)  # type: ignore[call-overload]
    return str(run.stdout)


def _checksum(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest()


def main() -> None:
    """Compile the kernels for the best level of this processor, where this copy of comera looks for them."""
    made = install(PREBUILT, levels()[:1])
    if isinstance(made, str):
        sys.exit(f"the kernels were not compiled: {made}")
    print(*made, sep="\n")


if __name__ == "__main__":
    main()
