"""The house keeps its shape: imports run one way, the front door is small and light, files stay short."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import comera

SRC = Path(comera.__file__).parent
# left never imports right (DESIGN §2); rooms on one floor are named together
FLOORS = [
    {"errors", "files"},
    {"tt"},
    {"kernels"},
    {"ops"},
    {"nn"},
    {"fusion"},
    {"convert"},
    {"rank"},
    {"optim"},
    {"recompute", "pretrained"},
    {"trainer"},
    {"baselines", "recipes"},
    {"report"},
    {"export"},
    {"cli", "__main__"},
]
FLOOR = {room: k for k, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(path for path in SRC.rglob("*.py") if path != SRC / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> list[tuple[str, int]]:
    """Rooms that a file imports from, at any depth of its code, with the line."""
    found = []
    package = ("comera", *path.relative_to(SRC).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names = [f"comera.{alias.name}" for alias in node.names] if module == "comera" else [module]
        found += [(name.split(".")[1], node.lineno) for name in names if name.startswith("comera.")]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(SRC).as_posix())
def test_imports_run_one_way(path: Path) -> None:
    room = room_of(path)
    assert room in FLOOR, f"{path} stands in no room of the design"
    against = [
        f"{path.name}:{line} {room} -> {theirs}"
        for theirs, line in imported_rooms(path)
        if theirs in FLOOR and FLOOR[theirs] > FLOOR[room]
    ]
    assert not against


def test_the_rule_sees_an_import_against_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "tt" / "wrong.py"
    wrong.parent.mkdir()
    wrong.write_text(
        "def f():\n    from comera.trainer import loop\n    from ..nn import bonds\n    from comera import cli\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SRC", tmp_path)
    assert [room for room, _ in imported_rooms(wrong)] == ["trainer", "nn", "cli"]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(SRC).as_posix())
def test_files_stay_short(path: Path) -> None:
    assert path.read_text("utf-8").count("\n") <= 400


def test_front_door_is_small_and_complete() -> None:
    assert len(comera.__all__) <= 15
    assert all(getattr(comera, name).__doc__ for name in comera.__all__)


def test_import_needs_torch_and_safetensors_only() -> None:
    heavy = ["accelerate", "jsonargparse", "matplotlib", "rich", "tensorboard", "tokenizers", "transformers", "yaml"]
    code = f"import sys, comera; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
