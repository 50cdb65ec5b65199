"""save_pretrained and load_pretrained: every kind of model, nothing half-written, nothing half-loaded."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from comera.convert import BTT, TT, TTM, TensorizeConfig, tensorize_
from comera.errors import CheckpointError
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import CompressedLinear, TTLinear
from comera.nn.tensor_train import named_trains
from comera.pretrained import load_pretrained, read_manifest, save_pretrained
from comera.rank.prune import prune_

from ..helpers.saved_models import BLOCKS, SMALL, Net, assert_same_state, net, state

IDS = torch.tensor([[1, 2, 0], [59, 0, 3]])


def trained(config: TensorizeConfig | None = SMALL, tied: bool = True) -> Net:
    """A pruned model in evaluation mode, with values that all differ from those of a fresh one."""
    model = net(config, tied=tied)
    with torch.no_grad():
        for k, (_, tt) in enumerate(named_trains(model)):
            tt.rank_params[0][: k + 1] = 0.0
            tt.rank_params[-1].mul_(1.5)
    if config is not None:
        prune_(model)
    with torch.no_grad():
        model.head.bias.normal_()
        model.norm.running_mean.normal_()
    return model.eval()


def fresh(tied: bool = True, config: TensorizeConfig | None = None) -> Net:
    return net(config, seed=2, tied=tied).eval()


@pytest.mark.parametrize(
    ("config", "into"),
    [
        (SMALL, None),
        (SMALL, SMALL),
        (SMALL, TensorizeConfig(TT(order=3, rank=2), TTM(order=3, rank=2))),
        (BLOCKS, None),
        (BLOCKS, BLOCKS),
        (BLOCKS, TensorizeConfig(BTT(rank=3), TTM(order=3, rank=2))),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_compressed_model_comes_back(
    tmp_path: Path, config: TensorizeConfig, into: TensorizeConfig | None, tied: bool
) -> None:
    model = trained(config, tied=tied)
    save_pretrained(model, tmp_path)
    other = fresh(tied, into)
    assert load_pretrained(other, tmp_path) is other
    assert_same_state(other, state(model))
    assert torch.equal(other(IDS), model(IDS))
    assert [tt.spec for _, tt in named_trains(other)] == [tt.spec for _, tt in named_trains(model)]
    assert [tt.init_std for _, tt in named_trains(other)] == [tt.init_std for _, tt in named_trains(model)]
    assert (other.head.tt is other.embed.tt) == tied
    assert isinstance(other.head, TTMProjection if tied else CompressedLinear)
    assert isinstance(other.embed, TTMEmbedding)
    assert other.embed.padding_idx == 0


def test_a_dense_model_comes_back(tmp_path: Path) -> None:
    model = trained(None)
    save_pretrained(model, tmp_path)
    assert read_manifest(tmp_path)["trains"] == []
    other = load_pretrained(fresh(), tmp_path)
    assert_same_state(other, state(model))
    assert other.head.weight is other.embed.weight


def test_parameters_of_a_converted_model_stay_the_same_objects(tmp_path: Path) -> None:
    save_pretrained(trained(), tmp_path)
    other = fresh(config=SMALL)
    before = dict(other.named_parameters())
    load_pretrained(other, tmp_path)
    after = dict(other.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


@pytest.mark.parametrize("saved", [SMALL, BLOCKS])
def test_a_model_on_the_meta_device_gets_values_without_a_dense_weight(tmp_path: Path, saved: TensorizeConfig) -> None:
    model = trained(saved)
    save_pretrained(model, tmp_path)
    for config in (None, saved):
        with torch.device("meta"):
            other = Net()
        if config:
            tensorize_(other, config)
        other.up.bias.requires_grad_(False)
        load_pretrained(other.eval(), tmp_path)
        assert_same_state(other, state(model))
        assert other.embed.tt is other.head.tt
        assert not other.up.bias.requires_grad
        assert torch.equal(other(IDS), model(IDS))


def test_buffers_outside_the_state_are_read_for_the_meta_device_only(tmp_path: Path) -> None:
    class Rotary(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 64)
            self.register_buffer("frequencies", torch.arange(4) * scale, persistent=False)

    model = Rotary(2.0)
    tensorize_(model, SMALL)
    save_pretrained(model, tmp_path)
    assert load_pretrained(Rotary(3.0), tmp_path).frequencies.tolist() == [0, 3, 6, 9]
    with torch.device("meta"):
        other = Rotary(3.0)
    assert load_pretrained(other, tmp_path).frequencies.tolist() == [0, 2, 4, 6]
    assert "frequencies" not in other.state_dict()


def test_ties_of_dense_weights_survive_the_meta_device(tmp_path: Path) -> None:
    save_pretrained(trained(None), tmp_path)
    with torch.device("meta"):
        other = Net()
    load_pretrained(other, tmp_path)
    assert other.head.weight is other.embed.weight


def test_dtype_and_requires_grad_of_the_model_are_kept(tmp_path: Path) -> None:
    save_pretrained(trained(), tmp_path)
    for config in (None, SMALL):
        other = fresh(config=config).to(torch.bfloat16)
        other.up.requires_grad_(False)
        load_pretrained(other, tmp_path)
        assert {p.dtype for name, p in other.named_parameters() if "rank_params" not in name} == {torch.bfloat16}
        assert not any(p.requires_grad for p in other.up.parameters())
        assert all(p.requires_grad for p in other.embed.parameters())


def test_loading_leaves_the_random_state(tmp_path: Path) -> None:
    save_pretrained(trained(), tmp_path)
    other = fresh()
    before = torch.get_rng_state()
    load_pretrained(other, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_loaded_values_are_memory_of_their_own(tmp_path: Path) -> None:
    model = trained()
    save_pretrained(model, tmp_path)
    with torch.device("meta"):
        meta = Net()
    for other in (fresh(), meta):
        load_pretrained(other, tmp_path)
        with torch.no_grad():
            for p in other.parameters():
                p.add_(1.0)
    assert_same_state(load_pretrained(fresh(), tmp_path), state(model))


@pytest.mark.parametrize("config", [SMALL, BLOCKS])
def test_rank_zero_comes_back(tmp_path: Path, config: TensorizeConfig) -> None:
    model = trained()
    with torch.no_grad():
        model.up.tt.rank_params[0].zero_()
    prune_(model)
    assert set(model.up.spec.inner_ranks) == {0}
    save_pretrained(model, tmp_path)
    assert torch.equal(load_pretrained(fresh(), tmp_path)(IDS), model(IDS))


def test_tied_tensors_are_stored_once_and_the_copy_equals_the_header(tmp_path: Path) -> None:
    model = trained()
    save_pretrained(model, tmp_path, metadata={"step": 7})
    assert sorted(os.listdir(tmp_path)) == ["comera.json", "model.safetensors"]
    stored = load_file(tmp_path / "model.safetensors")
    assert "embed.tt.cores.0" in stored
    assert not any(name.startswith("head.tt") for name in stored)
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in model.parameters()) + 32 * 2 + 1
    manifest = read_manifest(tmp_path)
    assert manifest == json.loads((tmp_path / "comera.json").read_text("utf-8"))
    assert manifest["metadata"] == {"step": 7}
    assert manifest["tied"]["head.tt.cores.0"] == "embed.tt.cores.0"
    (table, *_) = manifest["trains"]
    assert table["names"] == {"embed.tt": "TTMEmbedding", "head.tt": "TTMProjection"}
    assert table["spec"]["format"] == "ttm"


def test_a_module_registered_twice_comes_back(tmp_path: Path) -> None:
    def build() -> nn.ModuleDict:
        shared = nn.Linear(64, 64)
        return nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})

    model = build()
    tensorize_(model, SMALL)
    save_pretrained(model, tmp_path)
    for other in (build(), build()):
        load_pretrained(other, tmp_path)
        assert other["a"] is other["b"][0]
        assert_same_state(other, state(model))


def test_a_single_layer_comes_back(tmp_path: Path) -> None:
    spec = TT(order=4, rank=4).spec(64, 64)
    layer = TTLinear(spec)
    save_pretrained(layer, tmp_path)
    assert_same_state(load_pretrained(TTLinear(spec.with_ranks(2)), tmp_path), state(layer))


def test_views_of_one_memory_are_stored_apart(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self, whole: Tensor) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(whole[:2]), nn.Parameter(whole[1:].t())

    model = Views(torch.randn(3, 3))
    save_pretrained(model, tmp_path)
    assert_same_state(load_pretrained(Views(torch.zeros(3, 3)), tmp_path), state(model))


def test_loading_in_place_resets_the_state_of_the_optimizers_it_is_given(tmp_path: Path) -> None:
    save_pretrained(trained(), tmp_path)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(IDS).square().mean().backward()
        optimizer.step()

    model = fresh(config=SMALL)
    optimizer, other = torch.optim.AdamW(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    load_pretrained(model, tmp_path, optimizers=[optimizer, other])
    assert not any(optimizer.state.values())
    expected = load_pretrained(fresh(), tmp_path)
    step(model, optimizer)
    step(expected, torch.optim.AdamW(expected.parameters(), lr=0.1))
    assert_same_state(model, state(expected))


@pytest.mark.parametrize("into", [None, TensorizeConfig(TT(order=3, rank=2), TTM(order=3, rank=2))])
def test_an_optimizer_of_parameters_that_would_be_replaced_is_refused(
    tmp_path: Path, into: TensorizeConfig | None
) -> None:
    save_pretrained(trained(), tmp_path)
    model = fresh(config=into)
    want, modules = state(model), list(model.modules())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=r"this AdamW holds embed\..*Nothing was loaded: load first"):
        load_pretrained(model, tmp_path, optimizers=[optimizer])
    assert_same_state(model, want)
    assert list(model.modules()) == modules
    load_pretrained(model, tmp_path, optimizers=[torch.optim.AdamW(model.norm.parameters())])


def test_loading_raises_the_version_of_every_parameter(tmp_path: Path) -> None:
    save_pretrained(trained(), tmp_path)
    model = fresh(config=SMALL)
    before = {name: p._version for name, p in model.named_parameters()}
    load_pretrained(model, tmp_path)
    assert all(p._version > before[name] for name, p in model.named_parameters())


def test_all_files_have_the_users_permissions(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_pretrained(trained(), tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_tensors_with_the_negative_bit_keep_their_sign(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(4)
    model.running_mean = torch._neg_view(torch.arange(4.0))
    save_pretrained(model, tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["running_mean"], -torch.arange(4.0))


def test_what_a_state_says_about_itself_is_no_tensor_and_not_saved(tmp_path: Path) -> None:
    class Noting(nn.Linear):
        def state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:  # as neuraloperator's models do
            return {**super().state_dict(*args, **kwargs), "_metadata": {"_name": "Noting"}}

    model = Noting(64, 64)
    save_pretrained(model, tmp_path)
    other = Noting(64, 64)
    load_pretrained(other, tmp_path)
    assert torch.equal(other.weight, model.weight)


def test_a_folder_of_transformers_need_not_hold_what_its_class_computes(tmp_path: Path) -> None:
    from transformers import MarianConfig, MarianMTModel  # sinusoidal positions

    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 99, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 0}
    config = MarianConfig(**sizes, **heads, encoder_ffn_dim=128, decoder_ffn_dim=128)
    model = MarianMTModel(config)
    tensorize_(model, ratio=1.4)
    model.save_pretrained(tmp_path)
    assert_same_state(load_pretrained(MarianMTModel(config), tmp_path), state(model))
