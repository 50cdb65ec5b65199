"""Adapters of a small transformer in training, beside everything else that works on its tensor trains."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from comera.adapters import TTAdapter, adapt_, merge_adapters_, remove_adapters_
from comera.convert import BTT, TT, TTM, TensorizeConfig, tensorize_
from comera.errors import CheckpointError, ConversionError
from comera.export import serving_copy
from comera.fusion import fuse_
from comera.memory import recompute_
from comera.nn.adapted import Adapted
from comera.nn.tensor_train import named_trains
from comera.optim import Muon, param_groups
from comera.optim.core_rates import core_rates
from comera.pretrained import load_pretrained, save_pretrained
from comera.rank import LateStage, RankController, prune_, round_

IDS = torch.arange(40).view(4, 10)
LABELS = torch.tensor([0, 1, 2, 1])
FORMATS = {
    "dense": None,
    "tt": TensorizeConfig(TT(order=4, rank=4), TTM(order=2, rank=4)),
    "btt": TensorizeConfig(BTT(rank=1), TTM(order=2, rank=4)),
}
TARGETS = ["*.query", "*.value", "*.dense"]


def bert(kind: str = "dense", *, dropout: float = 0.0) -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=60,
        num_labels=3,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = BertForSequenceClassification(config)
    if FORMATS[kind] is not None:
        tensorize_(model, replace(FORMATS[kind], overrides={"classifier": None, "*.pooler.*": None}))
    return model


def adapted(kind: str = "dense", rank: int = 4) -> BertForSequenceClassification:
    model = bert(kind)
    adapt_(model, TTAdapter(order=4, rank=rank), targets=TARGETS, also_train="classifier")
    return model


def loss_of(model: nn.Module) -> Tensor:
    return model(IDS, labels=LABELS).loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, after: Callable[[Tensor], None] = id) -> None:
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        after(loss.detach())
        optimizer.step()


def randomize_(model: nn.Module) -> None:
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, Adapted):
            nn.init.normal_(module.adapter.tt.cores[-1], std=0.3)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "optimizer_of", [lambda m: torch.optim.AdamW(param_groups(m, lr=1e-2)), lambda m: Muon(m, 3e-2)]
)
def test_training_lowers_the_loss_and_moves_no_frozen_weight(
    kind: str, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    plain = bert(kind)
    wanted = {name: p.detach().clone() for name, p in plain.named_parameters()}
    flags = {name: p.requires_grad for name, p in plain.named_parameters()}
    model = adapted(kind)
    before = loss_of(model).item()
    train(model, optimizer_of(model), 30)
    assert loss_of(model).item() < 0.5 * before
    state = dict(model.named_parameters())
    assert all(torch.equal(state[name], value) for name, value in wanted.items() if not name.startswith("classifier"))
    assert not torch.equal(model.classifier.weight, wanted["classifier.weight"])
    remove_adapters_(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())


def test_adapters_learn_without_a_head() -> None:
    model = bert()
    adapt_(model, TTAdapter(order=4, rank=4), targets=TARGETS)
    before = loss_of(model).item()
    train(model, torch.optim.AdamW(param_groups(model, lr=1e-2)), 30)
    assert loss_of(model).item() < 0.85 * before


def test_trained_adapters_are_merged_into_the_dense_model() -> None:
    model = adapted()
    train(model, torch.optim.AdamW(param_groups(model, lr=3e-3)), 5)
    model.eval()
    wanted = model(IDS).logits
    merge_adapters_(model)
    torch.testing.assert_close(model(IDS).logits, wanted)
    assert not [name for name, _ in named_trains(model)]


# --- rates and ranks -------------------------------------------------------------------------------------------------


def test_rates_follow_from_the_dense_one_although_the_last_core_is_zero() -> None:
    model = adapted("tt")
    groups = param_groups(model, lr=1e-3, weight_decay=0.1)
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert set(rates) == trained
    query, value = (getattr(model.bert.encoder.layer[0].attention.self, name) for name in ("query", "value"))
    found = [rates[id(core)] for core in query.adapter.tt.cores]
    assert all(rate != 1e-3 for rate in found)
    # a group of its own for each name and core, shared by the blocks
    other = model.bert.encoder.layer[1].attention.self.query
    assert [rates[id(core)] for core in other.adapter.tt.cores] == found
    cores = next(group["params"] for group in groups if any(p is query.adapter.tt.cores[0] for p in group["params"]))
    assert not any(p is value.adapter.tt.cores[0] for p in cores)
    tt = query.adapter.tt
    with torch.no_grad():  # as the last core would have been drawn
        drawn = type(tt)(tt.spec, init_std=tt.init_std)
        for core, fresh in zip(tt.cores[:-1], drawn.cores, strict=False):
            core.copy_(fresh)
    wanted = core_rates(drawn)
    assert core_rates(tt) == pytest.approx(wanted, rel=0.5)


@pytest.mark.parametrize("kind", ["dense", "tt"])
def test_ranks_of_adapters_fall_and_the_base_keeps_its_own(kind: str) -> None:
    model = adapted(kind)
    base = {name: p.detach().clone() for name, p in bert(kind).named_parameters() if not name.startswith("classifier")}
    optimizer = torch.optim.AdamW(param_groups(model, lr=3e-3))
    late = LateStage(target_size=0.5, start_step=5, steps=10)
    controller = RankController(model, late=late).attach(optimizer)
    size = controller.size()
    assert size == sum(p.numel() for name, p in model.named_parameters() if ".adapter." in name)
    train(model, optimizer, 45, controller.observe)
    assert controller.stage == "late"
    report = controller.meet_target_()
    assert report.after <= size // 2
    assert all(".adapter." in row.name for row in report.rows)
    state = dict(model.named_parameters())
    assert all(torch.equal(state[name], value) for name, value in base.items())
    train(model, optimizer, 2, controller.observe)


def test_rounding_and_pruning_are_of_adapters_alone() -> None:
    model = adapted("tt")
    randomize_(model)
    base = {name: p.detach().clone() for name, p in bert("tt").named_parameters()}
    model.bert.encoder.layer[0].attention.self.query.adapter.tt.rank_params[1].data[1:] = 0
    wanted = model.eval()(IDS).logits
    pruned = prune_(model)
    assert pruned.after < pruned.before
    torch.testing.assert_close(model(IDS).logits, wanted)
    report = round_(model, 0.5)
    assert report.after <= report.before // 2
    state = dict(model.named_parameters())
    assert all(torch.equal(state[name], value) for name, value in base.items())


def test_a_compressed_head_that_is_trained_too_adapts_its_ranks() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    tensorize_(model, TensorizeConfig(TT(order=4, rank=4)))
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapt_(model, TTAdapter(), targets="0", also_train="2")
    report = round_(model, 0.5)
    assert {row.name for row in report.rows} == {"0.adapter.tt", "2.tt"}
    remove_adapters_(model)
    assert all(torch.equal(p, want[name]) for name, p in model.named_parameters())


# --- fused and recomputed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("fuse_first", [False, True])
def test_fused_models_compute_the_same(kind: str, fuse_first: bool) -> None:
    def gradients(*, fused: bool) -> list[Tensor]:
        model = bert(kind)
        if fused and fuse_first:
            fuse_(model)
        adapt_(model, TTAdapter(order=4, rank=4), targets=TARGETS, also_train="classifier")
        randomize_(model)
        if fused and not fuse_first:
            report = fuse_(model)
            reasons = {row.reason for row in report.left_alone}
            assert report.merged >= 6
            assert not report.fused("qkv")
            assert "query has an adapter" in reasons
        parameters = [p for p in model.parameters() if p.requires_grad]
        loss = loss_of(model)
        return [loss, *torch.autograd.grad(loss, parameters)]

    for found, wanted in zip(gradients(fused=True), gradients(fused=False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_fused_loss_sees_the_adapter_of_the_head() -> None:
    def loss(*, fused: bool) -> Tensor:
        torch.manual_seed(0)
        small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=60, **small))  # type: ignore[arg-type]
        adapt_(model, TTAdapter(), targets=["lm_head", "*_proj"])
        randomize_(model)
        if fused:
            report = fuse_(model, keep_logits=False)
            assert "lm_head has an adapter" in {row.reason for row in report.left_alone}
        return model(IDS, labels=IDS).loss

    torch.testing.assert_close(loss(fused=True), loss(fused=False))


@pytest.mark.parametrize("kind", ["tt", "btt"])
def test_recomputation_gives_the_same_gradients(kind: str) -> None:
    def gradients(*, recomputed: bool) -> list[Tensor]:
        model = adapted(kind)
        randomize_(model)
        if recomputed:
            report = recompute_(model)
            assert report.layers == 12  # not the adapters
        parameters = [p for p in model.parameters() if p.requires_grad]
        return list(torch.autograd.grad(loss_of(model.train()), parameters))

    for found, wanted in zip(gradients(recomputed=True), gradients(recomputed=False), strict=True):
        assert torch.equal(found, wanted)


def test_blocks_of_dense_layers_with_adapters_are_none_to_recompute() -> None:
    with pytest.raises(ConversionError, match="compressed layers"):
        recompute_(adapted())


# --- what does not serve a model with adapters says so ---------------------------------------------------------------


def test_whole_models_are_saved_without_adapters(tmp_path: object) -> None:
    model = adapted("tt")
    with pytest.raises(CheckpointError, match=r"save_pretrained: .*save_adapters writes them"):
        save_pretrained(model, str(tmp_path))
    with pytest.raises(CheckpointError, match=r"load_pretrained: .*load_adapters_"):
        load_pretrained(model, str(tmp_path))
    with pytest.raises(ConversionError, match=r"an export: .*merge_adapters_ or remove_adapters_ first"):
        serving_copy(model)


def test_transformers_own_folder_holds_the_base_model(tmp_path: object) -> None:
    model = adapted("tt")
    wanted = bert("tt").eval()(IDS).logits
    model.save_pretrained(str(tmp_path))
    loaded, info = BertForSequenceClassification.from_pretrained(str(tmp_path), output_loading_info=True)
    assert info["unexpected_keys"]
    assert all(".adapter." in key for key in info["unexpected_keys"])
    torch.testing.assert_close(loaded.eval()(IDS).logits, wanted)
