"""Parses a recipe's configuration: each field is an option, the docstring under a field is its help text."""

import argparse
import dataclasses
import difflib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from comera.cli.imports import quick_imports
from comera.errors import ConfigError
from comera.recipes.registry import RECIPES

RESERVED = {"config", "resume", "help", "help-all", "print_config"}  # options that are not fields


def parse(command: str, name: str, argv: list[str]) -> tuple[Any, Any, bool]:
    """The recipe's module, its configuration (selected preset < --config file < options), and --resume.

    Raises ConfigError for unknown fields and for values of the wrong type or out of range; SystemExit after --help,
    --help-all and --print_config.
    """
    if {"-h", "--help"} & set(argv):
        print(short_help(command, name))
        raise SystemExit(0)
    with quick_imports():
        from comera.recipes.trained import load_recipe  # loads torch

        recipe = load_recipe(name)
    renamed = RECIPES[name].renamed
    argv = _renamed_words(argv, renamed)
    default = recipe.preset()
    parser = _parser(f"comera {command} {name}", default, resumes=command == "train")
    hints = dict(field_types(type(default)))
    argv = [respelled(word, set(hints)) for word in argv]
    inlined, files = _inline_files(argv, renamed, set(hints))
    _check_fields(argv, files, set(hints), f"comera {command} {name}")
    try:
        chosen = parser.parse_args(inlined)
        choice = {name: chosen[name] for name in inspect.signature(recipe.preset).parameters}
        if any(value != getattr(default, name) for name, value in choice.items()):  # parse again over that preset
            parser.set_defaults(dict(_leaves(dataclasses.asdict(recipe.preset(**choice)))))
        values = parser.instantiate(parser.parse_args(inlined))
    except argparse.ArgumentError as error:
        raise ConfigError(_explain(str(error), hints)) from None
    config = type(default)(**{field.name: values[field.name] for field in dataclasses.fields(default)})
    saved = config.folder / "config.yaml"
    resume = command == "train" and values.resume
    if resume and saved.is_file() and str(saved) not in argv:  # resume with what the run started with
        return parse(command, name, ["--config", str(saved), *argv, "--out", str(config.folder)])
    if resume and not saved.is_file():
        if {word.partition("=")[0] for word in argv if word.startswith("--")} <= {"--out", "--resume"}:
            raise ConfigError(
                f"--resume: expected a run in {config.folder}, got none (no {saved.name}): check --out, or give the "
                "options that the run was started with"
            )
        if os.environ.get("RANK", "0") == "0":
            print(f"no run in {config.folder} to resume: begins a new one", file=sys.stderr)
    if values.print_config:
        print(_yaml(config), end="")
        raise SystemExit(0)
    return recipe, config, resume


def _yaml(config: Any) -> str:
    """As a run writes it into its config.yaml."""
    import yaml

    plain = json.loads(json.dumps(dataclasses.asdict(config)))  # YAML takes built-in types only
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def short_help(command: str, name: str) -> str:
    """The help of a recipe that fits a screen; it loads nothing."""
    entry = RECIPES[name]
    folder = Path(__file__).parents[2].joinpath(*entry.module.split("."))
    return folder.with_name(entry.help).read_text("utf-8").replace("comera train", f"comera {command}", 1).rstrip()


def saved_config(recipe: str, file: Path) -> Any:
    """The configuration in a run's config.yaml."""
    return parse("export", recipe, ["--config", str(file)])[1]


def _parser(prog: str, default: Any, *, resumes: bool) -> Any:
    """A jsonargparse parser with one option per field; nested fields have dotted names."""
    from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter, set_parsing_settings  # type: ignore[attr-defined]

    class Formatter(DefaultHelpFormatter):
        """With types in words."""

        def _get_type_str(self, action: argparse.Action) -> str | None:
            hint = getattr(action, "_typehint", None) or action.type
            return None if hint is None else words_of(hint)

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    usage = f"{prog} [--config FILE] {'[--resume] ' if resumes else ''}[--FIELD VALUE ...]"
    parser = ArgumentParser(
        prog=prog,
        usage=usage,
        description=first_line(type(default)),
        exit_on_error=False,
        print_config=None,
        add_help=False,
        formatter_class=Formatter,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show the options that matter most, and exit")
    parser.add_argument("--help-all", action="help", help="show all options and exit")
    parser.add_argument("--print_config", action="store_true", help="print the configuration as YAML and exit")
    parser.add_argument(
        "--config", action=ActionConfigFile, help="YAML file of settings; a run's config.yaml repeats that run"
    )
    if resumes:
        parser.add_argument("--resume", action="store_true", help="continue from the run's last checkpoint")
    parser.add_class_arguments(type(default), as_group=False)
    parser.set_defaults(dict(_leaves(dataclasses.asdict(default))))
    return parser


def _check_fields(argv: list[str], files: Mapping[str, dict[str, Any]], known: set[str], prog: str) -> None:
    """Raise ConfigError for an option or a key of a --config file that is not a field, with similar
    ones, and for a value in place of a group of fields."""
    names = [word[2:].partition("=")[0].rstrip("+") for word in argv if word.startswith("--")]
    given = [(f"--{name}", name) for name in names if name not in RESERVED]
    for path, content in files.items():
        for key, value in _leaves(content):
            given.append((f"{key!r} in {path}", key))
            within = next((field for field in sorted(known) if field.startswith(f"{key}.")), None)
            if within and value != {}:
                raise ConfigError(
                    f"{key} in {path} is a group of options, got {value!r}: set one of them, such as {within}"
                )
    for shown, name in given:
        if name not in known:
            similar = difflib.get_close_matches(name, known, n=3, cutoff=0.75) or [
                field for field in sorted(known) if field.rpartition(".")[2] == name.rpartition(".")[2]
            ]
            hint = f"did you mean {' or '.join(similar)}?" if similar else "no field is similar."
            raise ConfigError(f"unknown field {shown}: {hint} `{prog} --help-all` lists all")


def respelled(option: str, known: set[str]) -> str:
    """An option by the name that the recipe has: data.text is data.text_field in some, the same for other columns."""
    name, equals, value = option.removeprefix("--").partition("=")
    if not option.startswith("--data.") or name in known:
        return option
    others = {f"{name}_field", name.removesuffix("_field")} & known
    return f"--{others.pop()}{equals}{value}" if others else option


def _renamed_words(argv: list[str], renamed: Mapping[str, str]) -> list[str]:
    """The arguments, with options and presets by their present names."""
    words = []
    for before, word in pairwise(["", *argv]):
        option, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if before == "--preset":
            option = renamed.get(option, option)
        elif option == "--preset":
            value = renamed.get(value, value)
        elif option.startswith("--"):
            option = f"--{renamed.get(option[2:], option[2:])}"
        words.append(option + equals + value)
    return words


def _inline_files(
    argv: list[str], renamed: Mapping[str, str], known: set[str]
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The arguments, with the content of each --config file in place of its path, and these contents by path. renamed:
    fields and presets that had other names before. known: all fields."""
    import yaml

    inlined, files = list(argv), {}
    for place, (before, word) in enumerate(pairwise(["", *argv])):
        if before == "--config" or word.startswith("--config="):
            path = word.removeprefix("--config=")
            leaves = {renamed.get(name, name): value for name, value in _leaves(_read_yaml(path))}
            files[path] = {respelled(f"--{name}", known)[2:]: value for name, value in leaves.items()}
            if "preset" in files[path]:
                files[path]["preset"] = renamed.get(files[path]["preset"], files[path]["preset"])
            inlined[place] = word.removesuffix(path) + yaml.safe_dump(files[path])
    return inlined, files


def _read_yaml(path: str) -> dict[str, Any]:
    import yaml

    from comera.trainer.config import upgrade_config

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"expected a YAML file at --config {path}, got: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"expected a mapping of fields in --config {path}, got {type(content).__name__} {content!r}")
    return upgrade_config(content)


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested dictionaries."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def field_types(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and types of a configuration's fields, nested configurations included."""
    for name, hint in get_type_hints(kind).items():
        yield prefix + name, hint
        if dataclasses.is_dataclass(hint):
            yield from field_types(hint, f"{prefix}{name}.")  # type: ignore[arg-type]


def _explain(message: str, hints: dict[str, Any]) -> str:
    """jsonargparse's message about a value of the wrong type in one line: the field, its type, the value."""
    group = re.match(r'Parser key "(\w+)":\s+Unable to load config \'(.*?)\'', message)
    if group:
        first = next(field for field in hints if field.startswith(f"{group[1]}."))
        return f"--{group[1]} is a group of options, got {group[2]!r}: set one of them, such as --{first}"
    found = re.search(r'Parser key "(?P<field>[^"]+)":.*value: (?P<value>.*)', message, re.DOTALL)
    if not found or found["field"] not in hints:
        return " ".join(message.split())
    return f"{found['field']}: expected {words_of(hints[found['field']])}, got {found['value'].strip()}"


def words_of(hint: Any, *, many: bool = False) -> str:
    """A field's type in words, as what a user writes; many: several such values."""
    kinds, names = get_args(hint), _MANY if many else _ONE
    if get_origin(hint) is Literal:
        return _listed(map(str, kinds))
    if get_origin(hint) is tuple:
        count = "" if kinds[1] is ... else f"{len(kinds)} "
        return f"a list of {count}{words_of(kinds[0], many=True)}"
    return _listed(words_of(kind, many=many) for kind in kinds) if kinds else names.get(hint, "a mapping of fields")


_ONE = {int: "an integer", float: "a number", str: "a string", bool: "true or false", NoneType: "null"}
_MANY = {int: "integers", float: "numbers", str: "strings"}


def _listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def first_line(documented: Any) -> str:
    """First line of an object's docstring."""
    return str(documented.__doc__).partition("\n")[0]
