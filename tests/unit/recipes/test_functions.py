"""Functions out of source code: what is taken, that no docstring stays inside, and what is skipped and counted."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

from comera.recipes.code_lm.functions import Example, functions_of, mined, split_row
from comera.recipes.data.documents import Document

FILE = '''"""Of the module."""
import os

@cached
@other(
    "argument")
def first(a, b=1):
    r"""What the first one does.

    More of it.
    """
    def inner():
        """Stays: it is a part of the function around it."""
        return a
    return inner() + b

class Thing:
    """Of the class."""

    async def second(self):
        x = self.value  # no docstring
        return x

    class Inside:
        if True:
            def third(self): "Short and sweet."; return 3

def only_words():
    """Nothing else."""
'''


def test_functions_are_found_in_order_and_separated_from_their_docstrings() -> None:
    first, second, third, words = functions_of(FILE)
    assert first.docstring == "What the first one does.\n\nMore of it."
    assert first.code == (
        '@cached\n@other(\n    "argument")\ndef first(a, b=1):\n    def inner():\n'
        '        """Stays: it is a part of the function around it."""\n        return a\n    return inner() + b'
    )
    assert second == Example("", "async def second(self):\n    x = self.value  # no docstring\n    return x")
    assert third == Example("Short and sweet.", "def third(self): return 3")
    assert words == Example("Nothing else.", "")


@pytest.mark.parametrize("path", sorted(Path(json.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_real_functions_parse_and_do_what_they_did(path: Path) -> None:
    source = path.read_text()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    bodies = {ast.dump(ast.Module(node.body[ast.get_docstring(node) is not None :], [])) for node in nodes}
    names = {node.name for node in nodes}
    for example in functions_of(source):
        (node,) = ast.parse(example.code).body
        assert isinstance(node, ast.FunctionDef)
        assert node.name in names
        assert ast.get_docstring(node) is None
        assert ast.dump(ast.Module(node.body, [])) in bodies


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("\ufeffdef f():\r\n    'Words.'\r\n    return 1\r\n", Example("Words.", "def f():\n    return 1")),
        ("class A:\n\tdef f(self):\n\t\treturn '''\nx'''\n", Example("", "def f(self):\n\treturn '''\nx'''")),
        (
            "def f():\n    'naïve 🙂'; x = 'é'\n    return x\n",
            Example("naïve 🙂", "def f():\n    x = 'é'\n    return x"),
        ),
        ('def f():\n    "half \\ud800 pair"\n    return 1\n', Example("half  pair", "def f():\n    return 1")),
        ('def f():\n    ""\n    return 1\n', Example("", "def f():\n    return 1")),
        ('def f():\n    "\\d is no escape"\n    return 1\n', Example("\\d is no escape", "def f():\n    return 1")),
    ],
    ids=["byte order mark and returns", "tabs", "beyond ASCII", "surrogate", "empty docstring", "invalid escape"],
)
def test_odd_texts(source: str, expected: Example) -> None:
    assert list(functions_of(source)) == [expected]


def test_the_docstring_of_a_row_is_taken_out_of_its_code() -> None:
    code = 'def f(x):\n    """Adds one.\n\n    Always.\n    """\n    return x + 1\n'
    alone = "def f(x):\n    return x + 1"
    assert split_row(code, "Adds one.") == Example("Adds one.", alone)  # the row's wins: it is what was published
    assert split_row(code, "") == Example("Adds one.\n\nAlways.", alone)
    assert split_row(alone, "") == Example("", alone)
    java = "/** Adds one. */ int f(int x) { return x + 1; }"
    assert split_row(java, "Adds one.") == Example("Adds one.", "/**  */ int f(int x) { return x + 1; }")
    old = 'def f(x):\n    """Prints."""\n    print x'  # Python 2
    assert split_row(old, "Prints.") == Example("Prints.", 'def f(x):\n    """"""\n    print x')


def test_what_is_left_out_is_counted_and_no_function_comes_twice() -> None:
    skipped: Counter[str] = Counter()
    seen: set[bytes] = set()
    long = "def f(x):\n    y = x\n    return y\n"
    documents = [
        Document("a.py", long),
        Document("again.py", f"{long}\ndef g(x): return x\n"),
        Document("two.py", "print 'not this Python'"),
        Document("null.py", "x = '\0'"),
        Document("deep.py", "x = " + "(" * 5000 + ")" * 5000),
        Document("row", "def g(x): return x", "Itself."),  # rows are as their publisher chose them
        Document("words", 'def h():\n    "Words alone."', "Words alone."),
    ]
    found = list(mined(documents, skipped, seen))
    assert found == [Example("", long.rstrip()), Example("Itself.", "def g(x): return x")]
    assert skipped == {
        "files not_parsed": 3,
        "functions short": 1,
        "functions repeated": 1,
        "functions empty": 1,
    }
    assert list(mined(documents[:1], skipped, seen)) == []  # as in the held-out part
    assert skipped["functions repeated"] == 2


def test_long_chains_of_conditions_are_walked() -> None:
    chain = "if a:\n    pass\n" + "".join(f"elif a == {k}:\n    pass\n" for k in range(150))
    source = f"{chain}else:\n    def f():\n        x = 1\n        return x\n"
    assert [example.code for example in functions_of(source)] == ["def f():\n    x = 1\n    return x"]
