"""Imports a module of ours once the program has imported a library, without importing the library.

`import comera` uses it once: when a program imports the quantizers of transformers, as every `from_pretrained` does,
`comera.integrations.transformers_formats` tells them how to load compressed models.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def import_after(library: str, module: str) -> None:
    """Import `module` once `library` has been imported: now, if it has been already.

    A version of the library that lacks what `module` needs goes on without it; a warning says so.
    """
    if library in sys.modules:
        _import(module)
    else:
        sys.meta_path.insert(0, _Watch(library, module))


def _import(module: str) -> None:
    try:
        import_module(module)
    except ImportError as error:
        warnings.warn(f"{module} cannot be used ({error}): update the library that it is for", stacklevel=2)


class _Watch(MetaPathFinder):
    """Waits for one import: finds the library as it would be found otherwise, and adds ours to its execution."""

    def __init__(self, library: str, module: str) -> None:
        self.library, self.module = library, module

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
                _import(self.module)

            loader.exec_module = execute_both  # type: ignore[method-assign, assignment]
        return spec
