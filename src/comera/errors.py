"""The errors that users see. Each message says what was expected, what came, where, and what to do."""

from collections.abc import Mapping


class ComeraError(Exception):
    """Base class of all errors that comera raises on purpose."""


class MissingPackageError(ComeraError, ImportError):
    """A part of comera was imported without an optional package that it needs."""


class SpecError(ComeraError, ValueError):
    """Modes, ranks and features do not fit together."""


class ConversionError(ComeraError, ValueError):
    """A model cannot be converted as requested; it is unchanged."""


class ConfigError(ComeraError, ValueError):
    """A configuration has an unknown field or a value out of range."""


class DataError(ComeraError, ValueError):
    """Input data is missing, empty or malformed."""


class CheckpointError(ComeraError, ValueError):
    """A checkpoint is truncated, foreign or has other shapes; nothing was loaded."""


class RankError(ComeraError, ValueError):
    """Rank adaptation cannot do what was requested; nothing was changed."""


class TrainingError(ComeraError, RuntimeError):
    """Training had to stop, for example at a NaN loss; the last good checkpoint was kept."""


class IdError(ComeraError, IndexError):
    """A row id is outside the embedding table."""


class WeightError(ComeraError, RuntimeError):
    """A write into the dense weight of a compressed layer, which is not stored; nothing was changed."""


def check_module(model: object) -> None:
    """Raise ConversionError for what is not a module, such as a path or a list of layers."""
    if not hasattr(model, "named_modules"):
        raise ConversionError(f"expected a torch.nn.Module, got {model!r:.200} ({type(model).__name__})")


def check_fields(
    settings: object, group: str, checks: Mapping[str, tuple[bool, str]], error: type[ComeraError] = ConfigError
) -> None:
    """Raise `error` for the first field of a configuration that is not valid.

    group: goes before a field's name in the message, such as "data.". checks: field -> (it is valid, what it must be).
    """
    for name, (valid, expected) in checks.items():
        if not valid:
            raise error(f"{group}{name} must be {expected}, got {getattr(settings, name)!r}")
