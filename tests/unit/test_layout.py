"""The house keeps its shape: imports run one way, and the front door is small and light."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import comera

SRC = Path(comera.__file__).parent
REPOSITORY = SRC.parents[1]
# A room imports from its own floor and from those above it in this list, never from below.
FLOORS = (
    {"__init__", "_on_import", "_version", "errors", "extras", "files", "tables"},
    {"tt"},
    {"kernels"},
    {"ops"},
    {"nn"},
    {"fusion"},
    {"distributed"},
    {"convert", "rank"},
    {"optim"},
    {"fp8", "memory", "pretrained"},
    {"recompute"},
    {"adapters", "contrib", "graphs"},
    {"trainer"},
    {"integrations"},
    {"run"},
    {"baselines", "recipes"},
    {"report"},
    {"export"},
    {"cli", "__main__"},
)
FLOOR = {room: k for k, rooms in enumerate(FLOORS) for room in rooms}
NAMES = 20  # of the front door
parse = cache(ast.parse)  # every rule reads the same files


# --- what the source says -----------------------------------------------------------------------------------------


def modules(src: Path) -> dict[str, Path]:
    """Dotted name of each module under src, packages included -> its file."""
    found = {}
    for path in sorted(src.rglob("*.py")):
        parts = ("comera", *path.relative_to(src).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    return (*module.split("."), "__init__")[1]


def imports(src: Path) -> Iterator[tuple[str, int, str]]:
    """(module, line, imported module) for every import of comera in comera, at any depth of the code."""
    known = modules(src)
    for module, path in known.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
                origin = ".".join(part for part in (base, node.module) if part)
                inner = [f"{origin}.{alias.name}" for alias in node.names]
                # `from package import name`: the module of that name, else the package's own __init__
                names = [name if name in known or origin == "comera" else origin for name in inner]
            else:
                continue
            yield from ((module, node.lineno, name) for name in names if name.partition(".")[0] == "comera")


def texts(src: Path) -> Iterator[tuple[str, str]]:
    """(place, line) for every line of the source, the docs and the README, without the log, which names the past."""
    root = src.parents[1]
    files = [p for p in src.rglob("*") if p.suffix in (".py", ".pyi", ".cpp", ".h", ".html")]
    files += [p for p in (root / "docs").rglob("*.md") if not p.name.lower().startswith("log")]
    for path in sorted([*files, *root.glob("README.md")]):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            yield f"{path.relative_to(root).as_posix()}:{number}", line


# --- the rules: each gives the violations that it finds --------------------------------------------------------------


def imports_against_the_order(src: Path) -> list[str]:
    return [
        f"{module}:{line} imports {name}"
        for module, line, name in imports(src)
        if FLOOR.get(room(name), -1) > FLOOR.get(room(module), len(FLOORS))
    ]


def imports_of_the_front_door(src: Path) -> list[str]:
    """A file that imports `comera` itself imports every room through it, and hides which."""
    named = {f"comera.{place}" for place in FLOOR}
    return [
        f"{module}:{line} imports {name}"
        for module, line, name in imports(src)
        if name == "comera" or (name.count(".") == 1 and name not in named)
    ]


def imports_of_contributions(src: Path) -> list[str]:
    """What stands in contrib is chosen by name, and nothing else depends on it."""
    return [
        f"{module}:{line} imports {name}"
        for module, line, name in imports(src)
        if room(name) == "contrib" and room(module) != "contrib"
    ]


def circles(src: Path) -> list[str]:
    """Circles of imports between files, inside a room too; a function-local import does not hide one."""
    graph: dict[str, dict[str, None]] = {}
    for module, _, name in imports(src):
        graph.setdefault(module, {})[name] = None
    found, path, done = [], dict[str, None](), set[str]()

    def visit(module: str) -> None:
        if module in path:
            circle = list(path)[list(path).index(module) :]
            found.append(" -> ".join([*circle, module]))
        elif module not in done:
            path[module] = None
            for name in graph.get(module, {}):
                visit(name)
            del path[module]
            done.add(module)

    for module in graph:
        visit(module)
    return found


def imports_for_type_checkers(src: Path) -> list[str]:
    found = []
    for module, path in modules(src).items():
        for node in ast.walk(parse(path.read_text("utf-8"))):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                inside = ast.unparse(node)
                found += [f"{module}:{node.lineno}"] if re.search(r"(from|import) (comera|\.)", inside) else []
    return found


def rooms_unlike_the_floors(src: Path) -> list[str]:
    there = {room(module) for module in modules(src)}
    strange = [f"{name} stands on no floor" for name in sorted(there - set(FLOOR))]
    return strange + [f"{name} does not exist" for name in sorted(set(FLOOR) - there)]


def packages_without_all(src: Path) -> list[str]:
    def declares(path: Path) -> bool:
        body = parse(path.read_text("utf-8")).body
        targets = [node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)] for node in body]
        return any(isinstance(each, ast.Name) and each.id == "__all__" for found in targets for each in found)

    return [module for module, path in modules(src).items() if path.name == "__init__.py" and not declares(path)]


def citations_from_outside(src: Path) -> list[str]:
    """Citations of pages that are not in the repository, and of sections that docs/method.md does not have."""
    method = src.parents[1] / "docs" / "method.md"
    headings = re.findall(r"^## (\d+)\. ", method.read_text("utf-8") if method.exists() else "", re.MULTILINE)
    found = []
    for place, line in texts(src):
        if re.search(r"(?<![-\w])(METHOD|DESIGN)(\.md)?\b", line):
            found.append(f"{place}: {line.strip()}")
        cited = re.findall(r"method\.md §(\d+)", line)
        found += [f"{place}: docs/method.md has no §{number}" for number in cited if number not in headings]
    return found


def files_that_are_not_there(src: Path) -> list[str]:
    """Paths such as ops/linear.py, in comments and pages, that lead nowhere."""
    root = src.parents[1]
    roots = [root, root / "src", root / "docs", src, src / "kernels"]
    return [
        f"{place}: {name}"
        for place, line in texts(src)
        for name in re.findall(r"(?<![\w/.<{-])[a-z_]+/[\w/]*\w\.(?:py|cpp|md)\b", line)
        if "NAME" not in name and not any((at / name).exists() for at in roots)
    ]


RULES = (
    imports_against_the_order,
    imports_of_the_front_door,
    imports_of_contributions,
    circles,
    imports_for_type_checkers,
    rooms_unlike_the_floors,
    packages_without_all,
    citations_from_outside,
    files_that_are_not_there,
)


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps(rule: Callable[[Path], list[str]]) -> None:
    found = rule(SRC)
    assert not found, "\n".join(found)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """The source folder of a house that keeps every rule."""
    src = tmp_path / "src" / "comera"
    for name in FLOOR:
        file = (
            src / f"{name}.py" if name.startswith("_") or (SRC / f"{name}.py").exists() else src / name / "__init__.py"
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("__all__: list[str] = []\n")
    (src / "ops" / "linear.py").write_text(
        "from comera.tt import spec\nfrom comera.ops import low_rank  # ops/linear.py\n"
    )
    (src / "ops" / "low_rank.py").write_text('"""docs/method.md §4; the kernels stand in cpp/low_rank.cpp."""\n')
    (src / "kernels" / "cpp").mkdir()
    (src / "kernels" / "cpp" / "low_rank.cpp").write_text("// C++\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "method.md").write_text("# The method\n\n## 4. Fast contraction\n")
    (tmp_path / "docs" / "log.md").write_text("Once there was contract/plan.py, see DESIGN.\n")
    assert [found for rule in RULES for found in rule(src)] == []
    return src


@pytest.mark.parametrize(
    ("rule", "file", "text", "found"),
    [
        (imports_against_the_order, "tt/spec.py", "def f():\n    from comera.trainer import loop\n", "comera.trainer"),
        (imports_against_the_order, "tt/spec.py", "from ..nn import linear\n", "comera.nn"),
        (imports_against_the_order, "tt/spec.py", "from comera import cli\n", "comera.cli"),
        (imports_against_the_order, "kernels/triton.py", "import comera.ops.linear\n", "comera.ops.linear"),
        (imports_of_the_front_door, "trainer/loop.py", "from comera import TT\n", "comera.TT"),
        (imports_of_the_front_door, "trainer/loop.py", "import comera\n", "loop:1 imports comera"),
        (imports_of_contributions, "trainer/a.py", "def f():\n    import comera.contrib.b\n", "comera.contrib.b"),
        (imports_of_contributions, "contrib/a.py", "from comera.contrib.b import c\n", None),
        (circles, "ops/low_rank.py", "def f():\n    from comera.ops.linear import g\n", "comera.ops.low_rank"),
        (circles, "tt/__init__.py", "__all__ = ['f']\nfrom .spec import f\n", None),
        (imports_for_type_checkers, "nn/a.py", "if typing.TYPE_CHECKING:\n    from comera.nn import x\n", "nn.a:1"),
        (imports_for_type_checkers, "nn/a.py", "if TYPE_CHECKING:\n    import torch\n", None),
        (rooms_unlike_the_floors, "contract/__init__.py", "__all__ = []\n", "contract stands on no floor"),
        (packages_without_all, "ops/__init__.py", "from comera.ops.linear import tt_linear\n", "comera.ops"),
        (packages_without_all, "ops/__init__.py", "__all__ = []\n", None),
        (citations_from_outside, "ops/linear.py", '"""See METHOD §4."""\n', "METHOD §4"),
        (citations_from_outside, "ops/linear.py", '"""runs/lm-METHOD"""\n', None),
        (citations_from_outside, "ops/linear.py", '"""See docs/method.md §5."""\n', "docs/method.md has no §5"),
        (files_that_are_not_there, "ops/linear.py", "# as in contract/plan.py\n", "contract/plan.py"),
        (files_that_are_not_there, "ops/linear.py", "# an operation stands in ops/NAME.py\n", None),
        (files_that_are_not_there, "../../docs/a.md", "The loop: `comera/train/loop.py`.\n", "comera/train/loop.py"),
    ],
)
def test_a_rule_sees_a_violation(
    house: Path, rule: Callable[[Path], list[str]], file: str, text: str, found: str | None
) -> None:
    (house / file).parent.mkdir(exist_ok=True)
    (house / file).write_text(text)
    seen = rule(house)
    assert seen == [] if found is None else found in "\n".join(seen)


def test_a_rule_sees_a_room_that_is_gone(house: Path) -> None:
    (house / "files.py").unlink()
    assert rooms_unlike_the_floors(house) == ["files does not exist"]


# --- the front door --------------------------------------------------------------------------------------------------


def test_front_door_is_small_and_documented() -> None:
    assert len(comera.__all__) <= NAMES
    assert all(getattr(comera, name).__doc__ for name in comera.__all__)
    assert set(comera.__all__) <= set(dir(comera))
    with pytest.raises(AttributeError, match="has no attribute 'tensorise_'"):
        _ = comera.tensorise_


def test_type_checkers_see_the_names_that_python_sees() -> None:
    stub = ast.parse(SRC.joinpath("__init__.pyi").read_text("utf-8")).body
    seen = {alias.asname: node.module for node in stub if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(seen) == {*comera.__all__, *comera._ROOMS, "__version__"}
    for name, module in seen.items():
        origin = importlib.import_module(f"comera.{name}" if module == "comera" else str(module))
        assert getattr(comera, str(name)) is (origin if module == "comera" else getattr(origin, str(name)))


def test_what_a_package_declares_is_there() -> None:
    for name, path in modules(SRC).items():
        if path.name == "__init__.py":
            package = importlib.import_module(name)
            known = {*dir(package), *(each.stem for each in path.parent.iterdir())}  # __all__ may name modules
            assert set(getattr(package, "__all__", ())) <= known


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            "import comera; [getattr(comera, name) for name in comera.__all__]",
            "torch._dynamo torch._inductor torch.utils.flop_counter triton accelerate jsonargparse matplotlib rich "
            "tensorboard tokenizers transformers yaml peft pytorch_lightning",
        ),
        ("import comera", "torch"),
        ("from comera.cli.main import main; main(['--version'])", "torch yaml jsonargparse"),
        ("from comera.cli.main import main; main(['--help'])", "torch yaml jsonargparse"),
        ("from comera.cli.main import main; main(['train', 'lm', '--help'])", "torch yaml jsonargparse"),
        ("import runpy; runpy.run_module('comera', run_name='__main__')", "torch yaml jsonargparse"),
    ],
)
def test_a_fresh_process_imports_nothing_heavy(code: str, heavy: str) -> None:
    script = f"""
import sys
sys.argv = ["comera", "--help"]
try:
    {code}
except SystemExit:
    pass
print("imported:", *(name for name in {heavy.split()!r} if name in sys.modules))
"""
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "imported:"
