"""N-grams in models of transformers: padding, packed documents, caches and all ways to generate, against the full
forward of each sequence alone; files; what is refused."""

import copy
import pickle
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModel,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    CLIPVisionConfig,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

import comera
from comera.errors import ConversionError, DataError, SpecError
from comera.export import serving_copy
from comera.nn import NGramEmbedding, NGramTable
from comera.nn.ngram import detach_ngrams_

V = 50
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TOKENS: dict[str, Any] = {"vocab_size": V, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}

# as the release of transformers names it
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def cache_of(output: Any) -> Any:
    return output[CACHE]


def llama(**options: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **TOKENS, **options))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **TOKENS))


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES, **TOKENS, num_key_value_heads=1, sliding_window=6))


def t5() -> PreTrainedModel:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, **TOKENS, decoder_start_token_id=1))


def bart() -> PreTrainedModel:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    tokens = TOKENS | {"decoder_start_token_id": 1, "forced_eos_token_id": None}
    return BartForConditionalGeneration(BartConfig(**sizes, **heads, **tokens, max_position_embeddings=64))


def bert() -> PreTrainedModel:
    return BertForMaskedLM(BertConfig(**SIZES, vocab_size=V))


def with_ngrams(build: Callable[[], PreTrainedModel], order: int = 4, **options: Any) -> PreTrainedModel:
    """A model whose n-grams count for a lot, so that a wrong one shows."""
    torch.manual_seed(0)
    model = build().eval()
    comera.ngrams_(model, order=order, rank=16, **options)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, NGramTable):
                module.scale.uniform_(0.5, 1.5)
    return model


def ids_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, V, shape, generator=torch.Generator().manual_seed(seed))


def alone(model: nn.Module, *sequences: Tensor) -> list[Tensor]:
    """The logits of each sequence (T,) in a forward of its own."""
    with torch.no_grad():
        return [model(input_ids=ids[None]).logits[0] for ids in sequences]


def close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


# --- one forward -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [llama, gpt2, mistral, bert], ids=lambda build: build.__name__)
def test_ngrams_do_what_they_say_and_a_model_reads_them(build):
    model = with_ngrams(build)
    ids = ids_of(1, 9)
    before = model(input_ids=ids).logits
    other = ids.clone()
    other[0, 2] += 1 if ids[0, 2] < V - 1 else -1
    embedding = model.get_input_embeddings()
    changed = (embedding(ids) - embedding(other)).abs().amax(2)[0] > 1e-6
    assert changed.tolist() == [False, False, True, True, True, True, False, False, False]
    assert not torch.equal(model(input_ids=other).logits, before)


@pytest.mark.parametrize("build", [llama, gpt2, mistral], ids=lambda build: build.__name__)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_in_no_ngram(build, side):
    model = with_ngrams(build)
    long, short = ids_of(9), ids_of(5, seed=2)
    padding = torch.full((4,), 7)  # an id like others: the mask says what is padding
    padded = torch.cat([padding, short] if side == "left" else [short, padding])
    mask = torch.ones(2, 9, dtype=torch.long)
    where = slice(4, None) if side == "left" else slice(None, 5)
    mask[1] = 0
    mask[1, where] = 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        found = model(input_ids=torch.stack([long, padded]), attention_mask=mask, position_ids=positions).logits
    exact = alone(model, long, short)
    close(found[0], exact[0])
    close(found[1, where], exact[1])


def test_padding_of_an_encoder():
    model = with_ngrams(bert)
    short = ids_of(5)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    with torch.no_grad():
        found = model(input_ids=torch.cat([short, short[:2]])[None], attention_mask=mask).logits
    close(found[0, :5], alone(model, short)[0])


@pytest.mark.parametrize("starts", [(0, 0, 0), (0, 7, 20)], ids=["start anew", "jump"])
def test_no_ngram_crosses_documents_that_are_packed(starts):
    model = with_ngrams(llama)
    first, second, third = ids_of(5), ids_of(1, seed=2), ids_of(6, seed=3)
    packed = torch.cat([first, second, third])[None]
    positions = torch.cat([start + torch.arange(n) for start, n in zip(starts, (5, 1, 6), strict=True)])[None]
    with torch.no_grad():  # without a cache, transformers lets no attention cross them either
        found = model(input_ids=packed, position_ids=positions, use_cache=False).logits[0]
    for part, exact in zip(found.split([5, 1, 6]), alone(model, first, second, third), strict=True):
        close(part, exact)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_a_mask_of_positions_by_keys_says_what_ngrams_reach(kind):
    model = with_ngrams(llama)
    first, second = ids_of(4), ids_of(5, seed=2)
    seen = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).tril().bool()[None, None]
    mask = seen if kind == torch.bool else torch.zeros(1, 1, 9, 9).masked_fill(~seen, torch.finfo(kind).min)
    positions = torch.cat([torch.arange(4), torch.arange(4, 9)])[None]  # which do not tell
    with torch.no_grad():
        found = model(input_ids=torch.cat([first, second])[None], attention_mask=mask, position_ids=positions)
    close(found.logits[0, :4], alone(model, first)[0])
    embedded = model.get_input_embeddings()(second[None])
    changed = model.get_input_embeddings()(torch.cat([first, second])[None])[:, 4:]
    assert not torch.allclose(embedded, changed)  # by itself an embedding sees one document
    close(found.logits[0, 4:], model(input_ids=second[None], position_ids=torch.arange(4, 9)[None]).logits[0])


# --- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [llama, gpt2, mistral], ids=lambda build: build.__name__)
@pytest.mark.parametrize("sizes", [[1] * 9, [4, 1, 1, 3], [2, 7]], ids=str)
def test_a_cache_carries_the_ids(build, sizes):
    model = with_ngrams(build)
    ids, cache, found = ids_of(2, 9), None, []
    with torch.no_grad():
        for part in ids.split(sizes, 1):
            output = model(input_ids=part, **{CACHE: cache}, use_cache=True)
            cache = cache_of(output)
            found.append(output.logits)
    assert cache.get_seq_length() == 9
    for one, exact in zip(torch.cat(found, 1), alone(model, *ids), strict=True):
        close(one, exact)


def test_nothing_is_kept_between_calls_but_in_the_cache():
    model = with_ngrams(llama)
    ids = ids_of(2, 8)
    with torch.no_grad():
        left, right = (cache_of(model(input_ids=row[None, :5], use_cache=True)) for row in ids)
        model(input_ids=ids_of(1, 6, seed=3))
        found = [
            model(input_ids=row[None, 5:], **{CACHE: cache}).logits[0]
            for row, cache in zip(ids, (left, right), strict=True)
        ]
    for one, exact in zip(found, alone(model, *ids), strict=True):
        close(one, exact[5:])


GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampled beams": {"num_beams": 4, "do_sample": True, "num_return_sequences": 2},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "static cache, one prompt": {"do_sample": False, "cache_implementation": "static"},
    "without a cache": {"do_sample": False, "use_cache": False},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("how", GENERATE)
@pytest.mark.parametrize("build", [llama, gpt2], ids=lambda build: build.__name__)
def test_generated_tokens_have_the_scores_of_the_full_forward(build, how):
    """Of prompts of unequal length, or of one alone, which needs no mask."""
    model = with_ngrams(build)
    lengths = [7] if how in ("prompt lookup", "static cache, one prompt") else [7, 3]
    prompts = [ids_of(length, seed=length) for length in lengths]
    padded = torch.stack([torch.cat([torch.zeros(7 - len(p), dtype=torch.long), p]) for p in prompts])
    if how == "prompt lookup":
        padded[0, 4:] = padded[0, :3]  # so that there is something to find
    torch.manual_seed(0)
    with torch.no_grad():
        made = model.generate(
            padded,
            attention_mask=(padded != 0).long(),
            max_new_tokens=8,
            output_logits=True,
            return_dict_in_generate=True,
            **GENERATE[how],
        )
    beams = getattr(made, "beam_indices", None)
    for k, sequence in enumerate(made.sequences):
        first = 7 - lengths[k * len(lengths) // len(made.sequences)]
        (exact,) = alone(model, sequence[first:])
        for step, logits in enumerate(made.logits):
            row = k if beams is None else int(beams[k, step])
            close(logits[row], exact[len(exact) - 8 + step - 1])


def test_assisted_decoding_takes_candidates_back():
    model, assistant = with_ngrams(llama), with_ngrams(lambda: llama(tie_word_embeddings=True), order=3)
    ids = ids_of(1, 6)
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    helped = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, assistant_model=assistant
    )
    assert torch.equal(plain, helped)


@pytest.mark.parametrize("build", [t5, bart], ids=lambda build: build.__name__)
@pytest.mark.parametrize("how", ["greedy", "beams"])
def test_encoder_and_decoder_have_a_history_each(build, how):
    model = with_ngrams(build)
    read = ids_of(2, 7)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    with torch.no_grad():
        made = model.generate(
            read,
            attention_mask=mask,
            max_new_tokens=6,
            output_logits=True,
            return_dict_in_generate=True,
            **GENERATE[how],
        )
        for k, row in enumerate(made.sequences):
            inside = read[k : k + 1, : int(mask[k].sum())]
            exact = model(input_ids=inside, decoder_input_ids=row[None, :-1]).logits[0]
            for step, logits in enumerate(made.logits):
                beam = k if how == "greedy" else int(made.beam_indices[k, step])
                close(logits[beam], exact[step])
    tables = {name: module for name, module in model.named_modules() if isinstance(module, NGramTable)}
    assert len(tables) == 2
    assert all("encoder" in name or "decoder" in name for name in tables)


# --- files and copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [llama, gpt2, t5, bert, lambda: llama(tie_word_embeddings=True)],
    ids=["llama", "gpt2", "t5", "bert", "tied"],
)
def test_from_pretrained_gives_it_back(build, tmp_path):
    model = with_ngrams(build)
    inputs = {"input_ids": ids_of(2, 6)} | ({"decoder_input_ids": ids_of(2, 5)} if build is t5 else {})
    tables = [module for module in model.modules() if isinstance(module, NGramTable)]
    for table in tables:  # pruned to columns that the shapes do not show
        for n, gates in enumerate(table.tt.rank_params):
            gates.data[torch.randperm(16)[: 3 * n + 5]] = 0
    comera.rank.prune_(model)
    assert all(table.spec.columns is not None for table in tables)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert [m.spec for m in loaded.modules() if isinstance(m, NGramTable)] == [table.spec for table in tables]
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    ties = [each.get_output_embeddings().weight is each.get_input_embeddings().weight for each in (model, loaded)]
    assert ties[0] == ties[1]
    comera.load_pretrained(model, tmp_path)
    fresh = build().eval()
    comera.load_pretrained(fresh, tmp_path)
    assert torch.equal(fresh(**inputs).logits, loaded(**inputs).logits)
    if build is llama:
        base = AutoModel.from_pretrained(tmp_path).eval()
        assert torch.equal(base(**inputs)[0], model.model(**inputs)[0])
        options = inputs | {"attention_mask": torch.ones(2, 6), "max_new_tokens": 4, "do_sample": False}
        assert torch.equal(loaded.generate(**options), model.generate(**options))


def test_comeras_own_files_and_a_compressed_table(tmp_path):
    torch.manual_seed(0)
    model = llama().eval()
    comera.tensorize_(model, comera.TensorizeConfig(None, comera.TTM.low_rank(8)))
    comera.ngrams_(model, order=3, rank=8)
    ids = ids_of(2, 6)
    comera.save_pretrained(model, tmp_path)
    for fresh in (llama(), copy.deepcopy(model)):
        comera.load_pretrained(fresh.eval(), tmp_path)
        assert torch.equal(fresh(ids).logits, model(ids).logits)
    with torch.device("meta"):
        empty = llama()
    comera.load_pretrained(empty.eval(), tmp_path)
    assert torch.equal(empty(ids).logits, model(ids).logits)
    with pytest.raises(comera.ComeraError, match="does not fit"):
        comera.load_pretrained(other := gpt2(), tmp_path)
    assert not any(isinstance(module, NGramEmbedding) for module in other.modules())
    with pytest.raises(ConversionError, match=r"ngrams.tt.*27000|n-grams to 3 of 50"):
        comera.materialize_(model)


def test_a_table_goes_with_an_embedding_that_is_compressed_later():
    model = with_ngrams(llama)
    table = model.get_input_embeddings().ngrams
    comera.tensorize_(model, comera.TensorizeConfig(None, comera.TTM.low_rank(8)))
    assert model.get_input_embeddings().ngrams is table
    assert type(model.get_input_embeddings()).__name__ == "NGramTTMEmbedding"
    ids = ids_of(2, 9)
    output = model(ids[:, :5], use_cache=True)
    both = torch.cat([output.logits, model(ids[:, 5:], **{CACHE: cache_of(output)}).logits], 1)
    close(both, model(ids).logits)


def test_copies_pickles_and_taking_it_away():
    model = with_ngrams(llama)
    ids = ids_of(2, 6)
    exact = model(ids).logits
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(same(ids).logits, exact)
        assert same.get_input_embeddings().ngrams is not model.get_input_embeddings().ngrams
    detach_ngrams_(model.get_input_embeddings())
    torch.manual_seed(0)
    assert torch.equal(model(ids).logits, llama().eval()(ids).logits)
    assert type(model.get_input_embeddings()) is nn.Embedding


# --- what is refused -------------------------------------------------------------------------------------------------


def test_inputs_without_ids_and_caches_of_others_are_refused():
    model = with_ngrams(llama)
    ids = ids_of(2, 6)
    embeds = torch.randn(2, 6, 32)
    for call in (lambda: model(inputs_embeds=embeds), lambda: model.generate(inputs_embeds=embeds, max_new_tokens=3)):
        with pytest.raises(DataError, match=r"LlamaModel: expected input_ids.*got inputs_embeds"):
            call()
    foreign = cache_of(llama().eval()(ids, use_cache=True))
    with pytest.raises(DataError, match="cache of a model with n-grams, got one with 6 positions"):
        model(ids, **{CACHE: foreign})
    cache = cache_of(model(ids, use_cache=True))
    with pytest.raises(DataError, match="the 2 sequences in the cache, got 1"):
        model(ids[:1], **{CACHE: cache})
    cache.layers[0].crop(-2)
    with pytest.raises(DataError, match="6 ids and"):
        model(ids, **{CACHE: cache})
    with pytest.raises(DataError, match=r"attention mask for 6 positions in the cache and 1"):
        model(ids[:, :1], **{CACHE: cache_of(model(ids, use_cache=True))}, attention_mask=torch.ones(2, 2))
    with pytest.raises(DataError, match=r"position_ids \(2, 6\)"):
        model(ids, position_ids=torch.zeros(3, 2, 6).long())
    with pytest.raises(IndexError):
        model(torch.full((1, 3), V))
    assert model(ids, **{CACHE: DynamicCache()}).logits.shape == (2, 6, V)  # an error leaves nothing behind


def test_orders_and_models_that_do_not_fit_are_refused():
    for order, said in ((1, "order must be an integer >= 2"), (65, "order up to the 64 positions")):
        model = gpt2()
        with pytest.raises((SpecError, ConversionError), match=said):
            comera.ngrams_(model, order=order, rank=4)
        assert type(model.get_input_embeddings()) is nn.Embedding
    for rank in (0, -1, 2.5):
        with pytest.raises(SpecError, match="rank must be"):
            comera.ngrams_(llama(), rank=rank)
    model = with_ngrams(llama)
    with pytest.raises(ConversionError, match=r"model.embed_tokens has n-grams already"):
        comera.ngrams_(model)
    with pytest.raises(ConversionError, match="one embedding, got a Sequential with 0"):
        comera.ngrams_(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ConversionError, match="no embedding's name matches"):
        comera.ngrams_(llama(), embeddings="*.wte")
    with pytest.raises(ConversionError, match="cannot be resized while compressed, adapted or with n-grams"):
        model.resize_token_embeddings(V + 3)


def test_a_plain_module_takes_rows_as_documents():
    model = nn.Sequential(nn.Embedding(V, 16), nn.Linear(16, 3))
    report = comera.ngrams_(model, order=3, rank=8)
    assert str(report) == f"0: n-grams to 3 of {V} as CP 8, {3 * V * 8 + 16 * 16:,} parameters"
    assert report.parameters == sum(p.numel() for p in model[0].ngrams.parameters())
    assert model(ids_of(2, 5)).shape == (2, 5, 3)
    with pytest.raises(DataError, match=r"\(batch, positions\)"):
        model(ids_of(5))
    several = nn.ModuleList([nn.Embedding(9, 4), nn.Embedding(9, 4)])
    with pytest.raises(ConversionError, match=r"with 2: 0, 1. Give the name of one"):
        comera.ngrams_(several)
    assert list(comera.ngrams_(several, embeddings="1", order=2, rank=2).tables) == ["1"]


@pytest.mark.parametrize("vocabulary", [V, 2000])  # tables of its own, and over the rows of tokens
@pytest.mark.parametrize("compressed", [False, True])
def test_the_padding_of_a_plain_embedding_adds_nothing_and_is_in_no_ngram(vocabulary, compressed):
    torch.manual_seed(0)
    embedding = nn.Sequential(nn.Embedding(vocabulary, 16, padding_idx=0))
    if compressed:
        comera.tensorize_(embedding, comera.TensorizeConfig(None, comera.TTM(order=2, rank=4)))
    comera.ngrams_(embedding, order=3, rank=8)
    ids, nothing = ids_of(2, 5), torch.zeros(2, 3, dtype=torch.long)
    rows = embedding(ids)
    assert not torch.allclose(rows[:, 1:], embedding(ids[:, 1:]), atol=1e-2)  # n-grams count
    for parts in ([ids, nothing], [nothing, ids], [ids[:, :2], nothing, ids[:, 2:]]):
        found = embedding(torch.cat(parts, 1))
        of_padding = torch.cat(parts, 1) == 0
        assert not found[of_padding].any()
        exact = torch.cat([embedding(part) for part in parts if part is not nothing], 1)
        close(found[~of_padding].view(2, 5, 16), exact)


@pytest.mark.parametrize("padding", [None, 0])
def test_a_program_takes_each_row_as_a_text(padding):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, 16, padding_idx=padding), nn.Linear(16, 8)).eval()
    comera.ngrams_(model, order=3, rank=8)
    ids = ids_of(2, 7).masked_fill(torch.arange(7) > 4, 0)
    program = torch.export.export(serving_copy(model), (ids,))
    close(program.module()(ids.flip(0)), model(ids.flip(0)))


def test_a_cache_that_the_output_does_not_name_has_the_ids_too():
    model, ids = with_ngrams(llama), ids_of(2, 9)
    with torch.no_grad():
        for kept in (DynamicCache(), StaticCache(config=model.config, max_cache_len=20)):
            model(input_ids=ids[:, :5], use_cache=False, **{CACHE: kept})
            rest = model(input_ids=ids[:, 5:], attention_mask=torch.ones_like(ids), **{CACHE: kept}).logits
            close(rest, model(input_ids=ids).logits[:, 5:])


def test_the_static_cache_of_another_model_is_refused():
    model, ids = with_ngrams(llama), ids_of(2, 9)
    kept = StaticCache(config=model.config, max_cache_len=20)
    llama()(input_ids=ids[:, :5], **{CACHE: kept})
    with pytest.raises(DataError, match="got one with 5 positions and without their ids"):
        model(input_ids=ids[:, 5:], **{CACHE: kept})


def test_a_static_cache_of_chunked_layers_alone_is_refused():
    sizes = {**SIZES, "intermediate_size_mlp": 48, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2}
    kinds = {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 8}
    torch.manual_seed(0)
    model, ids = Llama4ForCausalLM(Llama4TextConfig(**sizes, **TOKENS, **kinds)).eval(), ids_of(2, 6)
    comera.ngrams_(model, order=3, rank=8)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with pytest.raises(DataError, match=r"chunked attention alone, .*generate without a static cache"):
        model.generate(ids, cache_implementation="static", **options)
    found = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    with torch.no_grad():
        exact = model(input_ids=found.sequences, use_cache=False).logits[:, 5:-1]
    close(torch.stack(found.logits, 1), exact)  # across a boundary of chunks


def test_a_model_of_sliding_layers_alone_goes_on_from_its_cache():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Gemma3TextConfig(vocab_size=64, num_hidden_layers=2, head_dim=16, **sizes)
    torch.manual_seed(0)
    model, ids = Gemma3ForCausalLM(config).eval(), torch.randint(2, 64, (2, 12))
    comera.ngrams_(model, order=4, rank=16)
    with torch.no_grad():
        kept = cache_of(model(input_ids=ids[:, :8], use_cache=True))
        copied = copy.deepcopy(kept)
        exact = model(input_ids=ids).logits[:, 8:]
        for each in (kept, copied, pickle.loads(pickle.dumps(copied))):
            close(model(input_ids=ids[:, 8:], **{CACHE: each}).logits, exact)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("kind", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}], ids=str)
def test_an_adapter_around_the_embedding_leaves_it_its_history(kind):
    model, ids = with_ngrams(llama), ids_of(2, 12)
    plain = model(input_ids=ids).logits.detach()
    tuned = get_peft_model(model, LoraConfig(**({"target_modules": ["q_proj"]} | kind))).eval()
    with torch.no_grad():
        close(tuned(input_ids=ids).logits, plain)
        kept = cache_of(tuned(input_ids=ids[:, :8], use_cache=True))
        close(tuned(input_ids=ids[:, 8:], **{CACHE: kept}).logits, plain[:, 8:])
        both = tuned(input_ids=ids, position_ids=torch.arange(6).repeat(2, 2), use_cache=False).logits
        close(both[:, 6:], tuned(input_ids=ids[:, 6:]).logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_an_adapter_that_looks_tokens_up_itself_is_an_error():
    kind = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2])
    tuned = get_peft_model(with_ngrams(llama), kind)
    with pytest.raises(DataError, match=r"LlamaModel: expected ids to be looked up by .*modules_to_save"):
        tuned(input_ids=ids_of(2, 9))


@pytest.mark.parametrize("cached", [None, False])  # by default the model makes a cache
def test_a_compiled_model_reads_its_ngrams(cached):
    model, ids = with_ngrams(llama), ids_of(2, 9)
    options = {} if cached is None else {"use_cache": cached}
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        close(compiled(input_ids=ids, **options).logits, model(input_ids=ids).logits)
        packed = torch.arange(9).remainder(5).expand(2, -1)
        exact = model(input_ids=ids, position_ids=packed, **options).logits
        close(compiled(input_ids=ids, position_ids=packed, **options).logits, exact)


def test_a_decoder_of_captions_reads_its_ids_itself():
    sizes = {"image_size": 8, "patch_size": 4}
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**SIZES, **sizes), gpt2().config)
    torch.manual_seed(0)
    model = VisionEncoderDecoderModel(config=config).eval()
    assert comera.ngrams_(model, order=3, rank=8).tables.keys() == {"decoder.transformer.wte"}
    given = {"pixel_values": torch.randn(2, 3, 8, 8)}
    ids = ids_of(2, 9)
    with torch.no_grad():
        exact = model(decoder_input_ids=ids, **given).logits
        kept = cache_of(model(decoder_input_ids=ids[:, :6], use_cache=True, **given))
        close(model(decoder_input_ids=ids[:, 6:], **{CACHE: kept}, **given).logits, exact[:, 6:])


def test_a_model_of_images_that_looks_ids_up_itself_is_refused():
    images = CLIPVisionConfig(**SIZES | {"num_hidden_layers": 1}, image_size=8, patch_size=4)
    config = LlavaConfig(text_config=LlamaConfig(**SIZES, **TOKENS), vision_config=images, image_token_index=5)
    model = LlavaForConditionalGeneration(config).eval()
    before = model(input_ids=ids_of(2, 9)).logits
    with pytest.raises(ConversionError, match=r"got a LlavaFor.*, which gives it .*ngrams_ on the LlamaModel"):
        comera.ngrams_(model, order=3, rank=8)
    assert torch.equal(model(input_ids=ids_of(2, 9)).logits, before)
    assert comera.ngrams_(model.model.language_model, order=3, rank=8).tables.keys() == {"embed_tokens"}
