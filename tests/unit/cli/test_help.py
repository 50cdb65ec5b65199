"""The short help of each recipe says what is true, `--print_config` what would run, and a shell completes both."""

import dataclasses
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from comera.cli import main as cli
from comera.cli import options
from comera.cli.main import main
from comera.recipes import RECIPES
from comera.recipes.data.documents import TEXT_SUFFIXES
from comera.recipes.data.tables import ROW_SUFFIXES
from comera.recipes.trained import load_recipe

WIDTH, LINES = 100, 45  # of a terminal, in columns and rows


def value_of(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_the_short_help_fits_a_screen_and_is_true(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        main(["train", name, "--help"])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith(f"usage: comera train {name} ")
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= LINES
    recipe = load_recipe(name)
    config = recipe.preset()
    hints = dict(options.field_types(type(config)))
    described = re.split(r"\n(?=  --)", text.partition("options:\n")[2].partition("\nexamples:")[0].rstrip())
    entries = {options.respelled(entry.split()[0], set(hints)): " ".join(entry.split()) for entry in described}
    shown = {option.removeprefix("--"): entry for option, entry in entries.items()}
    assert set(shown) <= set(hints) | options.RESERVED
    assert {"help-all", "print_config", "config", "resume", "out", "preset", "method"} <= set(shown)
    for option, entry in shown.items():
        stated = re.search(r"\(default: (.*)\)", entry)
        default = value_of(config, option) if option in hints else None
        if default is None or isinstance(default, bool):
            continue
        assert stated is not None, option
        said = RECIPES[name].renamed.get(stated[1], stated[1])
        assert said == str(list(default) if isinstance(default, tuple) else default)
    presets = re.findall(r"^  ([\w-]+) ", text.partition("presets:\n")[2].partition("\noptions:")[0], re.MULTILINE)
    if RECIPES[name].renamed:  # a name for some presets of another recipe, which it calls by shorter ones
        presets = [RECIPES[name].renamed[preset] for preset in presets]
        assert set(presets) == {preset for preset in get_args(hints["preset"]) if preset.startswith(name)}
    else:
        assert set(presets) == set(get_args(hints["preset"]))
    for line in text.partition("examples:\n")[2].splitlines():
        command, recipe_name, *argv = shlex.split(line)[1:]
        assert (command, recipe_name) == ("train", name)
        if "--resume" in argv:  # of a run that is there
            run = tmp_path / argv[argv.index("--out") + 1]
            run.mkdir(parents=True)
            (run / "config.yaml").write_text("{}")
        options.parse(command, recipe_name, argv)


@pytest.mark.parametrize(
    ("name", "kinds"), [("lm", (*ROW_SUFFIXES, ".txt", ".md", ".py")), ("mnli", (*ROW_SUFFIXES, "GLUE", "MultiNLI"))]
)
def test_the_short_help_names_the_forms_of_own_data(name: str, kinds: tuple[str, ...]) -> None:
    entry = " ".join(
        options.short_help("train", name).partition("--data.path PATH  ")[2].partition("  --data.")[0].split()
    )
    for form in (*kinds, "folder", "datasets", "hub"):
        assert form.removesuffix(".gz") in entry, form
    assert "also .gz" in entry
    assert set(re.findall(r"\.(?!gz)[a-z]+\b", entry)) <= {*ROW_SUFFIXES, *TEXT_SUFFIXES}


def test_another_command_has_the_same_help_under_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["estimate", "lm", "-h"])
    assert capsys.readouterr().out.startswith("usage: comera estimate lm ")


def test_the_printed_configuration_is_that_of_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["--preset", "base", "--method", "dense", "--train.steps", "7", "--out", "here"]
    with pytest.raises(SystemExit, match="0"):
        main(["train", "code-lm", *argv, "--print_config"])
    text = capsys.readouterr().out
    expected = options.parse("train", "code-lm", argv)[1]
    assert yaml.safe_load(text)["train"]["steps"] == 7
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert options.parse("train", "code-lm", ["--config", str(file)])[1] == expected
    assert dataclasses.replace(expected, out=None) == dataclasses.replace(
        load_recipe("code-lm").preset("dense", "base"),  # type: ignore[call-arg]
        train=dataclasses.replace(expected.train, steps=7),
    )


def test_a_shell_completes_commands_recipes_options_and_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef comera")

    def completed(*words: str) -> set[str]:
        line = f"COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _shtab_comera"
        asked = f"{script}\n{line}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        return set(subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True).stdout.split())

    assert {"train", "compare", "inspect", "completion"} <= completed("comera", "")
    assert completed("comera", "train", "") >= set(RECIPES)
    assert completed("comera", "train", "lm", "--train.max_s") == {"--train.max_seconds"}
    assert completed("comera", "train", "dlrm", "--preset", "") == {"sample", "kaggle"}
    assert {"--methods", "--seconds", "--out", "--resume", "--data.path"} <= completed("comera", "compare", "lm", "--")
    assert completed("comera", "estimate", "lm", "--train.batch") == {"--train.batch_size"}
    own_options: dict[str, set[str]] = {
        "inspect": set(),
        "export": {"--to", "--dense", "--out", "--overwrite"},
        "convert": {"--ratio", "--out"},
        "generate": {"--max_new_tokens", "--temperature", "--top_p", "--seed"},
        "score": {"--out", "--batch_size", "--max_bad_rows", "--overwrite"},
        "predict": {"--out", "--to", "--text", "--pair", "--label", "--batch_size", "--overwrite"},
        "calibrate": set(),
        "completion": set(),
    }
    assert {"train", "compare", "estimate", *own_options} == set(cli._COMMANDS)
    for command, own in own_options.items():
        assert completed("comera", command, "--") == {*own, "--help"}
    assert completed("comera", "export", "--to", "") == {"safetensors", "program", "onnx"}
    assert completed("comera", "completion", "") == {"bash", "zsh"}
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert completed("comera", "inspect", "ru") == completed("comera", "export", "--out", "ru") == {"runs"}
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "fish"])
