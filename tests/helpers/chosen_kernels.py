"""A process chooses its compiled kernels once; tests let it choose again."""

from comera.kernels.cpp import library


def forget() -> None:
    """The next question for kernels is the first one."""
    library._functions.cache_clear()
    library._chosen.cache_clear()
