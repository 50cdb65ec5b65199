"""Models with experts: conversion and back, sizes, files, ranks that fall, and what stays dense."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, MixtralConfig, MixtralForCausalLM

from comera.convert import BTT, EXPERTS, TT, TTM, PackedConverter, TensorizeConfig, materialize_, tensorize_
from comera.convert.packed import _CONVERTERS as REGISTERED
from comera.convert.registry import register_converter
from comera.errors import CheckpointError, ConversionError, SpecError
from comera.fp8 import fp8_
from comera.nn import CompressedParameter, TensorTrain, model_size
from comera.optim import param_groups
from comera.pretrained import load_pretrained, save_pretrained
from comera.rank import LateStage, RankController

F64 = torch.float64
BASE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 48, "num_local_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "qwen2_moe": {
        "shared_expert_intermediate_size": 24,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {"intermediate_size": 24, "num_local_experts": 4, "head_dim": 8},
    "olmoe": {"intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}
IDS = torch.tensor([[5, 6, 7, 1, 9], [8, 63, 2, 3, 4]])
FORMATS = {"TT": TT(order=4, rank=6), "BTT": BTT(rank=1)}
families = pytest.mark.parametrize("kind", list(SIZES))
formats = pytest.mark.parametrize("name", list(FORMATS))


def moe(kind: str = "mixtral", dtype: torch.dtype = F64) -> Any:
    """Experts one by one: torch multiplies groups of matrices in float32 at most."""
    torch.manual_seed(0)
    heads = {"num_key_value_heads": 4 if kind == "deepseek_v3" else 2}
    config = AutoConfig.for_model(kind, **BASE, **heads, **SIZES[kind])
    model = AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("eager")
    return model.to(dtype)


def only(format_: TT | BTT | None, **others: Any) -> TensorizeConfig:
    return TensorizeConfig(None, None, experts=format_, **others)


def held(model: nn.Module) -> dict[str, CompressedParameter]:
    return {name: module for name, module in model.named_modules() if isinstance(module, CompressedParameter)}


def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


@families
@formats
def test_models_compute_what_they_do_with_dense_weights(kind: str, name: str) -> None:
    model = moe(kind)
    before = {key: value.shape for key, value in model.state_dict().items()}
    report = tensorize_(model, only(FORMATS[name]))
    rows = [row for row in report.rows if row.compressed]
    assert rows
    assert {row.name.rpartition(".")[2] for row in rows} == {"gate_up_proj", "down_proj"}
    assert len(held(model)) == len(rows)
    assert all(p.dtype == F64 for p in model.parameters())
    assert sum(row.dense + row.bias for row in report.rows) == report.dense_total
    assert (
        sum(row.stored + row.bias for row in report.rows) == report.total == sum(p.numel() for p in model.parameters())
    )
    again = tensorize_(model, only(FORMATS[name], overrides={"*.experts.gate_up_proj": TT(rank=3)}))
    assert [row.note for row in again.rows if row.compressed] == ["already compressed"] * len(rows)
    dense = materialize_(copy.deepcopy(model))
    assert {key: value.shape for key, value in dense.state_dict().items()} == before
    found, exact = logits(model), logits(dense)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-10)
    found.square().sum().backward()
    exact.square().sum().backward()
    others = dict(dense.named_parameters())
    shared = [key for key, p in model.named_parameters() if key in others and p.grad is not None]
    assert shared
    for key in shared:
        torch.testing.assert_close(model.get_parameter(key).grad, others[key].grad, rtol=1e-8, atol=1e-9)
    for path, part in held(model).items():
        grad = others[path.replace(".compressed.", ".")].grad
        train = list(part.tt.parameters())
        wanted = torch.autograd.grad(part.layout.parameter(part.tt.dense()), train, grad)
        torch.testing.assert_close([p.grad for p in train], list(wanted), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@formats
def test_other_implementations_of_experts(kind: str, implementation: str, name: str) -> None:
    model = moe(kind, torch.float32)
    tensorize_(model, only(FORMATS[name]))
    found = {}
    for how in ("eager", implementation):
        model.set_experts_implementation(how)
        model.zero_grad()
        out = logits(model)
        out.square().mean().backward()
        found[how] = [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    torch.testing.assert_close(found[implementation], found["eager"], rtol=1e-3, atol=1e-6)


@families
@formats
def test_decomposed_at_full_rank_they_stay_as_they_are(kind: str, name: str) -> None:
    model = moe(kind)
    before = logits(model)
    format_ = TT(order=3, rank=9999) if name == "TT" else BTT(rank=9999)
    report = tensorize_(model, only(format_, init="decompose", min_ratio=0.0))
    rows = [row for row in report.rows if row.compressed]
    assert rows
    assert all(row.error is not None and row.error < 1e-12 for row in rows)
    torch.testing.assert_close(logits(model), before, rtol=1e-9, atol=1e-10)


@families
def test_they_train_while_ranks_fall_and_come_back_from_files(kind: str, tmp_path: Path) -> None:
    model = moe(kind, torch.float32).train()
    config = TensorizeConfig(TT(order=4, rank=4), TTM(order=2, rank=4), experts=TT(order=4, rank=6))
    tensorize_(model, config)
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2))
    ranks = RankController(model, late=LateStage(target_size=0.7, start_step=1)).attach(optimizer)
    before = {name: part.tt.spec for name, part in held(model).items()}
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        ranks.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    ranks.meet_target_()
    assert ranks.target_size is not None
    assert model_size(model).tensorized <= ranks.target_size
    assert {name: part.tt.spec for name, part in held(model).items()} != before
    exact = logits(model.eval()).detach()
    model.save_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours")
    loaded, info = type(model).from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    others = [
        loaded,
        load_pretrained(moe(kind, torch.float32), tmp_path / "theirs"),
        load_pretrained(moe(kind, torch.float32), tmp_path / "ours"),
        load_pretrained(empty, tmp_path / "ours") if kind == "mixtral" else loaded,
    ]
    for other in others:
        assert {n: p.tt.spec for n, p in held(other).items()} == {n: p.tt.spec for n, p in held(model).items()}
        other.set_experts_implementation("eager")
        assert torch.equal(logits(other.eval()), exact)
    load_pretrained(model, tmp_path / "ours")  # in place
    assert torch.equal(logits(model), exact)


def test_a_file_of_other_experts_does_not_fit(tmp_path: Path) -> None:
    model = moe()
    tensorize_(model, only(TT(order=4, rank=4)))
    save_pretrained(model, tmp_path)
    SIZES["mixtral"]["num_local_experts"] = 5
    try:
        other = moe()
    finally:
        SIZES["mixtral"]["num_local_experts"] = 4
    with pytest.raises(CheckpointError, match=r"a tensor train for the parameter gate_up_proj \(5, 96, 32\)"):
        load_pretrained(other, tmp_path)


def test_without_a_format_they_stay_dense_and_the_report_says_what_would_compress_them() -> None:
    model = moe()
    report = tensorize_(model, TensorizeConfig(BTT(rank=1), None, overrides={"model.layers.*": BTT(rank=1)}))
    (row, *_) = [row for row in report.rows if row.name == "model.layers.0.mlp.experts"]
    reason = "matrices of experts, which TensorizeConfig(experts=comera.TT(order=3)) would compress"
    assert row.note == f"gate_up_proj 4×96×32, down_proj 4×32×48: {reason}"
    assert not held(model)
    with pytest.raises(
        ConversionError, match=r"Experts stay dense unless they have a format: TensorizeConfig\(experts="
    ):
        tensorize_(moe(), TensorizeConfig(BTT(rank=1), overrides={"*.down_proj": TT(rank=2)}))


def test_by_ratio_they_take_part() -> None:
    model = moe()
    report = tensorize_(model, TensorizeConfig(TT(), TTM(), experts=TT()), ratio=10)
    assert report.ratio >= 10
    assert len(held(model)) == 4
    with pytest.raises(ConversionError, match=r"Tensor trains reach \d.*TensorizeConfig\(linear=comera.TT\(\), exp"):
        tensorize_(moe(), TensorizeConfig(experts=BTT()), ratio=10)


def test_overrides_choose_by_the_name_of_the_parameter_or_of_its_module() -> None:
    model = moe()
    chosen = {
        "*.experts": BTT(rank=1),
        "model.layers.1.*.down_proj": None,
        "*.0.mlp.experts.gate*": TT(order=4, rank=2),
    }
    report = tensorize_(model, only(TT(order=4, rank=4), overrides=chosen))
    assert {name.removeprefix("model.layers."): str(part.spec)[:3] for name, part in held(model).items()} == {
        "0.mlp.experts.compressed.gate_up_proj": "TT ",
        "0.mlp.experts.compressed.down_proj": "BTT",
        "1.mlp.experts.compressed.gate_up_proj": "BTT",
    }
    (row,) = [row for row in report.rows if row.name == "model.layers.1.mlp.experts.down_proj"]
    assert row.note == "left dense as configured"
    assert row.dense == row.stored == 4 * 32 * 48
    report = tensorize_(model, only(TT(order=4, rank=4)))  # what was left, now
    assert len(held(model)) == 4
    assert len([row for row in report.rows if row.note == "already compressed"]) == 3


def test_mistakes() -> None:
    with pytest.raises(ConversionError, match="experts must be a TT, a BTT or None"):
        TensorizeConfig(experts=TTM(rank=2))  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match=r"gives a TTM to model.layers.0.mlp.experts.gate_up_proj \(MixtralExp"):
        tensorize_(moe(), only(TT(rank=2), overrides={"*.gate_up_proj": TTM(rank=2)}))
    with pytest.raises(SpecError, match="last input mode that holds the 4 experts"):
        tensorize_(moe(), only(TT(rank=2, in_modes=(64, 2), out_modes=(96,)), overrides={"*.down_proj": None}))
    with pytest.raises(SpecError, match="choose a number of blocks that divides 96"):
        tensorize_(moe(), only(BTT(rank=2, blocks=(4, 5))))
    active = TensorizeConfig(BTT(rank=1), None, experts=TT(order=4, rank=2, activation="silu"))
    notes = {row.name: row.note for row in tensorize_(moe(), active).rows}
    reason = "MixtralExperts multiplies by its weight, and with an activation it would have none"
    assert notes["model.layers.1.mlp.experts.down_proj"] == reason
    with pytest.raises(ConversionError, match=r"'experts' has rank 2"):
        tensorize_(moe(), only(TT(rank=2)), ratio=2)
    model = moe()
    for layer in model.model.layers:
        layer.mlp.experts._is_expert_parallel = True
    notes = {
        row.name: row.note for row in tensorize_(model, TensorizeConfig(BTT(rank=1), None, experts=TT(rank=2))).rows
    }
    assert notes["model.layers.1.mlp.experts.down_proj"] == "its experts are spread over processes: convert first"


def test_a_parameter_that_modules_share() -> None:
    def tied() -> Any:
        model = moe()
        first, second = (layer.mlp.experts for layer in model.model.layers)
        second.down_proj = first.down_proj
        return model

    report = tensorize_(model := tied(), only(TT(order=4, rank=4)))
    notes = {row.name: row.note for row in report.rows}
    assert "use it, which multiply by it themselves" in notes["model.layers.1.mlp.experts.down_proj"]
    assert len(held(model)) == 2
    report = tensorize_(model := tied(), only(TT(order=4, rank=4), tied="untie"))
    assert len(held(model)) == 4
    assert report.dense_total == sum(p.numel() for p in tied().parameters())


def test_modules_of_users_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comera.convert.packed._CONVERTERS", dict(REGISTERED))

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrices = nn.Parameter(torch.randn(4, 24, 16, dtype=F64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([F.linear(x, self.matrices[k]) for k in range(4)])

    with pytest.raises(ConversionError, match="nothing to convert"):
        tensorize_(nn.Sequential(Mine()), only(BTT(rank=1)))
    register_converter(Mine, EXPERTS)
    model = nn.Sequential(Mine())
    tensorize_(model, only(BTT(rank=1)))
    dense = materialize_(copy.deepcopy(model))
    x = torch.randn(3, 16, dtype=F64)
    torch.testing.assert_close(model(x), dense(x), rtol=1e-10, atol=1e-10)
    alone = Mine()
    tensorize_(alone, only(BTT(rank=1)))  # it stays the same object, so it needs no parent
    assert alone(x).shape == (4, 3, 24)
    register_converter(Mine, PackedConverter(EXPERTS.layouts))  # as linear layers
    assert tensorize_(nn.Sequential(Mine()), TensorizeConfig(BTT(rank=1))).rows[0].compressed


def test_conversion_keeps_what_belongs_to_the_module() -> None:
    model = moe().eval()
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj.requires_grad_(False)
    seen: list[str] = []
    experts.register_forward_hook(lambda *_: seen.append("hook"))
    tensorize_(model, only(TT(order=4, rank=4)))
    assert model.model.layers[0].mlp.experts is experts
    assert not any(p.requires_grad for p in experts.compressed.gate_up_proj.parameters())
    assert all(p.requires_grad for p in experts.compressed.down_proj.parameters())
    assert not experts.compressed.down_proj.training
    logits(model)
    assert seen == ["hook"]
    materialize_(model)
    assert model.model.layers[0].mlp.experts is experts
    assert not experts.gate_up_proj.requires_grad


def test_it_works_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**BASE, num_key_value_heads=2, **SIZES["mixtral"]))
    report = tensorize_(model, only(TT(order=4, rank=4)))
    assert report.size.tensorized_ratio > 3
    assert all(p.is_meta for p in model.parameters())


def test_fp8_and_gpt_oss_biases() -> None:
    model = AutoModelForCausalLM.from_config(GptOssConfig(**BASE, num_key_value_heads=2, **SIZES["gpt_oss"]))
    report = tensorize_(model, TensorizeConfig(TT(order=4, rank=4), None, experts=TT(order=4, rank=4)))
    (row,) = [row for row in report.rows if row.name == "model.layers.0.mlp.experts"]
    assert row.stored == 4 * (48 + 32)  # the biases, which stay dense
    assert row.note.startswith("gate_up_proj_bias 4×48, down_proj_bias 4×32: no linear layer")
    left = {row.name: row.reason for row in fp8_(model, None).left_alone}
    assert left["model.layers.0.mlp.experts.compressed.down_proj"] == "the module that reads it multiplies by it itself"


def test_the_train_of_a_parameter_is_found_by_type() -> None:
    model = moe()
    tensorize_(model, only(TT(order=4, rank=4)))
    names = [group["name"] for group in param_groups(model, lr=1e-3)]
    assert {"cores", "ranks"} <= set(names)
    assert len([module for module in model.modules() if isinstance(module, TensorTrain)]) == 4
