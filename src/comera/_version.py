"""The version, once: read by hatch, the command line and what is written to disk."""

__version__ = "0.1.0"
