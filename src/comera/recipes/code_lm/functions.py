"""Functions out of source code: pure functions from a text to pairs of a docstring and code without it.

    file of Python   every function and method, with its decorators; a function inside of another belongs to that one
    row of a table   one function, in any language, and what documents it

The code never holds its own docstring: a model would copy the words of a pair from the one side to the other."""

import ast
import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from comera.recipes.data.documents import Document

FEWEST_LINES = 3  # of a mined function, without its docstring: shorter ones are mostly stubs (as in CodeSearchNet)

_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
# What the parser raises: for other languages and versions, for null bytes, and for code nested too deeply for it.
_NOT_PARSED = (SyntaxError, ValueError, RecursionError, MemoryError)


class Example(NamedTuple):
    """A function, indented as at the top of a file, and its docstring; an empty one: the function stands alone."""

    docstring: str
    code: str


def mined(documents: Iterable[Document], skipped: Counter[str], seen: set[bytes]) -> Iterator[Example]:
    """The functions of documents, each once. skipped: counts what yields none, by reason. seen: digests of the code of
    all functions so far, those of earlier calls included: no held-out function may have been seen in training."""
    for document in documents:
        if document.docstring is not None:
            found = [split_row(document.text, document.docstring)]
        else:
            try:
                everything = list(functions_of(document.text))
            except _NOT_PARSED:
                skipped["files not_parsed"] += 1
                continue
            found = [example for example in everything if example.code.count("\n") + 1 >= FEWEST_LINES]
            skipped["functions short"] += len(everything) - len(found)
        for example in found:
            digest = hashlib.blake2b(example.code.encode(), digest_size=16).digest()
            if not example.code or digest in seen:
                skipped["functions repeated" if example.code else "functions empty"] += 1
                continue
            seen.add(digest)
            yield example


def functions_of(source: str) -> Iterator[Example]:
    """The functions and methods of a Python file, in order. Raises what the parser does for other texts.

    Example:
        >>> from comera.recipes.code_lm.functions import functions_of
        >>> list(functions_of('def add(a, b):\\n    "Sum of two."\\n    return a + b\\n'))
        [Example(docstring='Sum of two.', code='def add(a, b):\\n    return a + b')]
    """
    source = source.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")  # as the parser counts lines
    lines = source.split("\n")
    return (_example(node, lines) for node in _functions(_parsed(source)))


def split_row(code: str, docstring: str) -> Example:
    """A function and what documents it, as a table holds them: CodeSearchNet's code still has the docstring inside."""
    docstring = _text(docstring).strip()
    try:
        found = list(functions_of(code))
    except _NOT_PARSED:  # another language, or Python 2: only what stands there word for word can be taken out
        found = []
    if len(found) == 1:
        return Example(docstring or found[0].docstring, found[0].code)
    return Example(docstring, (code.replace(docstring, "", 1) if docstring else code).strip())


def _parsed(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the code that is read, such as invalid escapes
        return ast.parse(source)


def _functions(node: ast.AST) -> Iterator[_FunctionNode]:
    """Functions below a node, in order, but not those inside of functions; on a stack, as `else if` nests deeply."""
    left = [node]
    while left:
        each = left.pop()
        if isinstance(each, _FunctionNode):
            yield each
        elif not isinstance(each, ast.expr):
            left.extend(reversed(list(ast.iter_child_nodes(each))))


def _example(node: _FunctionNode, lines: list[str]) -> Example:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    docstring = ast.get_docstring(node)
    if docstring is not None and len(node.body) == 1:  # nothing remains
        return Example(_text(docstring).strip(), "")
    if docstring is None:
        body = lines[first - 1 : node.end_lineno]
    else:
        body = lines[first - 1 : node.body[0].lineno - 1] + _without(node, lines)
    margin = lines[node.lineno - 1][: _characters(lines[node.lineno - 1], node.col_offset)]
    code = "\n".join(line.removeprefix(margin) for line in body)
    return Example(_text(docstring or "").strip(), _text(code).rstrip())


def _without(node: _FunctionNode, lines: list[str]) -> list[str]:
    """The lines of a function from its docstring on, without that."""
    literal = node.body[0]
    assert literal.end_lineno is not None
    assert literal.end_col_offset is not None
    start, end = lines[literal.lineno - 1], lines[literal.end_lineno - 1]
    before = start[: _characters(start, literal.col_offset)]
    after = end[_characters(end, literal.end_col_offset) :].lstrip()
    rest = before + after.removeprefix(";").lstrip()
    return ([rest] if rest.strip() else []) + lines[literal.end_lineno : node.end_lineno]


def _characters(line: str, offset: int) -> int:
    """The parser counts bytes of UTF-8."""
    return len(line.encode()[:offset].decode())


def _text(text: str) -> str:
    """Without lone surrogates, which an escape in a docstring can write and no tokenizer reads."""
    return text.encode("utf-8", "ignore").decode()
