"""Models of transformers whose forward reads the weight of its layers, under autocast."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import comera
from comera.errors import WeightError
from comera.nn.tensor_train import TensorTrain

IDS = torch.arange(2, 34).view(2, 16)


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), {"input_ids": IDS, "labels": IDS}


def deberta() -> tuple[nn.Module, dict[str, Tensor]]:
    config = DebertaV2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, relative_attention=True, pos_att_type=["p2c", "c2p"],
        legacy=False,
    )  # fmt: skip
    return DebertaV2ForMaskedLM(config), {"input_ids": IDS, "labels": IDS}


def clip() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 64, "eos_token_id": 33, "max_position_embeddings": 16}
    config = CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 16, "patch_size": 8}, projection_dim=32)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return CLIPModel(config), {"input_ids": IDS, "pixel_values": pixels, "return_loss": torch.tensor(True)}


def mamba() -> tuple[nn.Module, dict[str, Tensor]]:
    config = MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=1)
    return MambaForCausalLM(config), {"input_ids": IDS, "labels": IDS}


def mamba2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = Mamba2Config(
        vocab_size=64,
        hidden_size=32,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        num_hidden_layers=1,
        chunk_size=8,
    )
    return Mamba2ForCausalLM(config), {"input_ids": IDS, "labels": IDS}


@pytest.mark.filterwarnings("ignore")  # of transformers, which models without their kernels give
@pytest.mark.parametrize("make", [t5, deberta, clip, mamba, mamba2])
def test_training_under_autocast(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, batch = make()
    linear, table = comera.TT(order=4, rank=4), comera.TTM(order=2, rank=4)
    report = comera.tensorize_(model, comera.TensorizeConfig(linear=linear, embedding=table))
    assert report.total < report.dense_total
    dense = comera.materialize_(copy.deepcopy(model))
    torch.testing.assert_close(model(**batch).loss, dense(**batch).loss, rtol=1e-4, atol=1e-5)
    materialized: list[TensorTrain] = []
    real = TensorTrain.dense
    monkeypatch.setattr(TensorTrain, "dense", lambda self, *rest: materialized.append(self) or real(self, *rest))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.98 * losses[0]
    if make in (t5, clip, mamba2):  # they read the dtype alone
        assert not materialized


def test_initialization_skips_what_is_marked_as_loaded_and_else_raises() -> None:
    model, _ = t5()
    comera.tensorize_(model, comera.TensorizeConfig(linear=comera.TT(order=4, rank=4), embedding=None))
    before = copy.deepcopy(model.state_dict())
    block = next(module for module in model.modules() if type(module).__name__ == "T5DenseActDense")
    with pytest.raises(WeightError, match=r"normal_.* would be lost"):
        model._init_weights(block)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    for p in model.parameters():
        p._is_hf_initialized = True  # type: ignore[attr-defined]
    model._init_weights(block)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # of peft
@pytest.mark.parametrize("safe", [False, True])
def test_merging_an_adapter_into_a_compressed_layer_raises(safe: bool) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))
    comera.tensorize_(adapted, comera.TensorizeConfig(linear=comera.TT(order=4, rank=4), embedding=None))
    x = torch.randn(4, 32)
    before = adapted(x)
    with pytest.raises(WeightError, match="materialize_"):
        adapted.merge_and_unload(safe_merge=safe)
    torch.testing.assert_close(adapted(x), before, rtol=0, atol=0)
    comera.materialize_(adapted)  # as the error says
    torch.testing.assert_close(adapted.merge_and_unload(safe_merge=safe)(x), before, rtol=1e-4, atol=1e-5)
