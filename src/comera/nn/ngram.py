"""N-gram tables beside token embeddings: E(i) = E_token[t_i] + s ⊙ P [f_2; …; f_N].

An embedding that gets a table stays the same object, with its parameters under their names; only its class changes, to
a subclass created for it, as for a layer with an adapter. Ties, heads and readers of its weight see the token table.

An embedding cannot see which ids come before a position, and which of them belong to its document. Its caller can say
so, by `context` or, around the call, by `reading`; without either, each row of ids is a whole document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.errors import DataError, SpecError, WeightError
from comera.nn.tensor_train import CompressedLayer, TensorTrain
from comera.ops.ngram import NGramIds, ngram_features
from comera.tt.ngram import NGramSpec

SCALE = 0.5  # of what a table adds at first, relative to the rows beside it


class NGramTable(CompressedLayer):
    """Rows of all n-grams that end at a position.

    Args:
        tt: tables, P and gates, or an NGramSpec from which they are made.
        std: that of the rows that its rows are added to, of which `scale` starts at half.

    Parameters: those of `tt`, and `scale`, s (D,).
    Input: `NGramIds` -> (B, T, embedding_dim). Raises SpecError for a tensor train of another format.

    Example:
        >>> import torch
        >>> from comera.nn.ngram import NGramTable
        >>> from comera.ops.ngram import NGramIds
        >>> from comera.tt.ngram import NGramSpec
        >>> table = NGramTable(NGramSpec(256, 64, longest=4, heads=32))
        >>> ids = torch.tensor([list(b"the cat and the cat")])
        >>> rows = table(NGramIds.of(ids, longest=4))
        >>> torch.allclose(rows[0, 5], rows[0, 17], atol=1e-6), torch.allclose(rows[0, 0], rows[0, 12], atol=1e-3)
        (True, False)

    Source: docs/method.md §1b.
    """

    dense_type: type[nn.Module] = nn.Embedding

    def __init__(
        self,
        tt: TensorTrain | NGramSpec,
        *,
        std: float = 1.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(tt, NGramSpec):
            tt = TensorTrain(tt, init_std=std, dtype=dtype, device=device)
        if not isinstance(tt, TensorTrain) or not isinstance(tt.spec, NGramSpec):
            raise SpecError(f"NGramTable needs an NGramSpec or a TensorTrain with one, got {getattr(tt, 'spec', tt)}")
        self.tt = tt
        like = tt.cores[0]
        self.scale = nn.Parameter(torch.empty(tt.spec.embedding_dim, dtype=like.dtype, device=like.device))
        self._reset_scale()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new tables and set the scale to half the std of the rows beside it."""
        self.tt.reset_parameters()
        self._reset_scale()

    @torch.no_grad()
    def _reset_scale(self) -> None:
        self.scale.fill_(SCALE * self.tt.init_std)

    @property
    def spec(self) -> NGramSpec:
        """Sizes and gates."""
        assert isinstance(self.tt.spec, NGramSpec)
        return self.tt.spec

    def forward(self, ids: NGramIds, tokens_BLI: Tensor | None = None) -> Tensor:
        """s ⊙ P f. tokens_BLI: features of each id, for a spec with `inner`."""
        (*tables, p_DF), _ = self.tt.tensors
        gates = self.tt.gates()
        e_BTF = ngram_features(ids, self.spec, tables, gates, tokens_BLI)
        out_DF = p_DF * (self.scale[:, None] * torch.cat(gates)).to(p_DF.dtype)
        return F.linear(e_BTF, out_DF)

    @property
    def weight(self) -> Tensor:
        """None is stored and none is made: it would have V^N rows. Raises WeightError."""
        raise WeightError(
            f"{self.spec} stands for {self.spec.num_embeddings}^{self.spec.longest} rows, which no memory holds: call "
            "the layer for the rows of some ids"
        )

    @property
    def _dense_shape(self) -> tuple[int, int]:
        return self.spec.shape

    def _dense(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.weight

    def extra_repr(self) -> str:
        return str(self.spec)


@dataclass(eq=False)
class Reading:
    """A call of an embedding in progress: its reader, the context of the ids, a note of the reader, and whether the
    embedding has read the context."""

    reader: object
    embedding: nn.Module
    context: NGramIds
    note: Any
    used: bool = False


class NGramEmbedding(nn.Module):
    """An embedding with a table of n-grams beside it.

    ngrams: the table, or another module from `NGramIds` to (B, T, embedding_dim) with `longest`. plain_type: the type
    of the embedding without it. traced_reading: what `begin_reading` said, within a compiled call.

    Example:
        >>> import torch, comera
        >>> from comera.nn import NGramEmbedding, NGramIds
        >>> model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256))
        >>> _ = comera.ngrams_(model, order=3, rank=16)
        >>> embedding, ids = model[0], torch.tensor([list(b"the cat")])
        >>> isinstance(embedding, NGramEmbedding), embedding(ids).shape
        (True, torch.Size([1, 7, 64]))
        >>> goes_on = NGramIds(ids, reach=torch.arange(4, 7)[None])  # the last three bytes, after four others
        >>> torch.allclose(embedding(ids[:, 4:], goes_on), embedding(ids)[:, 4:], atol=1e-6)
        True
    """

    ngrams: nn.Module
    traced_reading: Reading | None = None
    plain_type: ClassVar[type[nn.Module]]

    def forward(self, input: Tensor, context: NGramIds | None = None) -> Tensor:
        """Rows of ids (B, T) in their context: (B, T, embedding_dim)."""
        rows: Tensor = super().forward(input)  # first: it checks the ids
        idx = padding_of(self)
        padding = None if idx is None else input == idx
        return rows_with_ngrams(rows, _context_of(self, input, context), super().forward, self.ngrams, padding)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(2)  # its class is made, so it has no name to be found by
        return _blank, (self.plain_type,), *reduced[2:]


def rows_with_ngrams(
    rows: Tensor, ids: NGramIds, look_up: Callable[[Tensor], Tensor], table: nn.Module, padding_BT: Tensor | None
) -> Tensor:
    """The rows of a token table, (B, T, D), and those of a table of n-grams. look_up: the rows of any ids. padding_BT:
    where nothing is added."""
    spec = getattr(table, "spec", None)
    if spec is None or spec.inner is None:
        made = table(ids)
    else:
        tokens = look_up(ids.ids)
        made = table(ids, F.rms_norm(tokens, tokens.shape[-1:], eps=1e-6))
    with_ngrams: Tensor = rows + made.to(rows.dtype)
    return with_ngrams if padding_BT is None else rows.where(padding_BT[..., None], with_ngrams)


def padding_of(embedding: nn.Module) -> int | None:
    """The id whose row an embedding leaves as it is, None for no such: of a padded text, which has no n-grams there."""
    idx: int | None = getattr(embedding, "padding_idx", None)
    return None if idx is None else idx % int(embedding.num_embeddings)  # type: ignore[arg-type]


_CLASSES: dict[type[nn.Module], type[NGramEmbedding]] = {}
_READING: ContextVar[tuple[Reading, ...]] = ContextVar("reading", default=())


def _class_of(plain: type[nn.Module]) -> type[NGramEmbedding]:
    """The subclass of a type of embedding that has n-grams; made once."""
    if plain not in _CLASSES:
        own = {"plain_type": plain, "__module__": __name__}
        made: Any = type(f"NGram{plain.__name__}", (NGramEmbedding, plain), own)
        _CLASSES[plain] = made
    return _CLASSES[plain]


def _blank(plain: type[nn.Module]) -> NGramEmbedding:
    """An embedding to be filled, for copies and pickles."""
    kind = _class_of(plain)
    return kind.__new__(kind)


def plain_type(layer: nn.Module) -> type[nn.Module]:
    """The type of a layer, of an embedding with n-grams that without them."""
    return layer.plain_type if isinstance(layer, NGramEmbedding) else type(layer)


def attach_ngrams_(embedding: nn.Module, table: nn.Module) -> None:
    """Put a table of n-grams beside an embedding, in place.

    Example:
        >>> import torch
        >>> from comera.nn.ngram import NGramTable, attach_ngrams_
        >>> from comera.tt.ngram import NGramSpec
        >>> embedding = torch.nn.Embedding(256, 64)
        >>> attach_ngrams_(embedding, NGramTable(NGramSpec(256, 64, longest=4, heads=32)))
        >>> embedding(torch.randint(256, (2, 10))).shape, isinstance(embedding, torch.nn.Embedding)
        (torch.Size([2, 10, 64]), True)
    """
    if isinstance(embedding, NGramEmbedding):
        raise SpecError(f"this {embedding.plain_type.__name__} has n-grams already: detach_ngrams_ takes them away")
    embedding.__class__ = _class_of(type(embedding))
    embedding.ngrams = table.train(embedding.training)


def detach_ngrams_(embedding: NGramEmbedding) -> None:
    """Take the table away: the embedding is what it was before."""
    del embedding.ngrams
    embedding.__class__ = embedding.plain_type  # type: ignore[assignment]


@contextmanager
def reading(embedding: nn.Module, context: NGramIds) -> Iterator[None]:
    """Within this context, calls of `embedding` for the ids of `context` know those before them."""
    begin_reading(embedding, embedding, context)
    try:
        yield
    finally:
        end_reading(embedding, embedding)


def begin_reading(reader: object, embedding: Any, context: NGramIds, note: Any = None) -> None:
    """As `reading`, until `end_reading` for this reader."""
    began = Reading(reader, embedding, context, note)
    if torch.compiler.is_compiling():  # which knows no ContextVar
        embedding.traced_reading = began
    else:
        _READING.set((*_READING.get(), began))


def end_reading(reader: object, embedding: Any) -> Reading | None:
    """Undo and return the last `begin_reading`, if this reader did it; None if not."""
    if torch.compiler.is_compiling():
        traced: Reading | None = embedding.traced_reading
        embedding.traced_reading = None
        return traced
    *before, last = _READING.get() or (None,)
    if last is None or last.reader is not reader:
        return None
    _READING.set(tuple(each for each in before if each is not None))
    return last


def longest_of(embedding: nn.Module) -> int:
    """The longest n-gram that the table of an embedding has."""
    table: Any = embedding.ngrams
    return int(table.spec.longest if isinstance(table, NGramTable) else table.longest)


def _context_of(embedding: NGramEmbedding, input: Tensor, given: NGramIds | None) -> NGramIds:
    longest = longest_of(embedding)
    if given is None and torch.compiler.is_compiling():
        given = None if embedding.traced_reading is None else embedding.traced_reading.context
    elif given is None:
        found = next((each for each in reversed(_READING.get()) if each.embedding is embedding), None)
        if found is not None:
            given, found.used = found.context, True
    if given is None:
        if input.dim() != 2:
            raise DataError(f"expected ids as (batch, positions) for n-grams, got shape {tuple(input.shape)}")
        return NGramIds.of(input, longest, padding_of(embedding))
    if given.reach.shape != input.shape:
        raise DataError(
            f"expected the ids that the model was given, {tuple(given.reach.shape)}, got {tuple(input.shape)}: the "
            "model changes its ids before it looks them up, so which n-grams they make is not known"
        )
    return given
