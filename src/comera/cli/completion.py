"""Shell completion for bash and zsh: commands, recipes, and every option."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from comera.cli.imports import quick_imports
from comera.cli.options import RESERVED, field_types, first_line
from comera.cli.parsers import WITHOUT_RECIPE, compare, parser_of
from comera.recipes.registry import RECIPES

_FILES = ("path", "file", "out", "config", "cache", "tokenizer", "vocab")  # last words of what takes a file or folder


def completion(shell: str, commands: Mapping[str, Callable[[Any], int]]) -> str:
    """The script that a shell sources. It loads every recipe, to know their options."""
    import shtab

    parser = argparse.ArgumentParser("comera")
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    known = parser.add_subparsers(metavar="COMMAND")
    whole: list[argparse.ArgumentParser] = []
    for name, command in commands.items():
        about = first_line(command)
        if name in WITHOUT_RECIPE:
            whole.append(known.add_parser(name, help=about, parents=[parser_of(name, about)], add_help=False))
            continue
        recipes = known.add_parser(name, help=about).add_subparsers(metavar="RECIPE")
        for recipe, entry in RECIPES.items():
            # --out and --resume are both the comparison's own and options of its runs
            shared = [compare(recipe, about)] if name == "compare" else []
            into = recipes.add_parser(
                recipe, help=entry.summary, parents=shared, add_help=not shared, conflict_handler="resolve"
            )
            for option, choices in _options(recipe):
                into.add_argument(f"--{option}", choices=choices)
            whole.append(into)
    for action in (action for one in whole for action in one._actions):
        if action.dest.rpartition(".")[2] in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell)).rstrip()


def _options(recipe: str) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """Every option of a recipe, and its values where they are few."""
    with quick_imports():
        from comera.recipes.trained import load_recipe

        config = type(load_recipe(recipe).preset())
    yield from ((name, None) for name in sorted(RESERVED - {"help"}))
    for name, hint in field_types(config):
        if dataclasses.is_dataclass(hint):
            continue
        if hint is bool:
            yield name, ("true", "false")
        elif all(isinstance(value, str) for value in get_args(hint)):
            yield name, get_args(hint) or None
        else:
            yield name, None
