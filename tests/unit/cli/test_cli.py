"""The command line: help from the fields' docs, files and options, one line per mistake, exit codes."""

import ast
import dataclasses
import inspect
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helpers.run_folders import records
from tests.helpers.tiny_run import TINY, words

import comera
from comera import report
from comera.cli import main as cli
from comera.cli import options
from comera.cli.main import main
from comera.errors import TrainingError
from comera.rank.objective import EarlyStage
from comera.recipes.code_lm import recipe as code_lm
from comera.trainer.config import TrainConfig


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run that takes a second: real code, a tiny model, three steps on the CPU."""
    cache = tmp_path_factory.getbasetemp() / "data-cache"
    return words({**TINY, "data.cache": cache, "model.dropout": 0.1, "train.device": "cpu"})


def losses(folder: Path) -> list[tuple[str, int, float]]:
    return [(row["kind"], row["step"], row["loss"]) for row in records(folder) if "loss" in row]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"comera {comera.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["trian"], ["train"], ["train", "bert"], ["inspect"], ["compare"]])
def test_a_wrong_command_shows_its_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert capsys.readouterr().err.startswith("usage: comera")


def field_docs(kind: type) -> Iterator[tuple[str, str]]:
    """Names of a dataclass's fields, inherited ones included, with the docstring under each; where a class gives
    a field another default or type alone, that of its base."""
    seen = set[str]()
    for base in filter(dataclasses.is_dataclass, kind.__mro__):
        (body,) = (n.body for n in ast.walk(ast.parse(inspect.getsource(base))) if isinstance(n, ast.ClassDef))
        for node, following in pairwise(body):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(following, ast.Expr)
                and node.target.id not in seen
            ):
                seen.add(node.target.id)
                yield node.target.id, ast.literal_eval(following.value)


def test_the_whole_help_shows_every_field_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "code-lm", "--help-all"])
    printed = capsys.readouterr().out
    assert not re.search(r"Literal|Union|Optional|tuple|\bint\b|\bstr\b|\bbool\b", printed)
    shown = "".join(printed.split())  # however the lines are broken
    groups = {
        "": code_lm.CodeLMConfig,
        "data.": code_lm.CodeDataConfig,
        "model.": code_lm.ModelConfig,
        "compress.": code_lm.CompressConfig,
        "train.": TrainConfig,
        "train.early.": EarlyStage,
    }
    for prefix, kind in groups.items():
        docs = dict(field_docs(kind))
        assert set(docs) == {field.name for field in dataclasses.fields(kind)}
        for name, text in docs.items():
            assert f"--{prefix}{name}" in shown
            assert "".join(text.split()).rstrip(".") in shown


def test_options_override_the_file_and_the_file_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("method: dense\ntrain:\n  seed: 3\n  batch_size: 5\ncompress:\n  rank: [1, 4, 1]\n")
    argv = ["--config", str(file), "--train.batch_size", "6", "--data.suffixes", "[.py, .c]"]
    _, config, resume = options.parse("train", "code-lm", argv)
    assert (config.method, config.train.seed, config.train.batch_size, resume) == ("dense", 3, 6, False)
    assert (config.data.suffixes, config.compress.rank) == ((".py", ".c"), (1, 4, 1))
    assert config.train.lr == code_lm.preset("dense").train.lr


@pytest.mark.parametrize("recipe", ["lm", "code-lm", "classify"])
@pytest.mark.parametrize("name", ["text", "text_field"])
def test_the_column_of_a_text_has_one_name_everywhere_and_the_other_stays(
    recipe: str, name: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"data:\n  path: x.csv\n  {name}: body\n")
    for argv in (["--config", str(file)], ["--data.path", "x.csv", f"--data.{name}", "body"]):
        data = options.parse("train", recipe, argv)[1].data
        assert getattr(data, "text" if recipe == "classify" else "text_field") == "body"
    _, config, _ = options.parse("train", "mnli", ["--data.premise_field=question", "--data.label_field", "answer"])
    assert (config.data.text, config.data.label) == ("question", "answer")


def test_each_method_starts_from_its_preset_and_options_override_it() -> None:
    for method in ("dense", "comera"):
        assert options.parse("train", "code-lm", ["--method", method])[1] == code_lm.preset(method)
    _, config, _ = options.parse("train", "code-lm", ["--train.lr", "0.5", "--method", "dense"])
    assert config == dataclasses.replace(
        code_lm.preset("dense"), train=dataclasses.replace(code_lm.preset("dense").train, lr=0.5)
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--train.stepz", "3"], "unknown field --train.stepz: did you mean train.steps"),
        (["--lr=1"], "unknown field --lr: did you mean train.lr?"),
        (["--colour", "red"], "unknown field --colour: no field is similar"),
        (["--train.steps", "many"], "train.steps: expected an integer or null, got many"),
        (["--train", "fast"], "--train is a group of options, got 'fast': set one of them, such as --train."),
        (["--method", "lora"], "hashing, quotient_remainder or narrow_tables, got lora"),
        (["--compress.rank", "[1, x]"], "compress.rank: expected an integer or a list of integers, got"),
        (["--train.betas", "0.9"], "train.betas: expected a list of 2 numbers, got 0.9"),
        (["--train.trackers", "x"], "expected a list of tensorboard, wandb or mlflow, got"),
        (["--compress.rank", "0"], "TT needs rank to be an integer >= 1, a tuple of them or None, got 0"),
        (["--train.steps", "0"], "train.steps must be a number >= 1, got 0"),
        (["--model.heads", "7"], "model.hidden must be a multiple of model.heads"),
        (["--data.vocab_size", "5"], "data.vocab_size must be at least 261, got 5"),
        (["--train.steps"], "expected one argument"),
        (["steps"], "unrecognized arguments: steps"),
        (["--config", "nowhere.yaml"], "expected a YAML file at --config nowhere.yaml, got: No such file"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "code-lm", *argv]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.startswith("comera: ")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("train:\n  stepz: 3\n", "unknown field 'train.stepz' in {file}: did you mean train.steps"),
        ("model: {hidden: 8, wide: {a: 1}}\n", "unknown field 'model.wide.a' in {file}"),
        ("train: [1, 2\n", "--config {file} is not valid YAML"),
        ("- train\n", "expected a mapping of fields in --config {file}, got list"),
        ("train: 3\n", "train in {file} is a group of options, got 3: set one of them, such as train."),
        ("train:\n  early:\n", "train.early in {file} is a group of options, got None"),
        ("train:\n  steps: many\n", "train.steps: expected an integer or null, got many"),
    ],
)
def test_a_mistake_in_a_file_gives_one_line_and_exit_code_2(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    for argv in (["--config", str(file)], [f"--config={file}"]):
        assert main(["train", "code-lm", *argv]) == 2
        shown = capsys.readouterr().err
        assert message.format(file=file) in shown
        assert shown.count("\n") == 1


def test_a_run_ends_with_its_report(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "code-lm", *tiny, "--out", str(tmp_path / "run")]) == 0
    page = tmp_path / "run" / "report.html"
    assert f"report: {page}\n" in capsys.readouterr().err
    assert "bert.encoder.layer.0.intermediate.dense" in page.read_text()


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the drawing, which takes longer than the tiny runs."""
    monkeypatch.setattr(report, "render", lambda folder: folder / "report.html")


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("method", ["comera", "dense"])
def test_the_saved_configuration_repeats_the_run(method: str, tiny: list[str], tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    assert main(["train", "code-lm", *tiny, "--method", method, "--out", str(first)]) == 0
    assert main(["train", "code-lm", "--config", str(first / "config.yaml"), "--out", str(again)]) == 0
    assert losses(again) == losses(first)
    assert len(losses(first)) == 4
    saved, resaved = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in (first, again))
    assert {**saved, "out": None} == {**resaved, "out": None}
    assert saved["out"] == str(first)


@pytest.mark.usefixtures("no_report")
def test_a_folder_with_a_run_is_refused_and_resume_takes_its_configuration(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert main(["train", "code-lm", *tiny, *out, "--train.seed", "4"]) == 0
    assert main(["train", "code-lm", *tiny, *out]) == 2
    assert "expected a folder without a run" in capsys.readouterr().err
    before = losses(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    assert main(["train", "code-lm", *out, "--resume"]) == 0
    assert losses(tmp_path / "run") == before
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["train"]["seed"] == 4
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert options.parse("train", "code-lm", ["--resume", "--out", str(moved)])[1].folder == moved
    (tmp_path / "moved").rename(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    assert main(["train", "code-lm", *out, "--resume", "--train.seed", "5"]) == 2
    assert "seed: expected 4, got 5" in capsys.readouterr().err


@pytest.mark.usefixtures("no_report")
def test_a_run_that_is_not_there_is_not_resumed_by_another_in_silence(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "typo"), "--resume"]
    assert main(["train", "code-lm", *out]) == 2
    assert f"--resume: expected a run in {tmp_path / 'typo'}, got none" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()
    assert main(["train", "code-lm", *tiny, *out]) == 0
    assert f"no run in {tmp_path / 'typo'} to resume: begins a new one" in capsys.readouterr().err


def test_data_without_code_is_one_line_and_leaves_nothing(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    argv = [*tiny, "--data.path", str(tmp_path / "empty"), "--out", str(tmp_path / "run")]
    assert main(["train", "code-lm", *argv]) == 2
    assert capsys.readouterr().err.startswith("comera: expected at least two source files")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_folder_that_cannot_be_made_is_refused_before_data_are_read(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    argv = ["--data.path", str(tmp_path / "nowhere"), "--out", str(tmp_path / "file" / "run")]
    assert main([command, "code-lm", *argv]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("comera: expected a folder for the run that can be made and written to, got ")
    assert shown.endswith("(Not a directory): give another place\n")
    assert shown.count("\n") == 1


@pytest.mark.usefixtures("no_report")
def test_failed_and_interrupted_runs_have_their_exit_codes(
    monkeypatch: pytest.MonkeyPatch, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(error: BaseException) -> int:
        def run(config: Any, *, resume: bool) -> None:
            raise error

        monkeypatch.setattr(code_lm, "run", run)
        return main(["train", "code-lm"])

    assert stop(TrainingError("loss nan at step 7")) == 1
    assert capsys.readouterr().err == "comera: loss nan at step 7\n"
    assert stop(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "comera: interrupted\n"
    monkeypatch.undo()

    finished = code_lm.run
    monkeypatch.setattr(code_lm, "run", lambda *a, **k: dataclasses.replace(finished(*a, **k), stopped="interrupted"))
    assert main(["train", "code-lm", *tiny, "--out", str(tmp_path / "a run")]) == 130
    assert f"comera train code-lm --out '{tmp_path}/a run' --resume" in capsys.readouterr().err


@pytest.mark.usefixtures("no_report")
def test_inspect_prints_a_run_and_a_checkpoint(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    main(["train", "code-lm", *tiny, "--out", str(run)])
    (checkpoint,) = (run / "checkpoints").iterdir()
    capsys.readouterr()
    for path in (run, checkpoint):
        assert main(["inspect", str(path)]) == 0
        assert "bert.encoder.layer.0.intermediate.dense" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.startswith("comera: expected a run folder or a saved model")


def test_estimate_shows_the_parts_for_all_methods(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "code-lm", *tiny]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    for part in ("weights", "gradients", "optimizer", "activations", "total", "GFLOPs"):
        assert part in head
    assert [row.split()[0] for row in rows] == ["dense", "comera", "galore", "lte", "cola", "tensorly", "narrow"]


@pytest.mark.usefixtures("no_report")
def test_compare_gives_each_method_its_own_process_and_the_same_time(
    monkeypatch: pytest.MonkeyPatch, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def run(command: Sequence[str]) -> tuple[int, bool]:
        commands.append(command)
        return main(command[4:]), False

    monkeypatch.setattr(cli, "_run", run)
    out = tmp_path / "both"
    steps = tiny.index("--train.steps")
    timed = [*tiny[:steps], *tiny[steps + 2 :]]
    argv = ["compare", "code-lm", "--methods", "dense,comera", "--seconds", "0.3", "--out", str(out), *timed]
    assert main(argv) == 0
    assert [command[:6] for command in commands] == [[sys.executable, "-P", "-m", "comera", "train", "code-lm"]] * 2
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("dense", "comera", "parameters", "held-out loss"))
    summaries = {row["name"]: row for row in json.loads((out / "compare.json").read_text())}
    assert {row["stopped"] for row in summaries.values()} == {"time"}
    assert all(row["time"] >= 0.3 for row in summaries.values())
    assert {path.name for path in out.glob("compare.*")} == {f"compare.{kind}" for kind in ("json", "md", "html")}
    assert main(argv) == 2
    assert "which already has runs: continue them with --resume" in capsys.readouterr().err


def test_compare_finds_mistakes_before_the_first_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_run", None)
    argv = ["compare", "code-lm", "--seconds", "1", "--out", str(tmp_path / "both")]
    for wrong, message in [
        (["--methods", "dense,lora"], "lora"),
        (["--train.stepz", "1"], "unknown field --train.stepz"),
        (["--method", "narrow"], "--method: expected no such option in a comparison, where each run has one of"),
        (["--train.steps=2"], "--train.steps: expected no such option in a comparison, where each run has --seconds"),
    ]:
        assert main([*argv, *wrong]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "both").exists()


def test_the_seconds_of_a_comparison_take_the_place_of_the_epochs_of_a_preset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(cli, "_run", lambda command: (commands.append(command), (1, False))[1])
    argv = ["--data.path", "rows.csv", "--seconds", "30", "--out", str(tmp_path / "both")]
    assert main(["compare", "classify", *argv]) == 1
    train = options.parse("compare", "classify", commands[0][6:])[1].train
    assert (train.epochs, train.steps, train.max_seconds) == (None, None, 30.0)


def test_compare_stops_at_a_run_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_run", lambda command: (1, False))
    assert main(["compare", "code-lm", "--seconds", "1", "--out", str(tmp_path / "both")]) == 1
    assert "failed with exit code 1, see above" in capsys.readouterr().err


@pytest.mark.usefixtures("no_report")
def test_an_interrupted_comparison_resumes(tiny: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, steps = tmp_path / "both", 200
    argv = ["compare", "code-lm", "--methods", "comera,dense", "--out", str(out), *tiny, "--train.steps", str(steps)]
    metrics = out / "comera" / "metrics.jsonl"
    with subprocess.Popen([sys.executable, "-m", "comera", *argv]) as process:
        while process.poll() is None and not (metrics.exists() and '"train"' in metrics.read_text()):
            time.sleep(0.02)
        process.terminate()
        assert process.wait() == 130
    assert f"resume with: comera compare code-lm --out {out} --resume" in capfd.readouterr().err
    stopped = json.loads((out / "comera" / "summary.json").read_text())  # the comparison waited for it
    assert stopped["stopped"] == "interrupted"
    assert 0 < stopped["steps"] < steps
    assert not (out / "dense").exists()

    assert main(["compare", "code-lm", "--out", str(out), "--resume", "--methods", "dense"]) == 2
    assert "pass --out and --resume only" in capfd.readouterr().err
    assert main(["compare", "code-lm", "--out", str(out), "--resume"]) == 0
    rows = json.loads((out / "compare.json").read_text())
    assert [(row["name"], row["steps"], row["stopped"]) for row in rows] == [
        (method, steps, "steps") for method in ("comera", "dense")
    ]


def test_a_comparison_that_never_started_cannot_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "code-lm", "--out", str(tmp_path), "--resume"]) == 2
    assert "expected a comparison to resume" in capsys.readouterr().err


def test_nothing_in_the_working_folder_is_run(tmp_path: Path) -> None:
    for name in ("numpy", "torch", "yaml", "argparse"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')")
    command = [sys.executable, "-m", "comera", "train", "code-lm", "--help"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert shown.returncode == 0, shown.stderr
