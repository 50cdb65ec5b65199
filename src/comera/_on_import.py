"""Acts once the program has imported a library, without importing the library.

When a program imports the quantizers of transformers, as every `from_pretrained` does,
`comera.integrations.transformers_formats` tells them how to load compressed models. When it imports libraries that
could not load them, `comera.integrations.other_savers` lets these refuse to save them. When it imports torch's
counter of FLOPs, the kernels tell it theirs (`kernels/cpp/library.py`). When it imports a library that is newer
than the releases that comera was tested with, a warning says so.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(library: str, act: Callable[[], object]) -> None:
    """Call `act` once `library` has been imported: now, if it has been already."""
    if library in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Watch(library, act))


def import_after(library: str, module: str, call: str = "") -> None:
    """Import `module` once `library` has been imported, and call its function of the name `call`, if one is given.

    A version of the library that lacks what `module` needs goes on without it; a warning says so.
    """

    def act() -> None:
        try:
            imported = import_module(module)
        except ImportError as error:
            warnings.warn(f"{module} cannot be used ({error}): update the library that it is for", stacklevel=2)
        else:
            if call:
                getattr(imported, call)()

    when_imported(library, act)


def warn_if_newer(library: str, untested: str) -> None:
    """Warn once `library` has been imported, if it is of the release `untested` ("2.16") or a later one."""

    def act() -> None:
        version = str(getattr(sys.modules[library], "__version__", ""))
        if _numbers(version) >= _numbers(untested):
            warnings.warn(
                f"{library} {version} is newer than the releases that comera was tested with (before {untested}): "
                f"install one of those, or check your results against them",
                stacklevel=2,
            )

    when_imported(library, act)


def _numbers(version: str) -> list[int]:
    """Major and minor version."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


class _Watch:
    """Waits for one import: finds the library as it would be found otherwise, and adds `act` to its execution."""

    def __init__(self, library: str, act: Callable[[], object]) -> None:
        self.library, self.act = library, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.library:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        loader = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def execute_both(library: ModuleType) -> None:
                execute(library)
                sys.meta_path.remove(self)
                self.act()

            loader.exec_module = execute_both  # type: ignore[method-assign, assignment]
        return spec
