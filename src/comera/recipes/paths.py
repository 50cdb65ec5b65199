"""Paths as users type them."""

from pathlib import Path

from comera.errors import ConfigError


def typed_path(text: str, name: str) -> Path:
    """A path with ~ expanded. name: of the option. Raises ConfigError for one that cannot be."""
    try:
        if not text.strip():
            raise ValueError("it is empty")
        text.encode()  # safetensors and YAML take no other paths
        path = Path(text).expanduser()
        path.resolve()
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"{name}: expected a path, got {text!r} ({error})") from None
    return path
