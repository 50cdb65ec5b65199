"""Reports once named registered types only: 72 % of a Mixtral stayed dense without a word, as did common subclasses."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    XLNetConfig,
    XLNetLMHeadModel,
)

from comera.adapters import TTAdapter, adapt_, merge_adapters_, remove_adapters_
from comera.convert import TT, TTM, LayerRow, TensorizeConfig, materialize_, tensorize_
from comera.errors import ConversionError
from comera.fusion import fuse_
from comera.nn import TTLinear, TTMEmbedding
from comera.pretrained import load_pretrained, save_pretrained

SMALL = TensorizeConfig(linear=TT(order=4, rank=4), embedding=TTM(order=2, rank=4))
EXACT = TensorizeConfig(linear=TT(order=2, rank=999), embedding=TTM(order=1), init="decompose", min_ratio=0.0)
BASE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
IDS = torch.tensor([[5, 6, 7, 1], [8, 255, 2, 3]])


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**BASE, intermediate_size=96, num_key_value_heads=2, num_local_experts=4))


def xlnet() -> nn.Module:
    return XLNetLMHeadModel(XLNetConfig(d_model=64, n_layer=2, n_head=2, d_inner=96, vocab_size=256))


def falcon() -> FalconForCausalLM:
    return FalconForCausalLM(FalconConfig(**BASE, bias=True))


def gemma() -> Gemma3ForCausalLM:
    config = Gemma3TextConfig(**BASE | {"hidden_size": 48}, intermediate_size=96, num_key_value_heads=2, head_dim=24)
    return Gemma3ForCausalLM(config)


def bart() -> BartForConditionalGeneration:
    sizes = {"d_model": 48, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 256}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    return BartForConditionalGeneration(BartConfig(**sizes, **heads, scale_embedding=True))


def others() -> nn.Module:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(64, 64),
            "lstm": nn.LSTM(64, 64),
            "cell": nn.GRUCell(64, 64),
            "conv": nn.Conv2d(8, 8, 3),
            "attention": nn.MultiheadAttention(64, 2),
            "norm": nn.LayerNorm(64),
            "bilinear": nn.Bilinear(8, 8, 8),
        }
    )
    model["again"] = nn.Linear(64, 64)
    model["again"].weight = model["linear"].weight
    model["again"].bias = model["linear"].bias
    model.register_parameter("token", nn.Parameter(torch.zeros(1, 1, 64)))
    return model


@pytest.mark.parametrize("make", [mixtral, xlnet, falcon, gemma, bart, others])
def test_every_parameter_counts_in_one_row(make: Callable[[], nn.Module]) -> None:
    model = make()
    total = sum(p.numel() for p in model.parameters())
    for _ in range(2):  # the second time, everything is compressed already
        report = tensorize_(model, SMALL)
        owners = {name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
        rows = {row.name for row in report.rows}
        assert {name for name in owners if ".tt." not in name} <= rows
        assert sum(row.dense + row.bias for row in report.rows) == report.dense_total == total
        assert sum(row.stored + row.bias for row in report.rows) == report.total
        assert report.total == sum(p.numel() for p in model.parameters())
        assert all(row.note for row in report.rows if not row.compressed)
        assert [LayerRow.from_dict(row.to_dict()) for row in report.rows] == list(report.rows)


def test_the_reasons_name_the_matrices_that_stay_dense() -> None:
    reasons = {row.name: row.note for row in tensorize_(others(), SMALL).rows if not row.compressed}
    assert reasons["cell"].startswith("weight_ih 192×64, weight_hh 192×64: each step would make them dense again")
    assert reasons["conv"] == ("weight 8×8×3×3: a convolution, which TensorizeConfig(conv=comera.TT()) would compress")
    assert reasons["norm"] == reasons["attention"] == reasons["lstm"] == reasons[""] == "no matrix"
    assert "weight 8×8×8: no linear layer or table" in reasons["bilinear"]


def test_alike_modules_are_printed_as_one_row() -> None:
    lines = str(tensorize_(mixtral(), SMALL)).splitlines()
    (experts,) = [line for line in lines if "MixtralExperts" in line]
    assert experts.startswith("| model.layers.0.mlp.experts and 1 more")
    assert "147,456" in experts
    reason = "matrices of experts, which TensorizeConfig(experts=comera.TT(order=3)) would compress"
    assert f"gate_up_proj 4×192×64, down_proj 4×64×96: {reason}" in experts


def test_rows_of_before_have_layers_only() -> None:
    values = tensorize_(nn.Sequential(nn.Linear(64, 64)), SMALL).rows[0].to_dict()
    del values["bias"], values["layer"]
    row = LayerRow.from_dict(values)
    assert (row.layer, row.bias) == (True, 0)


def logits(model: nn.Module, **inputs: Tensor) -> Tensor:
    return model.eval()(input_ids=IDS, **inputs).logits


@pytest.mark.parametrize("make", [falcon, gemma, bart])
def test_common_subclasses_convert_and_come_back(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().double()
    types = {name: type(module) for name, module in model.named_modules()}
    dense = logits(model)
    tensorize_(model, EXACT)
    special = model.transformer.h[0].mlp.dense_h_to_4h if make is falcon else model.get_input_embeddings()
    assert isinstance(special, TTLinear if make is falcon else TTMEmbedding)
    torch.testing.assert_close(logits(model), dense, rtol=1e-9, atol=1e-9)
    if make is not falcon:
        assert float(model.get_input_embeddings().embed_scale) == pytest.approx(48**0.5)
        assert "embed_scale=6.9282" in repr(model.get_input_embeddings())
    materialize_(model)
    assert {name: type(module) for name, module in model.named_modules()} == types
    torch.testing.assert_close(logits(model), dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [gemma, bart])
def test_a_scale_is_rounded_as_the_dense_model_rounds_it(make: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(0)
    model = make().to(torch.bfloat16)
    tensorize_(model, EXACT)
    table = model.get_input_embeddings()
    found = table(IDS)
    materialize_(model)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(table.weight)
    assert torch.equal(found, model.get_input_embeddings()(IDS))


def test_a_scaled_table_from_the_meta_device(tmp_path: Path) -> None:
    model = gemma()
    tensorize_(model, SMALL)
    save_pretrained(model, tmp_path)
    with torch.device("meta"):
        other = gemma()
    load_pretrained(other, tmp_path)
    with torch.no_grad():
        assert torch.equal(logits(other), logits(model))
    with torch.device("meta"):
        fresh = gemma()
    tensorize_(fresh, SMALL)
    assert float(fresh.get_input_embeddings().embed_scale) == pytest.approx(48**0.5)


def test_the_output_of_multi_head_attention_is_compressed_and_right_in_all_paths() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    rows = {row.name: row for row in tensorize_(layer, SMALL).rows}
    assert rows["self_attn.out_proj"].compressed
    assert "materialized in each forward" in rows["self_attn.out_proj"].note
    dense = materialize_(copy.deepcopy(layer))
    for training in (True, False):
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                torch.testing.assert_close(layer.train(training)(x), dense.train(training)(x), rtol=1e-9, atol=1e-9)
    layer.train()(x).square().sum().backward()
    assert all(p.grad is not None for p in layer.self_attn.out_proj.parameters())


# --- Hugging Face's own ways to change, copy and make a model -------------------------------------------------------


def llama(**config: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**BASE, intermediate_size=96, tie_word_embeddings=False, **config))


def test_resizing_a_compressed_vocabulary_is_refused_before_anything_changes() -> None:
    model = llama()
    tensorize_(model, TensorizeConfig(SMALL.linear, None))  # the table stays dense, the head does not
    before = logits(model)
    with pytest.raises(
        ConversionError, match=r"expected 256 tokens, got 320: the head of LlamaForCausalLM.*materialize_"
    ):
        model.resize_token_embeddings(300, pad_to_multiple_of=64)
    assert torch.equal(logits(model), before)
    assert model.resize_token_embeddings(256) is model.get_input_embeddings()
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    materialize_(model)
    model.resize_token_embeddings(300, mean_resizing=False)
    assert logits(model).shape[-1] == 300
    with pytest.raises(ConversionError, match="resize_token_embeddings"):
        other.resize_token_embeddings(300)
    assert logits(other).shape[-1] == 256


def test_resizing_where_only_other_layers_are_compressed_works() -> None:
    model = llama()
    tensorize_(model, TensorizeConfig(SMALL.linear, None, {"lm_head": None}))
    model.resize_token_embeddings(300, mean_resizing=False)
    assert logits(model).shape[-1] == model.config.vocab_size == 300


@pytest.mark.parametrize("without", [remove_adapters_, merge_adapters_])
def test_an_adapted_head_is_not_resized_away(without: Callable[[nn.Module], nn.Module]) -> None:
    model = llama()
    adapt_(model, TTAdapter(rank=4), targets="lm_head")
    with pytest.raises(ConversionError, match=r"the head of LlamaForCausalLM.*merge_adapters_"):
        model.resize_token_embeddings(300)
    assert any("adapter" in name for name, _ in model.named_parameters())
    without(model)
    model.resize_token_embeddings(300, mean_resizing=False)
    assert logits(model).shape[-1] == 300


@pytest.mark.parametrize("fused", [False, True])
def test_a_deep_copy_is_a_model_of_its_own(fused: bool) -> None:
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**BASE, intermediate_size=96))
    tensorize_(model, SMALL)
    if fused:
        fuse_(model)
    before = logits(model)
    other = copy.deepcopy(model)
    assert not {*map(id, model.parameters())} & {*map(id, other.parameters())}
    assert other.cls.predictions.decoder.tt is other.bert.embeddings.word_embeddings.tt
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(other), before)
    logits(other).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_models_of_auto_classes_convert(tmp_path: Path) -> None:
    config = LlamaConfig(**BASE, intermediate_size=96)
    model = AutoModelForCausalLM.from_config(config)
    tensorize_(model, SMALL)
    assert isinstance(model.get_input_embeddings(), TTMEmbedding)
    assert isinstance(model.model.layers[0].mlp.up_proj, TTLinear)
    save_pretrained(model, tmp_path)
    other = load_pretrained(AutoModelForCausalLM.from_config(config), tmp_path)
    assert torch.equal(logits(other), logits(model))
