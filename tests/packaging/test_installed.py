"""The wheel, installed where the source tree cannot be seen: it works, says what is missing, and can be interrupted."""

import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.helpers.distributions import environment, run

from comera.kernels.cpp import compiler

STEPS = Path(__file__).parent / "first_steps.py"
COMMANDS = ("train lm", "train dlrm", "compare lm", "inspect a", "estimate lm", "export a --to onnx --out b")
COMMANDS += ("generate a b", "score a b --out c", "completion bash")
# trains a step on fused kernels and prints which these are, what ran and how many libraries of OpenMP are loaded
KERNELS = """
import torch, comera
from comera.kernels.cpp import library
from comera.optim import AdamW
ran, call = set(), library._functions()
for name, function in list(call.items()):
    call[name] = function._replace(run=lambda *given, name=name, run=function.run: ran.add(name) or run(*given))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(96, 384), torch.nn.GELU(), torch.nn.Linear(384, 96))
comera.tensorize_(model, comera.TensorizeConfig(linear=comera.TT()), ratio=4)
comera.fuse_(model)
optimizer = AdamW(comera.param_groups(model, lr=1e-3))
model(torch.randn(64, 96)).square().mean().backward()
optimizer.step()
files = {line.split()[-1] for line in open("/proc/self/maps")}
print(library.version())
print(*ran)
print(len([file for file in files if any(name in file for name in ("libgomp", "libomp", "libiomp"))]))
"""
# what is imported -> what it says that it needs
ROOMS = {
    "comera.trainer": "comera.trainer needs accelerate, rich, pyyaml: pip install 'comera[train]'",
    "comera.trainer.loop": "comera.trainer needs accelerate, rich, pyyaml: pip install 'comera[train]'",
    "comera.baselines": "comera.baselines needs accelerate, rich, pyyaml: pip install 'comera[train]'",
    "comera.report": "comera.report needs accelerate, rich, pyyaml: pip install 'comera[train]'",
    "comera.recipes.lm.recipe": "comera.recipes.lm needs accelerate, datasets, rich, tokenizers",
    "comera.recipes.code_lm.recipe": "comera.recipes.code_lm needs accelerate, datasets, rich, tokenizers",
    "comera.recipes.classify.recipe": "comera.recipes.classify needs accelerate, datasets, rich, tokenizers",
    "comera.recipes.dlrm.recipe": "comera.recipes.dlrm needs accelerate, polars, rich, pyyaml: pip install",
    "comera.integrations.transformers": "needs transformers: pip install 'comera[train]'",
    "comera.integrations.lightning": "needs lightning: pip install lightning",
    "comera.integrations.peft": "comera.integrations.peft needs peft: pip install peft",
}


def test_a_model_is_converted_trained_saved_and_loaded(bare: Path, tmp_path: Path) -> None:
    shown = run(str(bare / "python"), "-I", str(STEPS), cwd=tmp_path)
    assert Path(shown.stdout.strip()).is_relative_to(bare.parent)
    assert shown.stderr == ""


def test_the_wheels_kernels_serve_where_there_is_no_compiler(bare: Path, tmp_path: Path) -> None:
    """A step of training runs on them, with torch's own OpenMP."""
    if not list(bare.parent.rglob("comera/kernels/cpp/prebuilt/*.so")):
        pytest.skip("the wheel was built without a compiler")
    away = {"PATH": str(tmp_path / "missing"), "CXX": ""}
    script = tmp_path / "step.py"
    script.write_text(KERNELS)
    shown = run(str(bare / "python"), "-I", str(script), cwd=tmp_path, **away)
    version, kernels, openmp = shown.stdout.splitlines()
    assert shown.stderr == ""
    assert re.fullmatch(r"(x86-64-v[234]|armv8-a)-[0-9a-f]{16}", version)
    assert {"merge", "merge_backward", "low_rank", "low_rank_backward"} <= set(kernels.split())
    assert openmp == "1"


def test_an_editable_installation_has_kernels_and_says_when_they_are_old(
    empty: Path, checkout: Path, compiler_variables: Mapping[str, str], tmp_path: Path
) -> None:
    if not compiler_variables or not compiler.levels():
        pytest.skip("no compiler, or a processor that there are no kernels for")
    pip = (str(empty / "pip"), "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--disable-pip-version-check", "--editable", str(checkout), cwd=tmp_path, **compiler_variables)
    folder = checkout / "src" / "comera" / "kernels" / "cpp"
    (made,) = (folder / "prebuilt").iterdir()
    code = "from comera.kernels.cpp import library; print(library.unavailable_reason(), library.version())"
    shown = run(str(empty / "python"), "-I", "-c", code, cwd=tmp_path)
    assert (shown.stdout, shown.stderr) == (f"None {made.stem}\n", "")
    with open(folder / "csrc" / "gated.cpp", "a") as file:
        file.write("// changed\n")
    shown = run(str(empty / "python"), "-I", "-c", code, cwd=tmp_path)
    assert "none are compiled from these sources" in shown.stdout
    assert shown.stderr.startswith("torch's own operations take the place of comera's C++ kernels: none are compiled")
    assert shown.stderr.count("\n") == 1


def test_every_command_without_the_extra_is_one_line(bare: Path, tmp_path: Path) -> None:
    for command in COMMANDS:
        shown = run(str(bare / "comera"), *command.split(), cwd=tmp_path, code=2)
        name = command.partition(" ")[0]
        assert shown.stderr.startswith(f"comera: comera {name} needs accelerate, ")
        assert shown.stderr.endswith(": pip install 'comera[train]'\n")
        assert shown.stderr.count("\n") == 1
    for command in ("--help", "--version", "train --help", "train lm --help", "export --help"):
        assert run(str(bare / "comera"), *command.split(), cwd=tmp_path).stderr == ""
    assert not list(tmp_path.iterdir())


def test_every_room_without_its_packages_is_one_line(bare: Path, tmp_path: Path) -> None:
    script = f"""
from importlib import import_module
for name, said in {ROOMS!r}.items():
    try:
        import_module(name)
    except ImportError as error:
        assert said in str(error) and "\\n" not in str(error), error
    else:
        raise AssertionError(name)
"""
    run(str(bare / "python"), "-I", "-c", script, cwd=tmp_path)


@pytest.mark.parametrize("moment", [0.02, 0.05, 0.1, 0.2, 0.4, 1.0, 3.0])
def test_an_interrupted_command_leaves_no_traceback(moment: float, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    for name in "ab":
        (tmp_path / "code" / f"{name}.py").write_text(f"def {name}(x):\n    return x\n" * 200)
    options = ("--data.path", "code", "--data.held_out", "0.5", "--data.cache", "cache", "--data.vocab_size", "300")
    command = (str(whole / "comera"), "train", "code-lm", "--out", "run", *options)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()) as process:
        time.sleep(moment)
        process.send_signal(signal.SIGINT)
        shown = process.communicate()[1]
    if process.returncode == 130:
        assert "Traceback" not in shown
        assert "interrupted" in shown
    else:  # before the first line of the command: Python itself was starting, or importing that line
        assert process.returncode in (1, -signal.SIGINT)
        files = set(re.findall(r"/comera/([\w/]+\.py)", shown))
        assert files <= {"__init__.py", "_on_import.py", "_version.py", "__main__.py", "cli/interrupt.py"}
