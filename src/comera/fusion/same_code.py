"""Whether methods of two classes compute by the same code, whatever the classes are called.

transformers gives every family of models its own copy of what families share, and many a block is a copy of one that
`fuse_` knows. Compared are the instructions, constants and names of a method, and of what it calls: methods of its
class, functions of its file and those around it, such as decorators with what they were given. Everything else that it
names from outside must be the very same object. A method that calls its base class by `super()` is like no other.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

_Content = tuple[Any, ...]


def same_code(one: type, other: type, method: str, *, whole: bool = True) -> bool:
    """Whether a method of one class is that of another, or a copy of it. whole: with what it calls of class and file.

    Example:
        >>> from comera.fusion.same_code import same_code
        >>> class Twice:
        ...     def run(self, x):
        ...         return self.factor() * x
        ...     def factor(self):
        ...         return 2
        >>> class Double:
        ...     def run(self, x):
        ...         return self.factor() * x
        ...     def factor(self):
        ...         return 2
        >>> class Triple(Double):
        ...     def factor(self):
        ...         return 3
        >>> same_code(Twice, Double, "run"), same_code(Twice, Triple, "run")
        (True, False)
    """
    return _content(one, method, whole) == _content(other, method, whole)


@cache
def _content(kind: type, method: str, whole: bool) -> _Content:
    function = getattr(kind, method, None)
    if not isinstance(function, FunctionType):
        return (kind, method)  # nothing that could be compared
    return tuple(_of_function(function, kind, set() if whole else None))


def _of_function(function: FunctionType, kind: type, seen: set[object] | None) -> Iterator[Any]:
    """What a function is, and each that decorators have wrapped. seen: functions that were looked at; None to look at
    none that is called."""
    if seen is not None:
        if function in seen:
            return
        seen.add(function)
    yield from (function.__defaults__, tuple((function.__kwdefaults__ or {}).items()))
    yield from _of_code(function.__code__, function.__globals__, kind, seen)
    wrapped = getattr(function, "__wrapped__", None)
    if isinstance(wrapped, FunctionType):
        yield from _of_function(wrapped, kind, seen)
    for held in map(_held, function.__closure__ or ()):
        if isinstance(held, FunctionType) and seen is not None:
            yield from _of_function(held, kind, seen)
        elif held is not wrapped and held is not kind:
            yield _value(held)


def _held(cell: CellType) -> Any:
    """What a variable of a surrounding function holds; the variable itself before it does."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _of_code(code: CodeType, outside: Mapping[str, Any], kind: type, seen: set[object] | None) -> Iterator[Any]:
    yield (code.co_code, code.co_exceptiontable, code.co_varnames, code.co_flags, code.co_argcount)
    if "__class__" in code.co_freevars:  # super()
        yield kind
    for value in code.co_consts[_has_docstring(code) :]:
        if isinstance(value, CodeType):
            yield from _of_code(value, outside, kind, seen)
        else:
            yield (type(value), value)
    for name in code.co_names:
        yield name
        if seen is not None:
            yield from _of_class(kind, name, seen)
        found = outside.get(name)
        if not isinstance(found, FunctionType) or found.__module__ != outside["__name__"]:
            yield _The(found)
        elif seen is not None:
            yield from _of_function(found, kind, seen)


def _of_class(kind: type, name: str, seen: set[object]) -> Iterator[Any]:
    """What a name means in a class: a method, a property or a constant."""
    own = getattr(kind, name, None)
    own = own.fget if isinstance(own, property) else getattr(own, "__func__", own)
    if own is getattr(nn.Module, name, None) or name.startswith("__"):  # such as __name__
        return
    if isinstance(own, FunctionType):
        yield from _of_function(own, kind, seen)
    else:
        yield _value(own)


def _has_docstring(code: CodeType) -> bool:
    """Whether the first constant is one, which until Python 3.12 every `def` has room for."""
    if sys.version_info >= (3, 13):
        return bool(code.co_flags & 0x4000000)
    return not code.co_name.startswith("<") and isinstance(code.co_consts[0], str | None)


def _value(found: object) -> Any:
    """A constant with its type, so that 1 is not True; of everything else the object itself."""
    return (type(found), found) if isinstance(found, int | float | str) else _The(found)


class _The:
    """An object from outside, like itself alone; but messages may go to any logger."""

    def __init__(self, value: object) -> None:
        self._value = logging.Logger if isinstance(value, logging.Logger) else value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _The) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]
