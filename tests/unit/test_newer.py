"""What is newer than the tests is said once, when it is imported."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import comera

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("library", comera._UNTESTED)
@pytest.mark.parametrize("first", ["comera", "the library"])
def test_a_release_that_no_test_ran_with_is_said_once(library: str, first: str, tmp_path: Path) -> None:
    package = tmp_path / library
    package.mkdir()
    untested = comera._UNTESTED[library]
    major, minor = map(int, untested.split("."))
    names = ("comera", library) if first == "comera" else (library, "comera")
    program = "; ".join(f"import {name}" for name in (*names, *names))
    for version, said in {f"{major}.{minor - 1}.9": 0, f"{untested}.0a0+git1": 1, f"{major}.{minor + 1}.0": 1}.items():
        (package / "__init__.py").write_text(f"__version__ = {version!r}")
        path = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'src')!r}]; "
        ran = subprocess.run([sys.executable, "-c", path + program], capture_output=True, text=True, check=True)
        expected = f"{library} {version} is newer than the releases that comera was tested with (before {untested})"
        assert ran.stderr.count("UserWarning") == ran.stderr.count(expected) == said


def test_the_first_releases_that_are_not_tested_are_those_that_the_pins_exclude() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pins = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    bounds = {found[1]: found[2] for pin in pins if (found := re.fullmatch(r"([a-z]+)>=[0-9.]+,<([0-9.]+)", pin))}
    assert {library: bounds[library] for library in comera._UNTESTED} == comera._UNTESTED
