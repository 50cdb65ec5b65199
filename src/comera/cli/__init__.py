"""The command line: `comera`, or `python -m comera`."""

__all__: list[str] = []
