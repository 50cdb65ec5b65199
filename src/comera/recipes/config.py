"""What the recipes' configurations share: checks of their fields, and the folder of a recipe's runs."""

from collections.abc import Mapping
from pathlib import Path

from comera.errors import ConfigError


def check_fields(settings: object, group: str, checks: Mapping[str, tuple[bool, str]]) -> None:
    """Raise ConfigError for the first field out of range. group: the name of `settings` on the command line, such as
    "data". checks: field -> (it is valid, what is expected)."""
    for name, (valid, expected) in checks.items():
        if not valid:
            raise ConfigError(f"{group}.{name}: expected {expected}, got {getattr(settings, name)!r}")


def runs_folder(out: str | None, recipe: str, method: str) -> Path:
    """The folder of a recipe's runs: `out`, by default runs/RECIPE-METHOD."""
    return typed_path(f"runs/{recipe}-{method}" if out is None else out, "out")


def typed_path(text: str, name: str) -> Path:
    """A path as a user types it, with ~ expanded. Raises ConfigError, with the option's `name`, for one that cannot
    be."""
    try:
        if not text.strip():
            raise ValueError("it is empty")
        text.encode()  # safetensors and YAML take no other paths
        path = Path(text).expanduser()
        path.resolve()
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"{name}: expected a path, got {text!r} ({error})") from None
    return path
