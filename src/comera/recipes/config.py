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
    return Path(out or f"runs/{recipe}-{method}").expanduser()
