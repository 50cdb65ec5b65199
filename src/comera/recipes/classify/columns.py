"""Which columns of a table hold the texts and the label: as named, or the only sensible choice."""

from collections.abc import Sequence

from comera.errors import DataError
from comera.recipes.classify.files import Columns

OPTIONS = "data.text, data.pair and data.label"
LABELS = ("label", "labels", "class", "target", "category", "gold_label", "sentiment")
TEXTS = ("text", "sentence", "review", "content", "document", "comment", "message", "tweet", "title", "question")


def find_columns(
    found: Sequence[str], where: str, text: str | None, pair: str | None, label: str | None
) -> tuple[Columns, list[str]]:
    """The columns to read, and the roles of those that were guessed. found: all columns. where: they are, for messages.
    text, pair, label: as the user named them. A guess is the only column with a usual name, or the only one left.
    Raises DataError for a name that is no column, a column with two roles, and where a guess would be one of
    several."""
    named = {"data.text": text, "data.pair": pair, "data.label": label}
    for option, name in named.items():
        if name is not None and name not in found:
            raise DataError(f"{option}: expected one of the columns {', '.join(found)} of {where}, got {name!r}")
    given = [name for name in named.values() if name is not None]
    if len(set(given)) < len(given):
        raise DataError(f"expected different columns for {OPTIONS}, got {', '.join(given)}: name each once")
    guessed = [role for role, name in (("text", text), ("label", label)) if name is None]
    label = label or _only([name for name in found if name not in given], LABELS, "data.label", "the label", where)
    left = [name for name in found if name not in (*given, label)]
    text = text or _only(left, TEXTS, "data.text (and data.pair for pairs)", "the text", where)
    if pair is None:
        return Columns((text,), label, ("text",), OPTIONS), guessed
    return Columns((text, pair), label, ("first text", "second text"), OPTIONS), guessed


def _only(left: Sequence[str], usual: Sequence[str], options: str, what: str, where: str) -> str:
    likely = [name for name in left if name.lower() in usual] or left
    if len(likely) != 1:
        raise DataError(
            f"{where}: expected one column that is likely to hold {what}, got {', '.join(likely) or 'none'}: set "
            f"{options}"
        )
    return likely[0]
