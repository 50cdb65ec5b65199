"""Does something when another library is imported, without importing it.

`import comera` uses it once: as soon as a program imports the quantizers of transformers, as every
`from_pretrained` does, `comera.integrations.transformers_formats` tells them how to load compressed models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def on_import(name: str, act: Callable[[], object]) -> None:
    """Call `act` once the module `name` has been imported: now, if it has been already."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Watch(name, act))


class _Watch(MetaPathFinder):
    """Waits for one import: finds the module as it would be found otherwise, and adds `act` to its execution."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self.name, self.act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        loader = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                self.act()

            loader.exec_module = execute_and_act  # type: ignore[method-assign]  # this module's own loader
        return spec
