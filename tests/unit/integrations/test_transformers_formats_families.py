"""Families whose weights transformers renames, joins, ties or draws by its own rules, saved and loaded compressed."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedConfig,
    PreTrainedModel,
    Zamba2Config,
    Zamba2ForCausalLM,
)

import comera
from comera.errors import ConversionError
from comera.nn.tensor_train import CompressedLayer, named_trains
from comera.rank import round_

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PICTURES = {**SIZES, "image_size": 32, "patch_size": 8}
IDS = torch.arange(2, 18).reshape(2, 8)
PICTURE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def of(kind: str, sizes: dict[str, Any], auto: Any = AutoModel) -> PreTrainedModel:
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model(kind, **sizes)).eval()


def first(output: Any) -> Tensor:
    return output[0]


SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
MAPPED: dict[str, tuple[Any, Tensor]] = {  # renamed, joined, split, stacked and permuted at loading
    "nomic_bert": (lambda: of("nomic_bert", SIZES, AutoModelForMaskedLM), IDS),
    "mixtral": (lambda: of("mixtral", SIZES | {"num_key_value_heads": 2, "num_local_experts": 2}), IDS),
    "vit": (lambda: of("vit", PICTURES), PICTURE),
    "dinov2": (lambda: of("dinov2", PICTURES | {"use_swiglu_ffn": True}), PICTURE),
    "beit": (lambda: of("beit", PICTURES), PICTURE),
    "swin": (lambda: of("swin", SWIN), PICTURE),
}


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", MAPPED)
def test_models_that_transformers_stores_in_other_parts(kind: str, cut: bool, tmp_path: Path) -> None:
    build, inputs = MAPPED[kind]
    model = build()
    comera.tensorize_(model, comera.TensorizeConfig(experts=comera.BTT()), ratio=1.6)
    if cut:
        round_(model, 0.6)
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert [tt.spec for _, tt in named_trains(loaded)] == [tt.spec for _, tt in named_trains(model)]
    with torch.no_grad():
        for other in (loaded, comera.load_pretrained(build(), tmp_path)):
            assert torch.equal(first(other(inputs)), first(model(inputs)))
    comera.materialize_(loaded)
    loaded.save_pretrained(tmp_path / "dense")  # as transformers does it for any dense model again
    plain = build()
    plain.save_pretrained(tmp_path / "plain")
    dense, known = (load_file(tmp_path / folder / "model.safetensors") for folder in ("dense", "plain"))
    assert dense.keys() == known.keys()
    assert torch.equal(first(type(model).from_pretrained(tmp_path / "dense")(inputs)), first(loaded(inputs)))


def test_a_dense_model_that_shares_the_config_of_a_compressed_one_is_stored_in_the_other_parts(tmp_path: Path) -> None:
    model = MAPPED["nomic_bert"][0]()
    other = type(model)(model.config)
    comera.tensorize_(other, ratio=2)
    model.save_pretrained(tmp_path)
    assert torch.equal(first(type(model).from_pretrained(tmp_path)(IDS)), first(model(IDS)))


def test_folders_from_before_names_were_kept(tmp_path: Path) -> None:
    """Experts that stay dense were stored one by one, as in Mixtral's first release."""
    model = MAPPED["mixtral"][0]()
    comera.tensorize_(model, ratio=1.25)
    del model.config.quantization_config.as_named
    type(model).save_pretrained.__wrapped__(model, tmp_path)  # as it was then, under the names of the first release
    assert any(re.search(r"experts\.1\.", name) for name in load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        for other in (type(model).from_pretrained(tmp_path), comera.load_pretrained(MAPPED["mixtral"][0](), tmp_path)):
            assert torch.equal(first(other(IDS)), first(model(IDS)))


# --- ties -------------------------------------------------------------------------------------------------------------


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options)).eval()


@pytest.mark.parametrize("left_dense", [None, "lm_head", "model.embed_tokens"])
def test_an_untied_model_comes_back_and_its_config_says_so(left_dense: str | None, tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    overrides: dict[str, Any] = {left_dense: None} if left_dense else {}
    comera.tensorize_(model, comera.TensorizeConfig(tied="untie", overrides=overrides), ratio=1.5)
    assert model.config.tie_word_embeddings is False
    model.save_pretrained(tmp_path)
    for options in ({}, {"tie_word_embeddings": True}):  # as configs of before said
        loaded, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **options)
        assert not any(info.values())
        assert torch.equal(first(loaded(IDS)), first(model(IDS)))
    comera.materialize_(loaded)
    loaded.save_pretrained(tmp_path / "dense")
    assert torch.equal(first(LlamaForCausalLM.from_pretrained(tmp_path / "dense")(IDS)), first(loaded(IDS)))


def test_a_tied_model_that_is_loaded_as_an_untied_one_stays_tied_and_says_so(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    comera.tensorize_(model, ratio=2.5)
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"one tensor train for model.embed_tokens.tt and lm_head.tt: they stay tied"):
        loaded = LlamaForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=False)
    assert loaded.lm_head.tt is loaded.model.embed_tokens.tt
    assert loaded.config.tie_word_embeddings
    assert torch.equal(first(loaded(IDS)), first(model(IDS)))
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(first(LlamaForCausalLM.from_pretrained(tmp_path / "again")(IDS)), first(model(IDS)))


class TiedConfig(PreTrainedConfig):
    model_type = "two_tied"


class Tied(PreTrainedModel):
    config_class, base_model_prefix = TiedConfig, "net"
    _tied_weights_keys: ClassVar = {"last.weight": "first.weight"}

    def __init__(self, config: TiedConfig) -> None:
        super().__init__(config)
        self.first, self.up = nn.Linear(128, 128), nn.Linear(128, 256)
        self.down, self.last = nn.Linear(256, 128), nn.Linear(128, 128)
        self.post_init()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.down(self.up(self.first(x)).relu()))


@pytest.mark.parametrize("form", [comera.TT(), comera.BTT()], ids=["tt", "btt"])
def test_tied_linear_layers(form: Any, tmp_path: Path) -> None:
    model, x = Tied(TiedConfig(tie_word_embeddings=True)), torch.randn(2, 128)
    comera.tensorize_(model, comera.TensorizeConfig(linear=form), ratio=3)
    model.save_pretrained(tmp_path)
    loaded, info = Tied.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert loaded.first.tt is loaded.last.tt
    assert torch.equal(loaded(x), model(x))
    loaded.tie_weights()
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(Tied.from_pretrained(tmp_path / "again")(x), model(x))


def test_ties_of_whole_blocks(tmp_path: Path) -> None:
    sizes = {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 4}
    sizes |= {"num_mem_blocks": 1, "adapter_rank": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
    layers = {"layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "num_hidden_layers": 4}
    torch.manual_seed(0)
    model = Zamba2ForCausalLM(Zamba2Config(**SIZES | sizes | layers)).eval()
    comera.tensorize_(model, ratio=3)
    round_(model, 0.7)
    model.save_pretrained(tmp_path)
    loaded, info = Zamba2ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert len(list(named_trains(loaded))) == len(list(named_trains(model)))
    assert torch.equal(first(loaded(IDS)), first(model(IDS)))


def test_weights_that_are_the_beginning_of_another_name_are_not_tied_to_it() -> None:
    """I-BERT's table has weight, weight_integer and weight_scaling_factor."""
    model = of("ibert", SIZES, AutoModelForMaskedLM)
    before = model.get_expanded_tied_weights_keys()
    report = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=2, rank=4), comera.TTM(order=2, rank=4)))
    assert report.total < report.dense_total
    assert model.get_expanded_tied_weights_keys() == before
    model.tie_weights()
    comera.materialize_(model)
    assert model.get_expanded_tied_weights_keys() == before


# --- initialization ---------------------------------------------------------------------------------------------------


def test_a_models_own_initialization_leaves_what_was_loaded(tmp_path: Path) -> None:
    """Wav2Vec2ForPreTraining calls `reset_parameters` of two of its layers."""
    sizes = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    sizes |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_codevectors_per_group": 8}
    model = of("wav2vec2", SIZES | sizes | {"codevector_dim": 32, "proj_codevector_dim": 32}, AutoModelForPreTraining)
    comera.tensorize_(model, ratio=1.3)
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    own = model.state_dict()
    assert [name for name, value in loaded.state_dict().items() if not torch.equal(value, own[name])] == []
    layer = next(module for module in loaded.modules() if isinstance(module, CompressedLayer))
    before = layer.tt.cores[0].detach().clone()
    layer.reset_parameters()  # the caller's own call does what it says
    assert not torch.equal(layer.tt.cores[0], before)


class Shifted(Tied):
    """Its biases begin at 0.5."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.constant_(module.bias, 0.5)


def test_missing_biases_are_those_of_the_models_own_initialization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    plain, electra = llama(), ElectraForPreTraining(ElectraConfig(**SIZES, embedding_size=64))
    comera.tensorize_(plain, ratio=2)
    comera.tensorize_(electra, ratio=1.3)
    plain.save_pretrained(tmp_path / "llama")
    electra.save_pretrained(tmp_path / "electra")
    torch.use_deterministic_algorithms(True)  # memory that nobody has set is NaN
    try:
        loaded, info = LlamaForCausalLM.from_pretrained(
            tmp_path / "llama", attention_bias=True, output_loading_info=True
        )
        masked = ElectraForMaskedLM.from_pretrained(tmp_path / "electra")
    finally:
        torch.use_deterministic_algorithms(False)
    biases = {name: p for name, p in loaded.named_parameters() if name.endswith(".bias")}
    assert len(biases) == 8
    assert biases.keys() == info["missing_keys"]
    assert all(torch.equal(bias, torch.zeros_like(bias)) for bias in biases.values())
    assert torch.equal(masked.generator_lm_head.bias, torch.zeros(256))


def test_a_missing_bias_that_does_not_begin_at_zero(tmp_path: Path) -> None:
    model = Shifted(TiedConfig(tie_word_embeddings=False))
    comera.tensorize_(model, ratio=3)
    state = {name: value for name, value in model.state_dict().items() if name != "up.bias"}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = Shifted.from_pretrained(tmp_path)
    assert torch.equal(loaded.up.bias, torch.full((256,), 0.5))
    assert torch.equal(loaded.down.bias, model.down.bias)


def test_tables_that_are_computed_are_not_in_the_folder(tmp_path: Path) -> None:
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
    sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 256}
    config = MarianConfig(**sizes, pad_token_id=0, decoder_start_token_id=0)
    torch.manual_seed(0)
    model = MarianMTModel(config).eval()
    comera.tensorize_(model, ratio=1.4)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        on_meta = MarianMTModel(config).eval()
    for other in (MarianMTModel(config).eval(), on_meta):
        comera.load_pretrained(other, tmp_path)
        given = {"input_ids": IDS, "decoder_input_ids": IDS}
        assert torch.equal(first(other(**given)), first(model(**given)))


# --- other libraries --------------------------------------------------------------------------------------------------


def test_a_model_of_diffusers(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "num_layers": 1, "sample_size": 8}
    kind = diffusers.DiTTransformer2DModel
    model = kind(**sizes, patch_size=2, num_embeds_ada_norm=20, norm_num_groups=8).eval()
    comera.tensorize_(model, ratio=2)
    with pytest.raises(ConversionError, match=r"comera\.load_pretrained"):
        model.save_pretrained(tmp_path / "theirs")
    comera.save_pretrained(model, tmp_path / "ours")
    other = comera.load_pretrained(kind(**model.config).eval(), tmp_path / "ours")
    given = {"timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    x = torch.randn(1, 4, 8, 8)
    assert torch.equal(other(x, **given).sample, model(x, **given).sample)


def test_the_mark_of_stored_names_is_in_the_config(tmp_path: Path) -> None:
    model = llama()
    comera.tensorize_(model, ratio=2)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["as_named"] is True
