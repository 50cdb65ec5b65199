"""The built distributions, and environments that they are installed in, without a network and the source tree."""

import shutil
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.helpers.distributions import ROOT, build, run, unpacked

from comera.kernels.cpp.compiler import find


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--built", metavar="FOLDER", help="try the wheel and the sdist there, not ones compiled in haste")


@pytest.fixture(scope="session")
def compiler_variables(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The variables with which wheels are built here: for a compiler that does not optimize, which takes a third of the
    time, unless --built names a wheel."""
    compiler = find()
    if compiler is None or request.config.getoption("--built", default=None):
        return {}
    hasty = tmp_path_factory.mktemp("compiler") / "c++"
    hasty.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    hasty.chmod(0o755)
    return {"CXX": str(hasty)}


@pytest.fixture(scope="session")
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compiler_variables: Mapping[str, str]
) -> Path:
    """A folder with the sdist of this tree, and the wheel that is built from that."""
    folder = request.config.getoption("--built", default=None)
    if folder is not None:
        return Path(folder).absolute()
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "-t", "sdist")
    build(unpacked(folder, tmp_path_factory.mktemp("tree")), folder, "-t", "wheel", **compiler_variables)
    return folder


@pytest.fixture(scope="session")
def whole(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment with the wheel and every third-party package of this one."""
    return _install(_environment(tmp_path_factory.mktemp("whole"), Path(sysconfig.get_path("purelib"))), built)


@pytest.fixture
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment with pip and every third-party package of this one, without comera."""
    folder = _environment(tmp_path_factory.mktemp("empty"), Path(sysconfig.get_path("purelib")))
    pip = folder / "pip"
    pip.write_text(f'#!/bin/sh\nexec {folder / "python"} -m pip "$@"\n')
    pip.chmod(0o755)
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a checkout has and the commands need: an installation must write nothing into this tree."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    names = ".gitignore pyproject.toml hatch_build.py README.md LICENSE CHANGELOG.md CITATION.cff Makefile"
    for name in names.split():
        shutil.copy(ROOT / name, copy)
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    return copy


@pytest.fixture(scope="session")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment with the wheel, and what pip would install with it if no extra is named."""
    packages = tmp_path_factory.mktemp("packages")
    named = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    # a set: distributions of CUDA share the folder nvidia/
    for top in set().union(*(_top_levels(distribution(name)) for name in _closure(named, set()))):
        (packages / top.name).symlink_to(top)
    return _install(_environment(tmp_path_factory.mktemp("bare"), packages), built)


def _environment(folder: Path, packages: Path) -> Path:
    """bin/ of a new environment that finds packages in another folder."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "third_party.pth").write_text(f"{packages}\n")  # the .pth files there, of editable installs, do not count
    return folder / "bin"


def _install(programs: Path, built: Path) -> Path:
    """Install the wheel into the environment of these programs."""
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", str(wheel), cwd=programs)
    return programs


def _closure(requirements: Iterable[str], seen: set[str]) -> set[str]:
    """The names of the distributions that are required, and of all that these require without an extra."""
    for need in map(Requirement, requirements):
        if need.name not in seen and (need.marker is None or need.marker.evaluate({"extra": ""})):
            seen.add(need.name)
            _closure(distribution(need.name).requires or (), seen)
    return seen


def _top_levels(found: Distribution) -> set[Path]:
    """The files and folders of a distribution beside those of others."""
    parts = {file.parts[0] for file in found.files or () if ".." not in file.parts and "__pycache__" not in file.parts}
    return {Path(str(found.locate_file(part))) for part in parts}
