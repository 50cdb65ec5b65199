"""`ngrams_`: a table of all n-grams beside the token embedding of a model, and what lets it know the ids before.

A model of transformers is given masks, positions and caches, of which its embedding sees nothing. So each of its base
models, those that look ids up, gets a pair of hooks: before a call they make the context of its ids from all of it, and
after it they append the ids to the cache. Nothing is kept between calls but in the cache.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from comera.convert.declared import guard_resizing_
from comera.convert.registry import converters
from comera.errors import ConversionError, DataError, SpecError, check_fields, check_module, is_integer
from comera.nn.adapted import refuse_adapters
from comera.nn.changes import notify_conversion
from comera.nn.embedding import TTMEmbedding
from comera.nn.ngram import NGramEmbedding, NGramTable, attach_ngrams_, begin_reading, end_reading, longest_of
from comera.nn.ngram_context import Call, history_type, remember
from comera.nn.tensor_train import TensorTrain
from comera.tt.ngram import NGramSpec

OWN_TABLES = 1024  # the largest vocabulary whose ids have rows of their own in each of the tables, by default
CACHES = ("cache", "past_key_values", "cache_params")  # as releases of transformers name them
_FOREIGN_CACHES = ("mems", "past_buckets_states", "state")  # of models that keep what they saw in their own way


@dataclass(frozen=True)
class NGrams:
    """The format of an n-gram table (docs/method.md §1b).

    Args:
        order: the longest n-gram, N.
        rank: columns of a CP, or features of all heads of a TT.
        form: "cp", products of columns, or "tt", of matrices.
        heads: of a TT, which divide its rank.
        tables: "own": a row for each token id in each of N tables; "shared": N matrices over the rows that tokens have
            anyway, so that the vocabulary does not enter the size. None: own ones up to 1,024 tokens.
        threshold: gates at or below it are pruned.

    Raises:
        SpecError: values out of range.

    Example:
        >>> import comera
        >>> from comera.convert.ngrams import NGrams
        >>> print(NGrams(order=6, rank=160).spec(256, 128))
        n-grams to 6 of 256 as CP 160
        >>> print(NGrams(order=3, rank=64).spec(32768, 128))
        n-grams to 3 of 32768 as CP 64 over 128 features
    """

    order: int = 6
    rank: int = 160
    form: Literal["cp", "tt"] = "cp"
    heads: int = 4
    tables: Literal["own", "shared"] | None = None
    threshold: float = 1e-2

    def __post_init__(self) -> None:
        checks = {
            "order": (is_integer(self.order, 2), "an integer >= 2: order 1 is the token embedding itself"),
            "rank": (is_integer(self.rank, 1), "an integer >= 1"),
            "form": (self.form in ("cp", "tt"), "'cp' or 'tt'"),
            "heads": (is_integer(self.heads, 1), "an integer >= 1"),
            "tables": (self.tables in ("own", "shared", None), "'own', 'shared' or None"),
            "threshold": (0 <= self.threshold < 1, "in [0, 1): gates start at 1"),
        }
        check_fields(self, "", checks, SpecError)
        if self.form == "tt" and self.rank % self.heads:
            raise SpecError(f"rank must be a multiple of heads for form 'tt', got {self.rank} and {self.heads}")

    def spec(self, num_embeddings: int, embedding_dim: int) -> NGramSpec:
        """Sizes for a token table of these sizes."""
        heads, head_rank = (self.rank, 1) if self.form == "cp" else (self.heads, self.rank // self.heads)
        shared = num_embeddings > OWN_TABLES if self.tables is None else self.tables == "shared"
        inner = embedding_dim if shared else None
        return NGramSpec(num_embeddings, embedding_dim, self.order, heads, head_rank, inner)


@dataclass(frozen=True)
class NGramReport:
    """What `ngrams_` added: the spec of each table by the name of its embedding. Printing it gives one line each.

    See `ngrams_`.
    """

    tables: Mapping[str, NGramSpec]

    @property
    def parameters(self) -> int:
        """Of all tables, with gates and scales."""
        return sum(spec.numel + spec.rank_numel + spec.embedding_dim for spec in self.tables.values())

    def __str__(self) -> str:
        lines = [f"{name or 'the model'}: {spec}, {spec.numel:,} parameters" for name, spec in self.tables.items()]
        return "\n".join(lines)


def ngrams_(
    model: nn.Module,
    ngrams: NGrams | None = None,
    *,
    order: int | None = None,
    rank: int | None = None,
    embeddings: str | None = None,
    generator: torch.Generator | None = None,
) -> NGramReport:
    """Put a table of all n-grams of token ids beside the token embedding of a model, in place.

    E(i) = E_token[t_i] + s ⊙ P [f_2; …; f_N]: what a model adds to the embedding of a token then depends on the N − 1
    ids before it, too. Layers and parameters stay the same objects under the same names; heads that are tied share the
    token table alone. Call it after `tensorize_`, and create optimizers and wrappers afterwards. `param_groups` gives
    rates, `RankController` adapts the ranks, `save_pretrained` and `from_pretrained` keep the table.

    In models of transformers n-grams never cross padding, or documents by `position_ids` that start anew, and the ids
    of earlier calls are kept in the KV cache. In other models each row of ids is a whole document, unless the embedding
    is given a `context`.

    Args:
        model: any model of transformers that reads token ids, encoder or decoder or both; or a module with an
            `nn.Embedding` or `TTMEmbedding` that sees ids (B, T).
        ngrams: the format; by default `NGrams()`.
        order, rank: of the format, in place of its own.
        embeddings: glob pattern of the names of embeddings. By default the input embeddings of all base models of
            transformers, or the only table of another model.
        generator: source of the random tables.

    Returns:
        The tables by name; printable.

    Raises:
        ConversionError: no embedding, several in a model that is not of transformers, one that has n-grams, or an order
            above the model's context. The model is unchanged, as after the next error.
        SpecError: a format out of range.

    Example:
        >>> import torch, comera
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
        >>> print(comera.ngrams_(model, order=4, rank=32))
        model.embed_tokens: n-grams to 4 of 256 as CP 32, 38,912 parameters
        >>> ids = torch.tensor([list(b"the cat and the cat")])
        >>> model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape  # its cache keeps the ids
        torch.Size([1, 23])

    Source: docs/method.md §1b.
    """
    check_module(model)
    ngrams = _format(ngrams, order, rank)
    refuse_adapters(model, ConversionError, "ngrams_", "call ngrams_ first, then adapt_")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ConversionError("the model is wrapped in DistributedDataParallel: call ngrams_ first, then wrap")
    bases = _bases(model)
    chosen = _chosen(model, bases, embeddings)
    _check_readers(model, bases)
    tables: dict[str, tuple[nn.Module, NGramTable]] = {}
    for name, embedding in chosen.items():
        _check(name, embedding, ngrams, [base for base, own in bases if own is embedding])
        spec = ngrams.spec(embedding.num_embeddings, embedding.embedding_dim)  # type: ignore[arg-type]
        like = next(embedding.parameters())
        about: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "generator": generator}
        with torch.no_grad():
            tt = TensorTrain(spec, init_std=_std(embedding), threshold=ngrams.threshold, **about)
        tables[name] = embedding, NGramTable(tt)
    for embedding, table in tables.values():
        attach_ngrams_(embedding, table)
    finish_ngrams_(model, list(chosen.values()))
    return NGramReport({name: table.spec for name, (_, table) in tables.items()})


def finish_ngrams_(model: nn.Module, embeddings: Sequence[nn.Module]) -> None:
    """Finish a model whose embeddings have got tables: each base model of transformers passes the context of ids to its
    embedding, and the callbacks of `when_converted` run."""
    if not embeddings:
        return
    for base, embedding in _bases(model):
        if isinstance(embedding, NGramEmbedding) and _before not in base._forward_pre_hooks.values():
            _parameters(type(base))
            history_type()
            base.register_forward_pre_hook(_before, with_kwargs=True)
            base.register_forward_hook(_after, with_kwargs=True, always_call=True)
    guard_resizing_(model)
    notify_conversion(model)


def empty_table(
    spec: NGramSpec, init_std: float, threshold: float, like: Tensor, device: torch.device | str
) -> NGramTable:
    """A table without values, to be loaded, in the dtype of a parameter of its embedding; it draws nothing."""
    tt = TensorTrain(spec, init_std=init_std, threshold=threshold, dtype=like.dtype, device="meta")
    return NGramTable(tt if torch.device(device).type == "meta" else tt.to_empty(device=device))


def ngram_place(modules: Mapping[str, nn.Module], path: str) -> nn.Module | None:
    """The embedding beside which a table at this path belongs, with or without one; None for no such."""
    above, _, name = path.rpartition(".")
    layer = modules.get(above)
    return layer if name == "ngrams" and isinstance(layer, nn.Embedding | TTMEmbedding) else None


def _format(ngrams: NGrams | None, order: int | None, rank: int | None) -> NGrams:
    if not isinstance(ngrams, NGrams | None):
        raise SpecError(f"ngrams_: expected NGrams(...), got {ngrams!r}")
    ngrams = ngrams or NGrams()
    return replace(ngrams, order=ngrams.order if order is None else order, rank=ngrams.rank if rank is None else rank)


def _bases(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """The models of transformers in a model that look ids up themselves, each with its embedding."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    found: list[tuple[nn.Module, nn.Module]] = []
    for module in model.modules():
        if isinstance(module, library.PreTrainedModel):
            try:
                embedding = module.get_input_embeddings()
            except (NotImplementedError, AttributeError):
                continue
            if isinstance(embedding, nn.Embedding | TTMEmbedding) and embedding in set(module.modules()):
                found.append((module, embedding))
    models = {base for base, _ in found}
    return [(base, own) for base, own in found if not models.intersection(set(base.modules()) - {base})]


def _chosen(model: nn.Module, bases: list[tuple[nn.Module, nn.Module]], pattern: str | None) -> dict[str, nn.Module]:
    """The embeddings that get a table, by name."""
    kinds = nn.Embedding | TTMEmbedding
    tables: dict[str, nn.Module] = {name: m for name, m in model.named_modules() if isinstance(m, kinds)}
    if pattern is not None:
        found = {name: module for name, module in tables.items() if fnmatchcase(name, pattern)}
        if not found:
            raise ConversionError(f"ngrams_: no embedding's name matches {pattern!r}; there are {', '.join(tables)}")
        return found
    if bases:
        inputs = {own for _, own in bases}
        return {name: module for name, module in tables.items() if module in inputs}
    if len(tables) != 1:
        raise ConversionError(
            f"ngrams_: expected a model of transformers that reads token ids, or one with one embedding, got a "
            f"{type(model).__name__} with {len(tables)}: {', '.join(tables) or 'none'}"
            + (". Give the name of one, embeddings=..." if tables else "")
        )
    return tables


def _check(name: str, embedding: nn.Module, ngrams: NGrams, bases: list[nn.Module]) -> None:
    """Raise ConversionError for an embedding that cannot have this table."""
    if isinstance(embedding, NGramEmbedding):
        raise ConversionError(f"ngrams_: {name or 'the model'} has n-grams already")
    for base in bases:
        longest = getattr(base.config, "max_position_embeddings", None)
        if isinstance(longest, int) and ngrams.order > longest:
            raise ConversionError(
                f"ngrams_: expected an order up to the {longest} positions that {type(base).__name__} reads, got "
                f"{ngrams.order}"
            )


def _check_readers(model: nn.Module, bases: list[tuple[nn.Module, nn.Module]]) -> None:
    """Raise ConversionError for a model that looks ids up itself and gives a base model their embeddings only."""
    held = {embedding: base for base, embedding in bases}
    for outer in model.modules():
        own = getattr(outer, "get_input_embeddings", None)
        pictures = any("pixel_values" in name for name in _parameters(type(outer)))
        if not pictures or own is None or getattr(outer.config, "is_encoder_decoder", False):  # whose decoder reads ids
            continue
        try:
            base = held.get(own())
        except (NotImplementedError, AttributeError):
            continue
        if base is not None and base is not outer:
            raise ConversionError(
                f"ngrams_: expected a model that looks ids up in its {type(base).__name__}, got a "
                f"{type(outer).__name__}, which gives it embeddings of ids and images together, from which n-grams "
                f"cannot be read: call ngrams_ on the {type(base).__name__}, and train it alone"
            )


def _std(embedding: Any) -> float:
    """Root mean square of the rows of an embedding."""
    if isinstance(embedding, TTMEmbedding):
        return embedding.tt.init_std * float(embedding.embed_scale)
    converter = converters().get(type(embedding))
    scale = float(converter.embed_scale(embedding)) if converter else 1.0
    weight = embedding.weight.detach()
    if not weight.is_meta and weight.numel():
        std = float(weight.to(torch.promote_types(weight.dtype, torch.float32)).square().mean().sqrt())
        if 0 < std < float("inf"):
            return std * scale
    return converter.std(embedding) * scale if converter else scale


# --- hooks of base models ---------------------------------------------------------------------------------------------


def _before(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let the embedding of a base model know the context of the ids of a call."""
    if tables := _tables(base):
        call = _call(base, tables[0], args, kwargs)
        for table in tables:
            begin_reading(base, table, call.context, call)


def _after(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Append the ids of a call to the caches that it was given and that it returns."""
    readings = [each for table in reversed(_tables(base)) if (each := end_reading(base, table))]
    if not readings or output is None:  # None: the call failed
        return
    if not (torch.compiler.is_compiling() or any(each.used for each in readings)):
        raise DataError(
            f"{type(base).__name__}: expected ids to be looked up by its embedding, which adds n-grams, got another "
            "lookup in its place, such as PEFT's trainable_token_indices (train the whole embedding instead, "
            "modules_to_save, or detach the table), or a graph of torch.compile that begins within the model (compile "
            "a call without a cache, use_cache=False)"
        )
    call: Call = readings[0].note
    for kept in _caches(call.cache, output):
        remember(kept, call.ids, call.positions)


def _tables(base: Any) -> list[NGramEmbedding]:
    """What a base model looks its ids up in: its embedding, or those inside what PEFT has put in its place."""
    embedding = base.get_input_embeddings()
    if isinstance(embedding, NGramEmbedding):
        return [embedding]
    return [module for module in embedding.modules() if isinstance(module, NGramEmbedding)]


def _caches(given: Any, output: Any) -> Iterator[Any]:
    # as a plain mapping, because asking outputs for an old name gives a warning
    named = dict(output.items()) if hasattr(output, "keys") else {}
    parts = output if isinstance(output, tuple) else [named[name] for name in CACHES if name in named]
    every = (given, *parts)
    found = {id(part): part for part in every if hasattr(getattr(part, "self_attention_cache", part), "layers")}
    yield from found.values()  # one cache may have two names


def _call(base: Any, embedding: NGramEmbedding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    where = type(base).__name__
    given = dict(zip(_parameters(type(base)), args, strict=False)) | kwargs
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor):
        raise DataError(
            f"{where}: expected input_ids, of which its n-gram table makes n-grams, got "
            f"{'inputs_embeds' if given.get('inputs_embeds') is not None else 'none'}: give the ids"
        )
    foreign = next((name for name in _FOREIGN_CACHES if given.get(name) is not None), None)
    if foreign:
        raise DataError(f"{where}: {foreign} tells nothing of the ids before, which n-grams need: give whole sequences")
    kept = next((given[name] for name in CACHES if given.get(name) is not None), None)
    return Call(
        ids.view(-1, ids.shape[-1]),
        longest_of(embedding),
        attention_mask=given.get("attention_mask"),
        position_ids=given.get("position_ids"),
        cache=kept,
        where=where,
    )


_PARAMETERS: dict[type[nn.Module], tuple[str, ...]] = {}


def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """The names of what a forward takes, in their order."""
    if kind not in _PARAMETERS:
        _, *names = inspect.signature(kind.forward).parameters
        _PARAMETERS[kind] = tuple(names)
    return _PARAMETERS[kind]
