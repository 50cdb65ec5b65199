"""What the wheel and the sdist hold and claim."""

import os
import platform
import re
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.helpers.distributions import ROOT, build, unpacked

from comera.extras import NAMES, TRAIN
from comera.kernels.cpp import compiler

PREBUILT = "comera/kernels/cpp/prebuilt/"
SOURCE = ROOT / "src" / "comera"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


needs_gcc = pytest.mark.skipif(
    platform.machine() not in compiler.LEVELS or compiler.find() is None,
    reason="no GCC, or a machine that wheels hold no kernels for",
)


def files_of(archive: Path) -> dict[str, bytes]:
    """The files of a wheel or of an sdist, whose own folder is left out of their names."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        members = [member for member in sdist.getmembers() if member.isfile()]
        return {member.name.partition("/")[2]: sdist.extractfile(member).read() for member in members}  # type: ignore[union-attr]


@pytest.fixture(scope="session")
def wheel(built: Path) -> dict[str, bytes]:
    (archive,) = built.glob("*.whl")
    return files_of(archive)


@pytest.fixture(scope="session")
def sdist(built: Path) -> dict[str, bytes]:
    (archive,) = built.glob("*.tar.gz")
    return files_of(archive)


def test_both_hold_the_whole_package_and_its_licence(wheel: dict[str, bytes], sdist: dict[str, bytes]) -> None:
    source = {
        path.relative_to(SOURCE).as_posix(): path.read_bytes()
        for path in SOURCE.rglob("*")
        if path.is_file() and not {"__pycache__", "prebuilt"}.intersection(path.parts)
    }
    assert {"py.typed", "kernels/cpp/csrc/merge.cpp", "kernels/cpp/csrc/products.h", "recipes/lm/help.txt"} <= set(
        source
    )
    info = next(name.partition("/")[0] for name in wheel if name.endswith(".dist-info/METADATA"))
    assert {name: content for name, content in wheel.items() if not name.startswith((info, PREBUILT))} == {
        f"comera/{name}": content for name, content in source.items()
    }
    assert wheel[f"{info}/licenses/LICENSE"] == sdist["LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert all(sdist[f"src/comera/{name}"] == content for name, content in source.items())
    assert not [name for name in sdist if name.startswith(("tests/", "benchmarks/", "docs/", "runs/"))]


@needs_gcc
@pytest.mark.skipif(os.environ.get("COMERA_WHEEL_KERNELS") == "none", reason="a pure wheel was asked for")
def test_the_wheel_has_kernels_for_every_level_of_its_machine(built: Path, wheel: dict[str, bytes]) -> None:
    (archive,) = built.glob("*.whl")
    levels = compiler.LEVELS[platform.machine()]
    assert archive.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    prebuilt = {PREBUILT + name for name in compiler.names(levels)}
    assert {name for name in wheel if name.startswith(PREBUILT)} == prebuilt
    assert len({wheel[name] for name in prebuilt}) == len(levels)
    assert b"Root-Is-Purelib: false" in next(text for name, text in wheel.items() if name.endswith("/WHEEL"))


@pytest.mark.parametrize("why", ["asked for", "no compiler", "broken compiler"])
def test_a_pure_wheel_says_why(why: str, tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'error: no such flag' >&2\nexit 1\n")
    broken.chmod(0o755)
    none_found = "no C++ compiler was found (CXX, c++, g++)"
    variables, said = {
        "asked for": ({"COMERA_WHEEL_KERNELS": "none"}, "COMERA_WHEEL_KERNELS=none"),
        "no compiler": ({"CXX": "", "PATH": str(tmp_path / "missing")}, none_found),
        "broken compiler": ({"CXX": str(broken)}, f"{broken} could not compile them: error: no such flag"),
    }[why]
    shown = build(ROOT, tmp_path / "dist", "-t", "wheel", **variables)
    assert shown.count("without compiled kernels: ") == 1
    assert f"without compiled kernels: {said}\n" in shown
    (archive,) = (tmp_path / "dist").glob("*.whl")
    assert archive.name.endswith("-py3-none-any.whl")
    assert not [name for name in files_of(archive) if name.startswith(PREBUILT)]


def test_the_sdist_builds_the_same_wheel(
    request: pytest.FixtureRequest, built: Path, wheel: dict[str, bytes], tmp_path: Path
) -> None:
    if request.config.getoption("--built", default=None) is None:
        pytest.skip("the wheel is built from the sdist, and the test above compares it with this tree")
    build(unpacked(built, tmp_path), tmp_path / "dist", "-t", "wheel")
    (again,) = (tmp_path / "dist").glob("*.whl")
    assert files_of(again) == wheel


def test_the_versions_claimed_are_the_versions_tested(wheel: dict[str, bytes]) -> None:
    text = next(content for name, content in wheel.items() if name.endswith("/METADATA")).decode()
    claims = Parser().parsestr(text)
    claimed = re.findall(r"Programming Language :: Python :: (3\.\d+)", str(claims.get_all("Classifier")))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    tested = sorted(set(re.findall(r'python(?:-version)?: "(3\.\d+)"', workflow)))
    assert claimed == tested
    assert claims["Requires-Python"] == f">={claimed[0]}"
    lock = (ROOT / "requirements.lock").read_text("utf-8")
    releases = re.findall(r"^torch==2\.(\d+)", lock, re.MULTILINE) + re.findall(r'torch: "2\.(\d+)', workflow)
    (bounds,) = (need.specifier for need in map(Requirement, PROJECT["dependencies"]) if need.name == "torch")
    assert {minor for minor in range(100) if f"2.{minor}.0" in bounds} == {int(minor) for minor in releases}
    assert "1.99" not in bounds
    assert "3.0" not in bounds


def test_what_the_command_line_asks_for_is_the_extra_train() -> None:
    named = {Requirement(line).name for line in PROJECT["optional-dependencies"]["train"]}
    assert {NAMES.get(module, module) for module in TRAIN} == named - {
        "tensorboard"
    }  # only --train.tensorboard needs it


def test_the_extra_all_has_every_other_one_for_users() -> None:
    extras = PROJECT["optional-dependencies"]
    (line,) = extras["all"]
    assert Requirement(line).extras == set(extras) - {"all", "dev", "docs"}
