"""The errors a user can meet. Each says what was expected, what came, where, and what to do."""


class ComeraError(Exception):
    """Base of every error that this library raises on purpose."""


class SpecError(ComeraError, ValueError):
    """Modes, ranks or features that do not fit together."""


class ConversionError(ComeraError, ValueError):
    """A model that cannot be converted as asked; the model is left as it was."""


class ConfigError(ComeraError, ValueError):
    """A configuration with an unknown field or a value out of range."""


class DataError(ComeraError, ValueError):
    """Input data that is missing, empty or malformed."""


class CheckpointError(ComeraError, ValueError):
    """A checkpoint that is truncated, foreign or of other shapes; nothing was loaded."""


class RankError(ComeraError, ValueError):
    """A rank-adaptation request that cannot be carried out; nothing was changed."""


class TrainingError(ComeraError, RuntimeError):
    """Training had to stop (NaN loss, ...); the last good checkpoint was kept."""


class IdError(ComeraError, IndexError):
    """A row id outside the embedding table."""
