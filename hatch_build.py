"""Compiles the kernels when comera is installed: for this processor where an editable installation looks for them, else
into the wheel, for every level of this machine's kind of processor, and tags it for that.

Without a GCC, or with COMERA_WHEEL_KERNELS=none, there are none, one line says why, and the wheel is pure.
"""

import importlib.util
import os
import platform
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
        self._folder = tempfile.TemporaryDirectory(prefix="comera-wheel-")
        wanted, editable = os.environ.get("COMERA_WHEEL_KERNELS", "all"), version == "editable"
        if wanted not in ("all", "none"):
            raise ValueError(f"expected COMERA_WHEEL_KERNELS to be all or none, got {wanted!r}")
        compiler = _compiler(Path(self.root) / "src" / PACKAGE)
        if wanted == "none":
            made = "COMERA_WHEEL_KERNELS=none"
        elif editable:
            made = compiler.install(compiler.PREBUILT, compiler.levels()[:1])
        else:
            made = compiler.install(Path(self._folder.name), list(compiler.LEVELS.get(platform.machine(), ())))
        if isinstance(made, str):
            self.app.display_warning(f"without compiled kernels: {made}")
        elif not editable:
            build_data["force_include"].update({str(path): f"{PACKAGE}/prebuilt/{path.name}" for path in made})
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().translate(str.maketrans('-.', '__'))}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled for a wheel."""
        self._folder.cleanup()


def _compiler(folder: Path) -> ModuleType:
    """comera.kernels.cpp.compiler, without comera and torch, which are not there while a wheel is built."""
    spec = importlib.util.spec_from_file_location("compiler", folder / "compiler.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
