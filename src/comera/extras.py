"""Optional packages: what a part of comera needs besides torch, and how to get it."""

from importlib.util import find_spec

from comera.errors import MissingPackageError

# Of the extra `train`: what is imported -> the name under which it is installed, where that is another one.
TRAIN = (
    *("accelerate", "datasets", "filelock", "jsonargparse", "polars", "yaml", "rich"),
    *("shtab", "tokenizers", "transformers"),
)
NAMES = {"yaml": "pyyaml"}


def require(part: str, install: str, *modules: str) -> None:
    """Raise MissingPackageError, in one line, if one of the modules that a part of comera needs is not installed.

    Imports nothing. install: what to give pip, such as "comera[train]".
    """
    missing = [NAMES.get(module, module) for module in modules if not installed(module)]
    if missing:
        quoted = f"'{install}'" if "[" in install else install
        raise MissingPackageError(f"{part} needs {', '.join(missing)}: pip install {quoted}")


def installed(module: str) -> bool:
    """Whether a module of this name can be imported; imports nothing, unless it is inside a package."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # hidden, or without a specification
        return False
