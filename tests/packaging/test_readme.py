"""README.md from top to bottom, in order, as a newcomer copies it: into a fresh folder, with nothing installed yet.

Every command of it runs with the cheapest options that take the same way, or has its reason in NOT_RUN.
"""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.distributions import ROOT, environment
from tests.unit.test_documents import Parsed, commands, differences, parse

TEXT = (ROOT / "README.md").read_text("utf-8")
BLOCK = re.compile(
    r"^```(?P<language>\w+)\n(?P<code>.*?)^```$|(?P<shell>(?:^ {4}\S[^\n]*\n)+)", re.MULTILINE | re.DOTALL
)
CODE = str(Path(json.__file__).parent)  # a package of the standard library in the place of all of it

SMALL = f"--data.path {CODE} --data.cache cache --data.vocab_size 300 --data.block_size 32 --data.held_out 0.5"
SMALL += " --model.hidden 64 --model.layers 1 --model.heads 2 --train.batch_size 2 --train.progress false"
# what a command gets besides, so that it takes seconds; what it does stays the same
CHEAP = {
    "pip install": "",
    "comera train": f"{SMALL} --train.steps 2",
    "comera compare": f"{SMALL} --seconds 1",
    "make help": "",
}
# what is only parsed: the commands that `make` would run, and those of them that are `comera`'s
NOT_RUN = {
    "make demo": "trains three models on the whole standard library for 8 minutes; tests/recipes has all of its parts",
    "make docs": "tests/unit/test_documents.py builds the site, with tools that are no part of the package",
    "make test": "would run this test",
}
STEPS = 600, 12  # of the Python block: as it says, and here


def blocks() -> Iterator[tuple[str, str]]:
    """(language, text) of every block in order; a block of shell is indented."""
    for found in BLOCK.finditer(TEXT):
        yield ("shell", found["shell"]) if found["shell"] else (found["language"], found["code"])


def lines() -> list[str]:
    """The commands of all blocks of shell, without their comments."""
    text = "".join(code for language, code in blocks() if language == "shell")
    return [shlex.join(words) for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def kind(line: str) -> str:
    return " ".join(shlex.split(line)[:2])


def test_every_command_runs_or_has_a_reason() -> None:
    assert {language for language, _ in blocks()} == {"shell", "python", "text", "bibtex"}
    assert {kind(line) for line in lines()} == {*CHEAP, *NOT_RUN}
    assert not set(CHEAP) & set(NOT_RUN)
    assert {kind(f"make {argv[0]}") for argv in commands(TEXT, "make")} <= {*CHEAP, *NOT_RUN}


def test_it_runs_from_top_to_bottom(empty: Path, checkout: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    # pip finds what it needs in the environment, where a newcomer's downloads it
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env = {**environment(), **offline, "PATH": f"{empty}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    env["COMERA_WHEEL_KERNELS"] = "none"  # compiling them takes long; test_contents.py has a wheel with them

    def run(*command: str, cwd: Path) -> str:
        shown = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
        assert shown.returncode == 0, f"{shlex.join(command)}\n{shown.stdout}{shown.stderr}"
        return shown.stdout

    printed = ""
    for language, code in blocks():
        if language == "python":
            usual, fewer = map(str, STEPS)
            assert usual in code
            printed = run("python", "-c", code.replace(usual, fewer), cwd=fresh)
        elif language == "text":  # what the block before it prints, though not what it has learned by then
            assert differences(code, printed, tolerance=2.0) == []
        for line in code.splitlines() if language == "shell" else ():
            words = shlex.split(line, comments=True)
            if kind(shlex.join(words)) in CHEAP:
                here = fresh if words[0] == "comera" else checkout
                run(*words, *shlex.split(CHEAP[" ".join(words[:2])]), cwd=here)

    where = run("python", "-c", "import comera; print(comera.__file__)", cwd=fresh)
    assert Path(where).is_relative_to(empty.parent)
    assert (fresh / "runs" / "lm-comera" / "report.html").is_file()
    assert (fresh / "runs" / "compare-lm" / "compare.html").is_file()


@pytest.mark.parametrize("line", NOT_RUN)
def test_the_others_are_parsed(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    new = f"VENV={tmp_path / 'new'}"  # as on a fresh machine, whatever environment this one has
    dry = subprocess.run(["make", "-n", *line.split()[1:], new], capture_output=True, text=True, check=True, cwd=ROOT)
    text = dry.stdout.replace("\\\n", " ")
    assert text.count("\n") > 1
    for found in re.findall(r"bin/comera ([^;\n]+)", text):
        with pytest.raises(Parsed):
            assert parse(shlex.split(found), monkeypatch) == 0
