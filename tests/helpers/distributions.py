"""Builds distributions of the source tree, and runs programs that cannot see that tree."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(tree: Path, folder: Path, *options: str, **variables: str) -> str:
    """Build the distributions of a source tree into a folder; returns what that prints."""
    shown = run(sys.executable, "-m", "hatchling", "build", "-d", str(folder), *options, cwd=tree, **variables)
    return shown.stdout + shown.stderr


def unpacked(folder: Path, into: Path) -> Path:
    """The source tree of the sdist in a folder."""
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(into, filter="data")
    (tree,) = into.iterdir()
    return tree


def run(*command: str, cwd: Path, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must end with this exit status, and that sees nothing of this process's paths."""
    env = environment() | variables
    shown = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    assert shown.returncode == code, shown.stderr
    return shown


def environment() -> dict[str, str]:
    """The variables of this process, without its module path."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
