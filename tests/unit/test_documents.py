"""README, docs and notebooks do what they say: their code runs, their commands parse, the site builds."""

import ast
import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import comera
from comera.cli import main as command_line

from ..helpers.scripts import load_script

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
BLOCK = re.compile(r"(?:^<!-- not run:(?P<reason>.*)-->\n+)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = 2  # blocks that only illustrate, in all pages: each says why


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    """The Python of a page that runs, block by block, each at its own lines of the page."""
    text = page.read_text("utf-8")
    found = [match for match in BLOCK.finditer(text) if match["reason"] is None]
    sessions = [example.source for example in doctest.DocTestParser().get_examples(text)]
    return ["\n" * text.count("\n", 0, match.start("code")) + match["code"] for match in found] + sessions


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text("utf-8"))["cells"] if "outputs" in cell]


def run(codes: list[str], origin: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Run blocks one after the other in one namespace and an empty folder; returns what they print."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for code in codes:
            exec(compile(code, name_of(origin), "exec"), namespace)
    return printed.getvalue()


# --- code -----------------------------------------------------------------------------------------------------------


# a page that is a notebook, too, runs as that
WITH_CODE = [page for page in PAGES if blocks(page) and page.stem not in {notebook.stem for notebook in NOTEBOOKS}]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT in transformers
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_blocks_of_a_page_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    printed = run(blocks(page), page, monkeypatch, tmp_path)
    shown = re.findall(r"^It prints[^\n]*\n\n```text\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert differences("".join(shown), printed) == []


def differences(shown: str, printed: str, tolerance: float = 0.1) -> list[str]:
    """Lines that a page shows and its code does not print, in order; numbers may be a tenth off, on other machines."""
    number = r"\d[\d,]*(?:\.\d+)?"
    lines, found = iter(printed.splitlines()), []
    for line in filter(None, shown.splitlines()):
        words = re.sub(number, "#", line)
        same = next((got for got in lines if re.sub(number, "#", got) == words), "")
        values = [[float(value.replace(",", "")) for value in re.findall(number, text)] for text in (line, same)]
        near = [abs(a - b) <= tolerance * abs(a) for a, b in zip(*values, strict=False)]
        found += [line] if not same or not all(near) else []
    return found


def test_what_a_page_shows_is_compared() -> None:
    printed = "warming up\nloss 2.11 after 300 steps\n1,280 parameters\n"
    assert differences("loss 2.05 after 300 steps\n1,281 parameters\n", printed) == []
    assert differences("loss 1.05 after 300 steps\n", printed) == ["loss 1.05 after 300 steps"]
    assert differences("2,000 parameters\n", printed) == ["2,000 parameters"]
    assert differences("1,280 elements\n", printed) == ["1,280 elements"]


def test_blocks_that_do_not_run_say_why() -> None:
    reasons = [match["reason"] for page in PAGES for match in BLOCK.finditer(page.read_text("utf-8"))]
    skipped = [reason.strip() for reason in reasons if reason is not None]
    assert all(skipped)
    assert len(skipped) <= NOT_RUN


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_notebooks_run_and_print_what_they_show(
    notebook: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cells = code_cells(notebook)
    printed = run(["".join(cell["source"]) for cell in cells], notebook, monkeypatch, tmp_path)
    shown = "".join("".join(each["text"]) for cell in cells for each in cell["outputs"] if "text" in each)
    assert [cell["execution_count"] for cell in cells] == list(range(1, 1 + len(cells)))
    assert len(shown.splitlines()) == len(printed.splitlines()) > 0
    assert differences(shown, printed, tolerance=0.5) == []  # results of training, which differ more than sizes do


def test_notebooks_are_those_of_their_pages() -> None:
    script = ROOT / "docs" / "mkdocs" / "notebooks.py"
    notebooks = load_script(script)
    for name, page in notebooks.PAGES.items():
        committed = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text("utf-8"))
        for cell in committed["cells"]:
            cell |= {"execution_count": None, "outputs": []} if "outputs" in cell else {}
        assert committed == notebooks.notebook(page), f"python {name_of(script)} writes examples/{name}.ipynb anew"


# --- commands ---------------------------------------------------------------------------------------------------------


def commands(text: str, program: str) -> list[list[str]]:
    """The arguments of `program` in every line of shell of a text; what comes before it in a line is dropped."""
    lines = re.findall(rf"^(?: {{4}}(?:.*\s)?|(?:torchrun|accelerate)\s.*\s|){program} +(.+)$", text, re.MULTILINE)
    lines += re.findall(rf"(?<!`)`{program} ([^`\n]+)`(?!`)", text)
    return [shlex.split(line, comments=True) for line in lines]


TODAYS = [page.read_text("utf-8") for page in PAGES if page.name != "log.md"]  # which names the past
COMMANDS = {shlex.join(argv): argv for text in TODAYS for argv in commands(text, "comera")}
WHOLE = [name for name, argv in COMMANDS.items() if len(argv) > 1 and "RECIPE" not in argv]  # the others are prose


class Parsed(Exception):  # noqa: N818
    """The command line has read all of its arguments."""


def parse(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Let the command line read its arguments, and stop it there: Parsed if they are good, else its exit code."""
    read, paths = command_line.parse, command_line.typed_path

    def stop(*args: Any, **options: Any) -> None:
        read(*args, **options)
        raise Parsed

    def path(text: str, name: str) -> Path:
        if argv[0] == "compare":  # which reads its recipe's options after that
            return paths(text, name)
        raise Parsed

    monkeypatch.setattr(command_line, "parse", stop)
    monkeypatch.setattr(command_line, "typed_path", path)
    try:
        return command_line.main(argv)
    except SystemExit as exit_:
        return int(exit_.code or 0)


@pytest.mark.parametrize("command", WHOLE)
def test_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    argv = COMMANDS[command]
    options = dict(pairwise(argv))
    left = {"--config": (options.get("--config"), "{}")}  # files that an earlier command would have left
    if argv[0] == "compare" and "--resume" in argv:
        left["--out"] = f"{options['--out']}/arguments.json", "[]"
    if argv[0] == "train" and {"--out", "--resume"} <= set(argv):
        left["--out"] = f"{options['--out']}/config.yaml", "{}"
    for name, text in left.values():
        if name is not None:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
    with contextlib.suppress(Parsed):
        assert parse(argv, monkeypatch) == 0  # it has printed its help, or what else it says at once


@pytest.mark.parametrize(
    "command", ["train lm --model.wide 3", "compare lm --methods", "export RUN --to paper --out x"]
)
def test_a_wrong_command_is_found(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse(command.split(), monkeypatch) == 2


def test_make_targets_are_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = {argv[0] for text in TODAYS for argv in commands(text, "make")}
    assert {"demo", "test", "docs"} <= named
    assert named <= targets


def test_every_section_of_the_log_is_in_its_index() -> None:
    """That each link of the index leads to a section is the site's to check."""
    text = (ROOT / "docs" / "log.md").read_text("utf-8")
    titles = re.findall("^## (20.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower())): title for title in titles}
    linked = set(re.findall(r"\]\(#([^)]+)\)", text.partition("\n## 20")[0]))
    assert len(anchors) > 50
    assert [title for anchor, title in anchors.items() if anchor not in linked] == [], "add it to docs/log.md's table"


def test_scripts_are_there() -> None:
    named = {argv[0] for text in TODAYS for argv in commands(text, "python")}
    scripts = {name for name in named if name.endswith(".py")}
    assert scripts
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


# --- the site ---------------------------------------------------------------------------------------------------------


def public_names() -> dict[str, Any]:
    """Everything that the public rooms offer, by its full name. `ops` and `recipes` are no part of the surface."""
    names = {f"comera.{name}": getattr(comera, name) for name in comera.__all__}
    front = set(map(id, names.values()))
    source = Path(comera.__file__).parent
    for file in sorted(source.rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        integration = parts[0] == "integrations" and parts[-1] != "__init__"
        if not integration and (parts[-1] != "__init__" or len(parts) != 2 or parts[0] in ("ops", "kernels")):
            continue
        room = ".".join(["comera", *parts]).removesuffix(".__init__")
        module = importlib.import_module(room)
        for name in declared(file):
            if id(getattr(module, name)) not in front:
                names[f"{room}.{name}"] = getattr(module, name)
    return names


def declared(file: Path) -> list[str]:
    """`__all__` of a file."""
    for node in ast.parse(file.read_text("utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            value = getattr(node, "value", None)
            return list(ast.literal_eval(value)) if isinstance(value, ast.List) else []
    return []


def reference_names() -> set[str]:
    """What the pages of the reference show with its docstring."""
    reference = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    return set(re.findall(r"^::: (\S+)$", reference, re.MULTILINE))


def test_every_public_name_is_in_the_reference() -> None:
    missing = sorted(set(public_names()) - reference_names())
    assert missing == [], f"add to docs/api/: {missing}"


def test_the_site_builds(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs is not installed: pip install 'comera[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {page: page.read_text("utf-8") for page in (tmp_path / "site").rglob("*.html")}
    assert len(pages) > 40
    element = r"(?:script|img|iframe|link rel=\"(?:stylesheet|preconnect|preload)\")"
    loads = re.compile(rf"<{element}[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*")
    foreign = [f"{page.name}: {found}" for page, text in pages.items() for found in loads.findall(text)]
    assert foreign == [], "a page loads something from another machine"
