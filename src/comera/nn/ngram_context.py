"""Which ids come before each position of a batch, from what a model of transformers is given: ids, masks, positions and
a cache of earlier calls.

The ids of earlier calls are kept in the cache itself, as one more layer of it. So they follow what `generate` does with
caches: beams are reordered, samples repeated and dropped, candidates of assisted decoding taken back.

B sequences, T positions of this call, P ids of earlier ones, L = N − 1 + T; K keys that a mask is about.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.errors import DataError
from comera.ops.ngram import NGramIds

NONE = -1  # in place of an id that is padding


class NGramHistory:
    """A layer of a KV cache of transformers that holds ids (B, 1, P, 1), as `keys`, and their positions, as `values`.

    It has the methods that caches call on their layers, others from `DummyLayer` (`history_type`): so no mask is made
    for it, and it counts as one that compiles. transformers leaves out masks of static caches with one that does not.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def is_initialized(self) -> bool:
        """Whether it holds anything."""
        return self.keys is not None

    def update(self, ids: Tensor, positions: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append ids and positions, (B, 1, T, 1)."""
        if self.keys is None or self.values is None:
            self.keys, self.values = ids, positions
        else:
            self.keys, self.values = (
                torch.cat([held.to(new.device), new], 2) for held, new in ((self.keys, ids), (self.values, positions))
            )
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """How many ids it holds."""
        return 0 if self.keys is None else self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many ids there are with those of a call, and how many were dropped before them: none."""
        return self.get_seq_length() + query_length, 0

    def crop(self, length: int) -> None:
        """Drop the last ids, `-length` of them; or, as caches once had it, keep the first `length`."""
        if length:
            self._change(lambda held: held[:, :, :length])

    def reset(self) -> None:
        """Forget all."""
        self.keys = self.values = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the ids of other beams."""
        self._change(lambda held: held.index_select(0, beam_idx.to(held.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._change(lambda held: held.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences."""
        self._change(lambda held: held[indices])

    def __reduce__(self) -> tuple[Any, ...]:
        return _held, (self.keys, self.values)

    def _change(self, change: Any) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = change(self.keys), change(self.values)


_kinds: list[type[NGramHistory]] = []


def history_type() -> type[NGramHistory]:
    """The type of a history, made at the first call, which is none of torch.compile: its graphs make no classes."""
    if not _kinds:
        library = sys.modules["transformers.cache_utils"]  # whose cache it is in
        _kinds.append(type("NGramHistory", (NGramHistory, library.DummyLayer), {}))
    return _kinds[0]


def _held(keys: Tensor | None, values: Tensor | None) -> NGramHistory:
    """A history of these ids and positions."""
    history = history_type()()
    history.keys, history.values = keys, values
    return history


def history_of(cache: Any, *, where: str) -> NGramHistory | None:
    """The history in a cache of transformers; None for no cache, or one in which nothing is yet.

    Raises DataError, naming the model by `where`, for a cache that holds something else than a model with n-grams has
    put there.
    """
    layers = _layers(cache)
    if layers is None:
        if cache is None:
            return None
        raise DataError(
            f"{where}: expected a cache of transformers with a list of layers, in which n-grams keep the ids that they "
            f"have seen, got a {type(cache).__name__}"
        )
    found = next((layer for layer in layers if isinstance(layer, NGramHistory)), None)
    others = [layer for layer in layers if layer is not found]
    lengths = {length for layer in others if (length := _length(layer, known=found is not None))}
    if found is None and lengths:
        raise DataError(
            f"{where}: expected the cache of a model with n-grams, got one with {max(lengths)} positions and without "
            "their ids: it was made by another model, or from inputs_embeds. Start with a new cache"
        )
    if found is not None and lengths - {found.get_seq_length()}:
        raise DataError(
            f"{where}: expected a cache with as many ids of n-grams as it has positions, got "
            f"{found.get_seq_length()} ids and {', '.join(map(str, sorted(lengths)))} positions in its layers"
        )
    return found


def remember(cache: Any, ids: Tensor, positions: Tensor) -> None:
    """Append the ids (B, T) of a call, padding as NONE, and their positions to a cache."""
    layers = _layers(cache)
    if layers is None:
        return
    found = next((layer for layer in layers if isinstance(layer, NGramHistory)), None)
    if found is None:
        found = _held(None, None)
        layers.append(found)
    found.update(ids[:, None, :, None], positions[:, None, :, None])


def _layers(cache: Any) -> list[Any] | None:
    """The layers of a cache, of its decoder's own part where it has two; None for what is no such cache."""
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", None)
    return layers if isinstance(layers, list) else None


def _length(layer: Any, *, known: bool) -> int | None:
    """Positions that a layer of a cache holds; None where it does not tell. known: None, too, where a tensor tells, so
    that only the first call of a sequence synchronizes."""
    length = layer.get_seq_length() if hasattr(layer, "get_seq_length") else None
    if isinstance(length, Tensor) and not known and not torch.compiler.is_compiling():
        length = int(length)
    return length if isinstance(length, int) else None


class Call:
    """A call of a model: its ids, and what comes before them.

    ids: (B, T), padding as NONE. positions: (B, T). context: for the table. cache: the one that it was given.
    """

    def __init__(
        self,
        ids_BT: Tensor,
        longest: int,
        *,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        where: str = "",
    ) -> None:
        history, self.cache = history_of(cache, where=where), cache
        earlier, own = longest - 1, ids_BT.shape[1]
        known = 0 if history is None else history.get_seq_length()
        past_BP, positions_BP = _past(history, ids_BT, earlier)
        mask = _chosen(attention_mask)
        self.ids, self.positions = ids_BT, _positions(position_ids, ids_BT, known)
        if mask is not None and mask.dim() == 2:
            if mask.shape[1] < known + own:
                raise DataError(
                    f"expected an attention mask for {known} positions in the cache and {own} of this call, got one "
                    f"for {mask.shape[1]}"
                )
            visible = mask[:, known - past_BP.shape[1] : known + own] != 0
            self.ids = ids_BT.where(visible[:, past_BP.shape[1] :], NONE)
            past_BP = past_BP.where(visible[:, : past_BP.shape[1]], NONE)
        first = earlier - past_BP.shape[1]
        ids_BL = F.pad(torch.cat([past_BP, self.ids], 1), (first, 0), value=NONE)
        positions_BL = F.pad(torch.cat([positions_BP, self.positions], 1), (first, 0), value=NONE)
        seen = None if mask is None or mask.dim() == 2 else _Seen(mask, known, own)
        reach_BT = _reach(ids_BL, positions_BL, own, seen)
        self.context = NGramIds(ids_BL.clamp_min(0), reach_BT)


def _reach(ids_BL: Tensor, positions_BL: Tensor, own: int, seen: "_Seen | None") -> Tensor:
    """How many ids before each of the last `own` positions are of its document and no padding, (B, T)."""
    # an id, and whether the one after it is of its document
    linked_BL = (ids_BL[:, :-1] >= 0) & (positions_BL[:, 1:] == positions_BL[:, :-1] + 1)
    earlier = ids_BL.shape[1] - own
    linked_BTN = torch.stack([linked_BL[:, earlier - n : earlier - n + own] for n in range(1, earlier + 1)], 2)
    if seen is not None:
        linked_BTN = linked_BTN & seen.before(earlier)
    return linked_BTN.cumprod(2).sum(2)


class _Seen:
    """Which keys the positions of a call see, by a mask (B or 1, heads or 1, T, K) of booleans or of what is added."""

    def __init__(self, mask: Tensor, known: int, positions: int) -> None:
        if mask.shape[2] != positions or mask.shape[3] < positions:
            raise DataError(
                f"expected an attention mask of {positions} positions and at least as many keys for n-grams, got shape "
                f"{tuple(mask.shape)}"
            )
        first = max(known + positions - mask.shape[3], 0)  # that a window still holds
        self._seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0
        self._own = torch.arange(known, known + positions, device=mask.device) - first

    def before(self, most: int) -> Tensor:
        """Whether each position sees the one n before it, n = 1 … most, (B or 1, T, most)."""
        places_TN = self._own[:, None] - torch.arange(1, most + 1, device=self._own.device)
        seen_BTN = self._seen.gather(2, places_TN.clamp_min(0).expand(len(self._seen), -1, -1))
        return seen_BTN | (places_TN < 0)  # of what is before the window, or the text, the mask does not tell


def _past(history: NGramHistory | None, like: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Ids and positions of earlier calls, (B, P), at most the last so many."""
    if history is None or history.keys is None or history.values is None:
        nothing = like[:, :0]
        return nothing, nothing
    last = (history.keys[:, 0, -most:, 0], history.values[:, 0, -most:, 0])
    ids, positions = (held.to(like.device) for held in last)
    if len(ids) != len(like):
        raise DataError(f"expected ids of the {len(ids)} sequences in the cache, got {len(like)}")
    return ids, positions


def _positions(given: Tensor | None, ids_BT: Tensor, known: int) -> Tensor:
    if given is None:
        return torch.arange(known, known + ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    if given.dim() > 2 or given.shape[-1] != ids_BT.shape[1]:
        raise DataError(
            f"expected position_ids {tuple(ids_BT.shape)}, which tell where documents start, got {tuple(given.shape)}"
        )
    return given.expand_as(ids_BT)


def _chosen(mask: Any) -> Tensor | None:
    """One mask of those of several kinds of attention: that which sees most."""
    if isinstance(mask, Mapping):
        wide = {kind: one for kind, one in mask.items() if kind != "chunked_attention"}
        if mask and not wide:
            raise DataError(
                "expected masks of full or sliding attention, got those of chunked attention alone, which do not tell "
                "what n-grams reach across chunks: generate without a static cache"
            )
        mask = wide.get("full_attention", next(iter(wide.values()), None))
    if mask is None or (isinstance(mask, Tensor) and mask.dim() in (2, 4)):
        return mask
    what = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    raise DataError(
        f"expected an attention mask (batch, positions) or (batch, heads, positions, keys), which tells which ids "
        f"n-grams may reach, got {what}"
    )
