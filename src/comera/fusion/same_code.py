"""Recognizes a block by its code, never by its name.

`code_of` reads a method with what it calls: methods of its class, functions of its file, and decorators with what they
were given. Two methods are the same if their instructions, constants and names are, and if everything else that they
name from outside is the very same object. transformers gives every family of models its own copy of what families
share, so one entry finds many copies. A method that calls its base class by `super()` is like no other.

`Code.changed` compares each of these functions with the bytecode of its library's file, and names one that was
replaced. `Code.is_current` says whether all of them are still where they were found.
"""

import logging
import sys
from collections.abc import Mapping
from functools import cache, cached_property
from inspect import CO_OPTIMIZED
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn


class _Found(NamedTuple):
    """A function that code calls: the class or the file that holds it, by which name, and the place of its source."""

    holder: type | dict[str, Any]
    name: str
    value: Any
    file: str
    place: str


class Code:
    """A method, or a function, and what it calls.

    content: what two copies have in common. names: all that it names. helpers: the methods of its class among them.
    """

    def __init__(self) -> None:
        self.content: list[Any] = []
        self.names: set[str] = set()
        self.helpers: set[str] = set()
        self._found: list[_Found] = []
        self._around: list[FunctionType] = []  # decorators, and functions that they hold

    def is_current(self) -> bool:
        """Whether none of its functions was replaced since it was read."""
        for holder, name, value, *_ in self._found:
            if (holder.get(name) if type(holder) is dict else getattr(holder, name, None)) is not value:
                return False
        return True

    @cached_property
    def changed(self) -> str | None:
        """The part that differs from what its library ships; None if none does, as far as files can be compared."""
        for holder, _, value, file, place in self._found:
            shipped = _shipped(file)
            if shipped is None or (type(holder) is dict and place not in shipped):  # the latter is imported there
                continue
            if getattr(innermost(value), "__code__", None) not in shipped.get(place, ()):
                return f"{place} is not the code that {file} ships"
        packages = {_package(found.file) for found in self._found} | {"torch", "contextlib"}
        for function in self._around:
            if _package(_file(function)) not in packages or not _is_shipped(function):
                return f"{_file(function)} has wrapped it"
        return None

    @cached_property
    def changed_whole(self) -> str | None:
        """The same for code that does not run, but is replaced as a whole: nothing may be wrapped around it, and what
        it calls of torch must be torch's."""
        if self._around:
            return self.changed or f"{_file(self._around[0])} has wrapped it"
        for name in self.names:
            for library in (torch, nn.functional):
                found = vars(library).get(name)
                if isinstance(found, FunctionType) and not (_package(_file(found)) == "torch" and _is_shipped(found)):
                    return f"{library.__name__}.{name} is not torch's own"
        return self.changed


_Owner = type | ModuleType | FunctionType
_codes: dict[tuple[_Owner, str, bool], Code] = {}


def code_of(owner: _Owner, method: str = "", *, whole: bool = True) -> Code:
    """The code of a method of a class, of a function of a file, or of a function wherever that is. whole: with what it
    calls of class and file."""
    code = _codes.get((owner, method, whole))
    if code is None or not code.is_current():
        code = _codes[owner, method, whole] = _Reader(owner, whole).read(method)
    return code


def forget() -> None:
    """Read all code anew from here on."""
    _codes.clear()


def original(kind: type, method: str) -> Code:
    """A method by itself as the file of its class has it, whatever is in its place now."""
    reader = _Reader(kind, whole=False)
    holder = next((each for each in kind.__mro__ if method in vars(each)), kind)
    for code in (_shipped(holder.__module__) or {}).get(f"{holder.__qualname__}.{method}", [])[-1:]:
        reader.instructions(code, vars(sys.modules[holder.__module__]))
    return reader


class _Reader(Code):
    """Code that is being read."""

    def __init__(self, owner: _Owner, whole: bool) -> None:
        super().__init__()
        self._owner, self._whole = owner, whole
        self._seen: set[object] = set()

    def read(self, method: str) -> Code:
        owner = self._owner
        if isinstance(owner, FunctionType):
            self._function(owner, {owner.__name__: owner}, owner.__name__, _file(owner))
        elif not isinstance(found := getattr(owner, method, None), FunctionType):
            self.content.append((owner, method))  # nothing that could be compared
        elif isinstance(owner, type):
            self._method(found, owner, method)
        else:
            self._function(found, vars(owner), method, owner.__name__)
        return self

    def _method(self, value: Any, kind: type, name: str) -> None:
        """A function or a property of a class."""
        holder = next(each for each in kind.__mro__ if name in vars(each))
        self._function(value, kind, name, holder.__module__, f"{holder.__qualname__}.{name}")

    def _function(self, value: Any, holder: type | dict[str, Any], name: str, file: str, place: str = "") -> None:
        self._found.append(_Found(holder, name, value, file, place or name))
        self._body(value.fget if isinstance(value, property) else value)  # type: ignore[arg-type]

    def _body(self, function: FunctionType) -> None:
        """What a function is, and each that decorators have wrapped."""
        while (inner := getattr(function, "__wrapped__", None)) and inner.__code__ is function.__code__:
            function = inner  # wrapped once more, for a subclass
        if function in self._seen:
            return
        self._seen.add(function)
        self.content += (function.__defaults__, tuple((function.__kwdefaults__ or {}).items()))
        self.instructions(function.__code__, function.__globals__)
        wrapped = getattr(function, "__wrapped__", None)
        if isinstance(wrapped, FunctionType):
            self._around.append(function)
            self._body(wrapped)
        for held in map(held_by, function.__closure__ or ()):
            if isinstance(held, FunctionType) and self._whole:
                if held not in self._seen:
                    self._around.append(held)
                self._body(held)
            elif held is not wrapped and held is not self._owner:
                self.content.append(_value(held))

    def instructions(self, code: CodeType, outside: dict[str, Any]) -> None:
        content = self.content
        content.append((code.co_code, code.co_exceptiontable, code.co_varnames, code.co_flags, code.co_argcount))
        if "__class__" in code.co_freevars:  # super()
            content.append(self._owner)
        for value in code.co_consts[_has_docstring(code) :]:
            if isinstance(value, CodeType):
                self.instructions(value, outside)
            else:
                content.append((type(value), value))
        self.names.update(code.co_names)
        for name in code.co_names:
            content.append(name)
            if self._whole and isinstance(self._owner, type):
                self._attribute(self._owner, name)
            found, file = outside.get(name), outside.get("__name__", "")
            if isinstance(found, FunctionType) and found.__module__ == file:
                if self._whole:
                    self._function(found, outside, name, file)
                continue
            content.append(_The(found))
            if self._whole and callable(found) and not isinstance(found, type):
                self._found.append(_Found(outside, name, found, file, name))

    def _attribute(self, kind: type, name: str) -> None:
        """What a name means in a class: a method, a property or a constant."""
        own = getattr(kind, name, None)
        if own is getattr(nn.Module, name, None) or name.startswith("__"):  # such as __name__
            return
        if isinstance(own, MethodType) and isinstance(own.__func__, FunctionType):  # of the class itself
            self._around.append(own.__func__)
            self._body(own.__func__)
        elif isinstance(own.fget if isinstance(own, property) else own, FunctionType):
            self.helpers.add(name)
            self._method(own, kind, name)
        else:
            self.content.append(_value(own))


@cache
def _shipped(file: str) -> Mapping[str, list[CodeType]] | None:
    """The functions of a module by their qualified names, as its file has them; None for one without a file."""
    spec = getattr(sys.modules.get(file), "__spec__", None)
    try:
        whole = spec.loader.get_code(file)  # type: ignore[union-attr]
    except (AttributeError, ImportError, OSError, SyntaxError, ValueError):
        return None
    functions: dict[str, list[CodeType]] = {}
    left = [whole]
    while left:
        for value in left.pop().co_consts:
            if isinstance(value, CodeType):
                left.append(value)
                if value.co_flags & CO_OPTIMIZED:  # the body of a class is not
                    functions.setdefault(value.co_qualname, []).append(value)
    return functions


def _is_shipped(function: FunctionType) -> bool:
    shipped = _shipped(_file(function))
    return shipped is None or function.__code__ in shipped.get(function.__code__.co_qualname, ())


def innermost(value: Any) -> Any:
    """The function inside of a property or of decorators."""
    value = value.fget if isinstance(value, property) else value
    while isinstance(inner := getattr(value, "__wrapped__", None), FunctionType):
        value = inner
    return value


def _file(function: FunctionType) -> str:
    return str(function.__globals__.get("__name__", ""))


def _package(file: str) -> str:
    return file.partition(".")[0]


def held_by(cell: CellType) -> Any:
    """What a variable of a surrounding function holds; the variable itself before it does."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


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
