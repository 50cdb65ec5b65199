"""Shell completion for bash and zsh: commands, recipes, and every option of a recipe."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from comera.cli.options import RESERVED, field_types, first_line
from comera.recipes.registry import RECIPES

SHELLS = ("bash", "zsh")
_WITH_RECIPES = ("train", "compare", "estimate")
_FILES = ("path", "out", "config", "cache", "tokenizer", "vocab")  # last words of options that take a file or folder


def completion(shell: str, commands: Mapping[str, Callable[[list[str]], int]]) -> str:
    """The script that a shell sources. It loads every recipe, to know their options."""
    import shtab

    parser = argparse.ArgumentParser("comera")
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    known = parser.add_subparsers(metavar="COMMAND")
    for name, command in commands.items():
        one = known.add_parser(name, help=first_line(command))
        if name in _WITH_RECIPES:
            recipes = one.add_subparsers(metavar="RECIPE")
            for recipe, entry in RECIPES.items():
                into = recipes.add_parser(recipe, help=entry.summary)
                if name == "compare":
                    into.add_argument("--methods")
                    into.add_argument("--seconds")
                for option, choices in _options(recipe):
                    added: Any = into.add_argument(f"--{option}", choices=choices)
                    if option.rpartition(".")[2] in _FILES:
                        added.complete = shtab.FILE
        else:
            one.add_argument("path").complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell)).rstrip()


def _options(recipe: str) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """Every option of a recipe, and its values where they are few."""
    from comera.recipes.interface import load_recipe

    yield from ((name, None) for name in sorted(RESERVED - {"help"}))
    for name, hint in field_types(type(load_recipe(recipe).preset())):
        if dataclasses.is_dataclass(hint):
            continue
        if hint is bool:
            yield name, ("true", "false")
        elif all(isinstance(value, str) for value in get_args(hint)):
            yield name, get_args(hint) or None
        else:
            yield name, None
