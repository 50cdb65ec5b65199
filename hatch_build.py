"""Puts the compiled kernels into a wheel, for every level of this machine's kind of processor, and tags it for that.

Without a GCC, or with COMERA_WHEEL_KERNELS=none, the wheel is pure: its kernels are compiled at first use, or not used.
"""

import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "comera/kernels/cpp"


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling calls `initialize` before it collects the files of a wheel, and `finalize` after."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels; one line says why there are none."""
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="comera-wheel-")
        reason = self._compile(_compiler(Path(self.root) / "src" / PACKAGE), build_data)
        if reason is not None:
            self.app.display_warning(f"a wheel without compiled kernels: {reason}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if version != "editable":
            self._folder.cleanup()

    def _compile(self, compiler: ModuleType, build_data: dict[str, Any]) -> str | None:
        wanted = os.environ.get("COMERA_WHEEL_KERNELS", "all")
        if wanted not in ("all", "none"):
            raise ValueError(f"expected COMERA_WHEEL_KERNELS to be all or none, got {wanted!r}")
        if wanted == "none":
            return "COMERA_WHEEL_KERNELS=none"
        levels, program = compiler.LEVELS.get(platform.machine()), compiler.find()
        if sys.platform != "linux" or levels is None:
            return "there are kernels for Linux on x86-64 and aarch64"
        if program is None:
            return "no C++ compiler was found (CXX, c++, g++, clang++)"
        version = compiler.digest(compiler.source_texts())
        made = {}
        try:
            if compiler.is_clang(program):
                return f"{program} is Clang, whose OpenMP is not torch's"
            for level in levels:
                path = Path(self._folder.name) / compiler.prebuilt_name(level, version)
                self.app.display_info(f"compiling the kernels for {level}")
                compiler.make(program, level, path, "-s")
                compiler.seal(path, path.name)
                made[str(path)] = f"{PACKAGE}/prebuilt/{path.name}"
        except subprocess.CalledProcessError as error:
            return f"{error.cmd[0]} could not compile them: {' '.join(error.stderr.split())[-300:]}"
        build_data["force_include"].update(made)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().translate(str.maketrans('-.', '__'))}"
        return None


def _compiler(folder: Path) -> ModuleType:
    """comera.kernels.cpp.compiler, without comera and torch, which are not there while a wheel is built."""
    spec = importlib.util.spec_from_file_location("compiler", folder / "compiler.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
