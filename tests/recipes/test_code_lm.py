"""The code model end to end, small: its loss, its conversion, its batches, and runs of a few steps."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import BertForMaskedLM

from comera.baselines import LINEAR_METHODS, Method
from comera.cli.options import saved_config
from comera.errors import ConfigError, DataError, SpecError
from comera.export.runs import export_run
from comera.fusion import fuse_, merge_cache
from comera.nn.embedding import TTMProjection
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.tensor_train import CompressedLayer, named_trains
from comera.recipes.base import estimates_by_method, step_flops
from comera.recipes.code_lm import recipe as code_lm
from comera.recipes.code_lm.data import Batch, CodeData, CodeDataConfig, prepare
from comera.recipes.code_lm.recipe import (
    CodeLMConfig,
    CodeLMTask,
    CompressConfig,
    ModelConfig,
    build_model,
    masked_loss,
    meta_step,
)
from comera.recipes.trained import open_trained
from comera.trainer.checkpoint import find_checkpoint
from comera.trainer.config import TrainConfig

from ..helpers.recipe_runs import assert_goes_on_only_as_begun
from ..helpers.run_folders import records

SOURCES = str(Path(json.__file__).parent)  # real code that is on every machine, and little of it
TINY = ModelConfig(hidden=64, layers=2, heads=4, ffn=128, max_positions=32)
RANKS = CompressConfig(order=4, rank=6, embedding_order=3, embedding_rank=8, head_rank=6)


@pytest.fixture(scope="module")
def data_config(tmp_path_factory: pytest.TempPathFactory) -> CodeDataConfig:
    cache = str(tmp_path_factory.mktemp("cache"))
    return CodeDataConfig(path=SOURCES, vocab_size=400, block_size=32, held_out=0.2, cache=cache)


@pytest.fixture(scope="module")
def data(data_config: CodeDataConfig) -> CodeData:
    return prepare(data_config, quiet=True)


@pytest.fixture
def config(data_config: CodeDataConfig, tmp_path: Path) -> CodeLMConfig:
    train = TrainConfig(steps=4, batch_size=4, lr=1e-3, eval_every=2, eval_batches=2, progress=False, device="cpu")
    return CodeLMConfig(out=str(tmp_path / "run"), data=data_config, model=TINY, compress=RANKS, train=train)


@pytest.mark.parametrize("method", ["comera", "dense"])
def test_loss_is_that_of_the_whole_model_with_other_labels_ignored(
    config: CodeLMConfig, data: CodeData, method: Literal["comera", "dense"]
) -> None:
    model, _ = build_model(replace(config, method=method), data.vocab_size)
    model.double()
    batch = data.train_batch(0, 4, seed=0)
    labels = torch.full_like(batch.input_ids, -100)
    labels.view(-1)[batch.positions] = batch.labels
    whole = model(batch.input_ids, labels=labels).loss
    torch.testing.assert_close(masked_loss(model, batch), whole, rtol=1e-10, atol=0)


@pytest.mark.parametrize("method", ["comera", "dense"])
@pytest.mark.parametrize("embedding", ["ttm", "low_rank"])
def test_in_training_a_fused_model_has_the_same_loss_and_gradients_without_its_logits(
    config: CodeLMConfig, data: CodeData, method: Literal["comera", "dense"], embedding: Literal["ttm", "low_rank"]
) -> None:
    formats = replace(RANKS, embedding=embedding, head="share")
    model, _ = build_model(replace(config, method=method, compress=formats), data.vocab_size)
    batch = data.train_batch(0, 4, seed=0)
    plain = [masked_loss(model, batch), *torch.autograd.grad(masked_loss(model, batch), list(model.parameters()))]
    fuse_(model)
    kept = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add(t.shape) or t, lambda t: t):
        loss = masked_loss(model, batch)
    fused = [loss, *torch.autograd.grad(masked_loss(model, batch), list(model.parameters()))]
    torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-5)
    assert (len(batch.positions), data.vocab_size) not in kept
    model.eval()
    torch.testing.assert_close(masked_loss(model, batch), plain[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", ["share", "untie", "dense"])
def test_every_kind_of_head_trains_all_parameters(config: CodeLMConfig, data: CodeData, head: Any) -> None:
    model, report = build_model(replace(config, compress=replace(RANKS, head=head)), data.vocab_size)
    kinds: dict[str, type] = {"share": TTMProjection, "untie": TTLinear, "dense": torch.nn.Linear}
    assert type(model.cls.predictions.decoder) is kinds[head]
    assert report is not None
    _assert_all_are_trained(model, data)


def test_block_tensor_trains_take_the_place_of_tensor_trains(config: CodeLMConfig, data: CodeData) -> None:
    formats = replace(RANKS, format="btt", rank=3, blocks=(2, 2), head_rank=2)
    model, _ = build_model(replace(config, compress=formats), data.vocab_size)
    linears = [model.bert.encoder.layer[0].intermediate.dense, model.cls.predictions.decoder]
    assert [str(layer.spec).split(" rank ")[1] for layer in linears] == ["3", "2"]
    assert all(type(layer) is BTTLinear and layer.spec.blocks == (2, 2) for layer in linears)
    _assert_all_are_trained(model, data)


@pytest.mark.parametrize("head", ["share", "untie"])
def test_a_table_of_plain_low_rank(config: CodeLMConfig, data: CodeData, head: Literal["share", "untie"]) -> None:
    formats = replace(RANKS, embedding="low_rank", head=head)
    model, _ = build_model(replace(config, compress=formats), data.vocab_size)
    table = model.bert.embeddings.word_embeddings
    assert str(table.spec) == f"TTM {data.vocab_size}·1 × 1·64 ranks 8"
    assert (model.cls.predictions.decoder.tt is table.tt) == (head == "share")
    _assert_all_are_trained(model, data)


def test_linear_layers_may_stay_dense_beside_a_compressed_table(config: CodeLMConfig, data: CodeData) -> None:
    formats = replace(RANKS, format="dense", embedding="low_rank", head="share")
    model, _ = build_model(replace(config, compress=formats), data.vocab_size)
    compressed = {name for name, module in model.named_modules() if isinstance(module, CompressedLayer)}
    assert compressed == {"bert.embeddings.word_embeddings", "cls.predictions.decoder"}
    _assert_all_are_trained(model, data)


@pytest.mark.parametrize("form", ["files", "functions"])
def test_n_grams_of_the_tokens_that_are_visible(config: CodeLMConfig, form: Any) -> None:
    own = replace(config.data, form=form)
    config = replace(config, compress=replace(RANKS, ngrams=3, ngram_rank=8), data=own)
    summary = code_lm.run(config)
    assert code_lm.run(config, resume=True) == summary
    fresh, _ = build_model(config, 400)
    trained = open_trained(config.folder, saved_config).model
    path = "bert.embeddings.word_embeddings.ngrams"
    tables = zip(fresh.get_submodule(path).parameters(), trained.get_submodule(path).parameters(), strict=True)
    assert all(not torch.equal(before, after) for before, after in tables)


def _assert_all_are_trained(model: torch.nn.Module, data: CodeData) -> None:
    masked_loss(model, data.train_batch(0, 4, seed=0)).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert without <= {f"bert.encoder.layer.{i}.attention.self.key.bias" for i in range(2)}  # softmax cancels them


def test_the_model_of_the_main_job_is_compressed_as_published() -> None:
    with torch.device("meta"):
        model, report = build_model(code_lm.preset(preset="base"), 8192)
    assert report is not None
    assert report.size.dense_tensorized / report.size.tensorized > 40
    assert len(dict(named_trains(model))) == 6 * 6 + 3  # six layers per encoder, the embedding, the head's two
    dense = {row.name for row in report.rows if row.layer and not row.compressed}
    assert dense == {"bert.embeddings.position_embeddings", "bert.embeddings.token_type_embeddings"}


@pytest.mark.parametrize("head", ["share", "untie", "dense"])
def test_ratios_are_taken_to_the_dense_model_with_its_tied_head(
    config: CodeLMConfig, data: CodeData, head: Literal["share", "untie", "dense"]
) -> None:
    task = CodeLMTask(replace(config, compress=replace(RANKS, head=head)), data)
    dense, _ = build_model(replace(config, method="dense"), data.vocab_size)
    assert task.dense_total == sum(p.numel() for p in dense.parameters())


def test_the_head_starts_from_the_frequencies_of_the_tokens(config: CodeLMConfig, data: CodeData) -> None:
    model = CodeLMTask(config, data).model
    assert isinstance(model, BertForMaskedLM)
    counts = torch.bincount(torch.from_numpy(data.train.astype("int64")).flatten(), minlength=data.vocab_size)
    shares = model.cls.predictions.decoder.bias.exp()
    torch.testing.assert_close(shares, (counts + 1) / (counts + 1).sum(), rtol=1e-5, atol=0)
    assert shares.sum().item() == pytest.approx(1)


def test_frequencies_alone_lose_what_a_model_without_context_loses(config: CodeLMConfig, data: CodeData) -> None:
    batches = list(data.held_out_batches(config.train.batch_size))[: config.train.eval_batches]
    alone = data.log_frequencies()
    losses = [torch.nn.functional.cross_entropy(alone.expand(len(b.labels), -1), b.labels) for b in batches]
    assert code_lm.frequency_loss(config, data) == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_the_seed_decides_the_weights(config: CodeLMConfig, data: CodeData) -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        return build_model(replace(config, train=replace(config.train, seed=seed)), data.vocab_size)[0].state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_micro_batches_of_all_processes_are_one_sequence(config: CodeLMConfig, data: CodeData) -> None:
    task = CodeLMTask(replace(config, train=replace(config.train, accumulation=3)), data)
    order = [(step, micro, rank) for step in range(2) for micro in range(3) for rank in range(2)]
    for index, (step, micro, rank) in enumerate(order):
        expected, came = data.train_batch(index, 4, seed=0), task.train_batch(step, micro, rank, 2)
        assert all(torch.equal(a, b) for a, b in zip(expected, came, strict=True))
        assert task.tokens(came) == 4 * 32


@pytest.mark.parametrize("method", LINEAR_METHODS)
def test_a_run_leaves_its_folder_and_resumes_to_its_summary(config: CodeLMConfig, method: Method) -> None:
    config = replace(config, method=method)
    summary = code_lm.run(config)
    assert (summary.method, summary.recipe, summary.steps, summary.tokens) == (method, "code-lm", 4, 4 * 4 * 32)
    assert summary.held_out_loss is not None
    assert [row["step"] for row in records(config.folder, "eval")] == [2, 4]
    assert bool(json.loads((config.folder / "layers.json").read_text())) == (method not in ("dense", "narrow"))
    assert code_lm.run(config, resume=True) == summary


@pytest.mark.parametrize("form", ["files", "functions"])
def test_a_narrow_model_costs_as_much_as_the_compressed_one(config: CodeLMConfig, form: Any) -> None:
    wide = replace(config.model, hidden=128, heads=4, ffn=512)
    config = replace(config, model=wide, data=replace(config.data, form=form))
    width = build_model(replace(config, method="narrow"), 400)[0].config.hidden_size

    def flops(width: int) -> int:
        return step_flops(replace(config, method="dense", model=wide.narrowed(width)), meta_step, 400)

    assert flops(width) <= step_flops(config, meta_step, 400) < flops(width + 8)


def test_a_narrow_run_leaves_with_the_width_that_it_began_with(config: CodeLMConfig, tmp_path: Path) -> None:
    config = replace(config, method="narrow", model=replace(config.model, hidden=128, heads=4, ffn=512))
    code_lm.run(config)
    trained = open_trained(config.folder, saved_config)
    assert export_run(trained, "safetensors", tmp_path / "dense", dense=True).difference < 1e-4
    stored = BertForMaskedLM.from_pretrained(tmp_path / "dense").config.hidden_size
    assert f'"baselines.narrow.hidden": {stored},' in (find_checkpoint(config.folder) / "trainer.json").read_text()


def test_recomputing_changes_no_loss_and_the_merge_runs(config: CodeLMConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[int] = []
    real = merge_cache.merge
    monkeypatch.setattr(merge_cache, "merge", lambda specs, *rest: merged.append(len(specs)) or real(specs, *rest))
    losses = []
    for recompute in (False, True):
        train = replace(config.train, recompute=recompute)
        each = replace(config, out=f"{config.out}-{recompute}", train=train)
        merged.clear()
        code_lm.run(each)
        assert max(merged) > 2  # all layers of one shape at once
        losses.append([row["loss"] for row in records(each.folder) if "loss" in row])
    assert losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_both_methods_and_all_seeds_are_evaluated_on_the_same_batches(config: CodeLMConfig, data: CodeData) -> None:
    other = replace(config, method="dense", train=replace(config.train, seed=7))
    for one, two in zip(CodeLMTask(config, data).eval_batches(), CodeLMTask(other, data).eval_batches(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_training_learns_about_held_out_code(config: CodeLMConfig, data: CodeData) -> None:
    train = replace(config.train, steps=60, batch_size=16, lr=1e-2, eval_every=0, eval_batches=0)
    summary = code_lm.run(replace(config, model=replace(TINY, layers=1), train=train))
    assert summary.held_out_loss is not None
    assert summary.held_out_loss < math.log(data.vocab_size) - 0.7  # a model that knows nothing has the logarithm


def test_a_run_does_not_resume_on_other_data_or_another_model(config: CodeLMConfig) -> None:
    code_lm.run(replace(config, train=replace(config.train, save_every=2)))
    (config.folder / "summary.json").unlink()  # as if it had been killed before it ended
    changes = {
        "data.mask_share": {"data": replace(config.data, mask_share=0.2)},
        "data.prepared": {"data": replace(config.data, vocab_size=390)},
        "model.dropout": {"model": replace(config.model, dropout=0.1)},
        "compress.rank": {"compress": replace(config.compress, rank=5)},
    }
    assert_goes_on_only_as_begun(code_lm.run, config, changes)


def test_estimate_shows_all_methods_without_computing(config: CodeLMConfig) -> None:
    estimates = code_lm.estimate(code_lm.preset(preset="base"))
    assert set(estimates) == set(LINEAR_METHODS)
    assert estimates["dense"].weights / estimates["comera"].weights > 30
    assert estimates["dense"].flops / estimates["comera"].flops > 3
    model, _ = build_model(replace(config, method="dense"), config.data.vocab_size)
    tiny = estimates_by_method(config, meta_step, config.data.vocab_size, methods=["dense"])["dense"]
    assert tiny.gradients == sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("preset", code_lm.PRESETS)
def test_presets_differ_by_method_in_learning_rates_alone(preset: code_lm.Preset) -> None:
    comera, *others = [code_lm.preset(method, preset).train for method in LINEAR_METHODS]
    rates = {"lr": 1.0, "core_lr": None, "rank_lr": None}
    assert (comera.lr != others[0].lr) == (preset == "base")
    for other in others:
        assert replace(comera, **rates) == replace(other, **rates)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ModelConfig, {"hidden": 64, "heads": 5}, r"multiple of model\.heads, got 64 and 5"),
        (ModelConfig, {"layers": 0}, r"model\.layers must be at least 1"),
        (ModelConfig, {"dropout": 1.0}, r"model\.dropout must be in \[0, 1\)"),
        (CompressConfig, {"format": "cp"}, r"compress\.format must be tt, btt or dense, got 'cp'"),
        (CompressConfig, {"format": "btt", "rank": (4, 4)}, r"BTT needs rank to be .* >= 1 or None, got \(4, 4\)"),
        (CodeLMConfig, {"data": CodeDataConfig(block_size=600)}, r"size \(600\) must not be above model.* \(512\)"),
        (CodeLMConfig, {"method": "lora"}, r"method must be one of comera, dense, .*narrow, .*hashing, .*, got 'lora'"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError if "BTT" in message else ConfigError, match=message):
        kind(**fields)


def test_a_folder_without_code_stops_before_anything_is_written(config: CodeLMConfig, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="at least two source files"):
        code_lm.run(replace(config, data=replace(config.data, path=str(tmp_path / "empty"))))
    assert not config.folder.exists()


def test_loss_needs_no_more_than_the_batch(data: CodeData, config: CodeLMConfig) -> None:
    model, _ = build_model(config, data.vocab_size)
    batch = data.train_batch(0, 2, seed=0)
    moved = Batch(batch.input_ids.flip(0), (batch.positions + 32) % 64, batch.labels)  # the two blocks swapped
    torch.testing.assert_close(masked_loss(model, moved), masked_loss(model, batch), rtol=1e-5, atol=1e-6)
