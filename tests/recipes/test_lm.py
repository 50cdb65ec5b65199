"""The causal language model end to end, small: its loss, its methods, and runs of a few steps with every option."""

import json
import math
import re
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from comera.baselines import TABLE_METHODS, TOKEN_METHODS, BaselineConfig, CoLA, GaLore, Method, Narrow, installed
from comera.cli.options import saved_config
from comera.convert import NGrams
from comera.errors import ConfigError, ConversionError, DataError
from comera.export import export_program
from comera.export.runs import export_run
from comera.kernels import select
from comera.memory import estimate as memory
from comera.nn.embedding import TTMProjection
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.tensor_train import named_trains
from comera.rank import LateStage
from comera.recipes.base import step_flops
from comera.recipes.lm import recipe as lm
from comera.recipes.lm.data import LMData, LMDataConfig, prepare
from comera.recipes.lm.generate import Sampling, open_writer
from comera.recipes.lm.model import CompressConfig, Format, ModelConfig
from comera.recipes.lm.recipe import METRIC, LMConfig, LMTask, build_model, meta_step, next_token_loss, token_losses
from comera.recipes.trained import open_trained
from comera.report import compare, inspect
from comera.report.run import read_run
from comera.trainer.checkpoint import checkpoints
from comera.trainer.config import TrainConfig
from comera.trainer.step import TrainStep

from ..helpers.allocated import peak_allocated
from ..helpers.recipe_runs import assert_goes_on_only_as_begun, assert_same_end, cut_off
from ..helpers.run_folders import records

SOURCES = str(Path(json.__file__).parent)  # real code that is on every machine, and little of it
TINY = ModelConfig(hidden=64, layers=1, heads=4)  # each layer takes as long as the first, to trace above all
TWO = replace(TINY, layers=2)
RANKS = CompressConfig(
    format="tt", order=4, rank=6, embedding="ttm", embedding_order=3, embedding_rank=8, head="untie", head_rank=6
)


@pytest.fixture(scope="module")
def data_config(tmp_path_factory: pytest.TempPathFactory) -> LMDataConfig:
    cache = str(tmp_path_factory.mktemp("cache"))
    return LMDataConfig(path=SOURCES, vocab_size=400, block_size=32, held_out=0.2, cache=cache)


@pytest.fixture(scope="module")
def data(data_config: LMDataConfig) -> LMData:
    return prepare(data_config, quiet=True)


@pytest.fixture
def config(data_config: LMDataConfig, tmp_path: Path) -> LMConfig:
    train = TrainConfig(steps=2, batch_size=4, lr=1e-3, eval_every=1, eval_batches=2, progress=False, device="cpu")
    baselines = BaselineConfig(galore=GaLore(rank=4), cola=CoLA(rank=4))
    return LMConfig(
        out=str(tmp_path / "run"), data=data_config, model=TINY, compress=RANKS, train=train, baselines=baselines
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("method", ["comera", "dense"])
def test_loss_is_that_of_the_stock_model_with_its_mask(
    config: LMConfig, data: LMData, method: Method, family: Any
) -> None:
    config = replace(config, method=method, model=replace(TWO, family=family, tie=method == "comera"))
    model: Any = build_model(config, data.vocab_size)[0].double().eval()
    batch = data.train_batch(0, 4, seed=0)
    ours, trained_on = token_losses(model, batch).mean(), next_token_loss(model, batch)
    with torch.no_grad():
        model.set_attn_implementation("sdpa")  # transformers' own, which makes masks
        logits = model(batch.input_ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(trained_on, expected.float())  # transformers' loss, which is in float32
    changed = batch.input_ids.clone()
    changed[:, 20:] = 7  # what comes later decides nothing
    torch.testing.assert_close(model(changed).logits[:, :20], logits[:, :20], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", [method for method in lm.METHODS if installed(method)])
def test_a_run_leaves_its_folder_exports_and_resumes_to_its_summary(config: LMConfig, method: Method) -> None:
    config = replace(config, method=method)
    summary = lm.run(config)
    assert (summary.method, summary.recipe, summary.steps, summary.tokens) == (method, "lm", 2, 2 * 4 * 32)
    assert set(summary.metrics) == {METRIC}
    assert bool(json.loads((config.folder / "layers.json").read_text())) == (
        method not in ("dense", "narrow", *TOKEN_METHODS)
    )
    assert lm.run(config, resume=True) == summary
    trained = open_trained(config.folder, saved_config)
    out = config.folder.parent / "export"
    assert export_run(trained, "safetensors", out).difference < 1e-4
    assert (
        AutoTokenizer.from_pretrained(out)("def é(").input_ids
        == AutoTokenizer.from_pretrained(config.folder)("def é(").input_ids
    )
    shown = inspect(config.folder)
    assert f"lm, {method}: 2 steps" in shown


CHOICES: dict[str, dict[str, Any]] = {
    "family": {"model": replace(TINY, family="gpt2", dropout=0.1)},
    "family untied": {"model": replace(TINY, family="gpt2", tie=False)},
    "kv_heads": {"model": replace(TINY, kv_heads=2, ffn=96)},
    "untied": {"model": replace(TINY, tie=False, max_positions=40, dropout=0.1)},
    "blocks": {"compress": CompressConfig(format="btt", rank=1, embedding="dense")},
    "table alone": {"compress": CompressConfig(format="dense", embedding_rank=4)},
    "table alone, untied": {"compress": CompressConfig(format="dense"), "model": replace(TINY, tie=False)},
    "default formats": {"compress": CompressConfig()},
    "default formats, untied": {"compress": CompressConfig(), "model": replace(TINY, tie=False)},
    "dense head": {"compress": replace(RANKS, head="dense")},
    "shared head": {"compress": replace(RANKS, head="share")},
    "plain low rank": {"compress": replace(RANKS, head="share", embedding="low_rank")},
    "ranks": {"compress": replace(RANKS, rank=(1, 4, 5, 4, 1), head_rank=(1, 5, 6, 5, 1), embedding_rank=(1, 3, 4, 1))},
    "narrow by hand": {"method": "narrow", "baselines": BaselineConfig(narrow=Narrow(hidden=24))},
    "recompute": {"train": {"recompute": True, "accumulation": 2}, "model": TWO},
    "smmf": {"train": {"optimizer": "smmf"}},
    "adarankgrad": {"method": "dense", "train": {"optimizer": "adarankgrad"}},
    "tensor_galore": {"train": {"optimizer": "tensor_galore"}, "compress": replace(RANKS, head="dense")},
    "fp8": {"train": {"precision": "fp8"}},
    "fp8, recompute": {"train": {"precision": "fp8", "recompute": True}, "model": TWO},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_two_steps_with_every_option(config: LMConfig, choice: str) -> None:
    changes = dict(CHOICES[choice])
    if isinstance(changes.get("train"), dict):
        changes["train"] = replace(config.train, **changes["train"])
    config = replace(config, **changes)
    summary = lm.run(config)
    assert (summary.steps, summary.stopped) == (2, "steps")
    writer = open_writer(config.folder, saved_config)
    assert writer.context == (40 if choice == "untied" else 32)
    pieces: list[str] = []
    writer.write("def ", Sampling(max_new_tokens=4), pieces.append)
    out = config.folder.parent / "dense"
    assert export_run(open_trained(config.folder, saved_config), "safetensors", out, dense=True).difference < 1e-4
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == 400
    again: list[str] = []
    open_writer(out, saved_config).write("def ", Sampling(max_new_tokens=4), again.append)
    assert again == pieces


NGRAMS: dict[str, dict[str, Any]] = {
    "beside compressed layers": {"compress": replace(RANKS, ngrams=3, ngram_rank=8)},
    "alone": {"compress": CompressConfig(format="dense", embedding="dense", ngrams=4, ngram_rank=8)},
    "own tables": {
        "compress": replace(RANKS, embedding="dense", ngrams=3, ngram_rank=8, head="dense"),
        "model": replace(TINY, tie=False),
    },
    "tensor train": {"compress": replace(RANKS, ngrams=3, ngram_rank=8, ngram_heads=2), "train": {"optimizer": "muon"}},
    "shared with a head": {"compress": replace(RANKS, ngrams=3, ngram_rank=8, head="share", embedding="low_rank")},
    "gpt2": {"compress": replace(RANKS, ngrams=3, ngram_rank=8), "model": replace(TINY, family="gpt2")},
    "recompute": {"compress": replace(RANKS, ngrams=3, ngram_rank=8), "train": {"recompute": True}},
    "graph": {"compress": replace(RANKS, ngrams=3, ngram_rank=8), "train": {"mode": "graph", "steps": 4}},
    "target": {
        "compress": replace(RANKS, ngrams=3, ngram_rank=8),
        "train": {"late": LateStage(target_size=0.5, start_step=1, steps=1), "steps": 4, "prune_every": 1},
    },
}


@pytest.mark.parametrize("choice", NGRAMS)
def test_ngrams_train_write_and_export(config: LMConfig, choice: str) -> None:
    changes = dict(NGRAMS[choice])
    changes["train"] = replace(config.train, **changes.get("train", {}))
    config = replace(config, **changes)
    summary = lm.run(config)
    assert summary.stopped == "steps"
    if choice == "graph":
        assert (summary.mode, select.unavailable_reason() is None) in (("graph", True), ("eager", False))
    assert lm.run(config, resume=True) == summary
    trained = open_trained(config.folder, saved_config)
    table: Any = trained.model.get_submodule(
        "transformer.wte.ngrams" if config.model.family == "gpt2" else "model.embed_tokens.ngrams"
    )
    if choice == "target":
        assert table.spec.numel < NGrams(order=3, rank=8).spec(400, 64).numel
    pieces: list[str] = []
    open_writer(config.folder, saved_config).write("def ", Sampling(max_new_tokens=4), pieces.append)
    out = config.folder.parent / "export"
    assert export_run(trained, "safetensors", out).difference < 1e-4
    again: list[str] = []
    open_writer(out, saved_config).write("def ", Sampling(max_new_tokens=4), again.append)
    assert again == pieces
    with pytest.raises(ConversionError, match=r"n-grams to .* stands for .* rows: it has no dense weight"):
        export_run(trained, "safetensors", config.folder.parent / "dense", dense=True)
    assert export_run(trained, "program", config.folder.parent / "program").difference < 1e-4
    ids = torch.randint(400, (3, 7))
    program = torch.export.load(config.folder.parent / "program" / "model.pt2").module()
    with torch.no_grad():
        expected = trained.model.eval()(input_ids=ids).logits
    torch.testing.assert_close(program(input_ids=ids)["logits"], expected, rtol=1e-4, atol=1e-4)


def test_an_onnx_graph_has_the_n_grams_and_a_mask_is_refused(config: LMConfig) -> None:
    lm.run(replace(config, compress=replace(RANKS, ngrams=3, ngram_rank=8)))
    trained, out = open_trained(config.folder, saved_config), config.folder.parent
    assert export_run(trained, "onnx", out / "onnx").difference < 1e-4
    inputs = {"input_ids": torch.ones(2, 5, dtype=torch.int64), "attention_mask": torch.ones(2, 5)}
    with pytest.raises(ConversionError, match=r"^expected the ids alone as input of a model with n-grams, got more: "):
        export_program(trained.model, inputs, out / "masked")
    assert not (out / "masked").exists()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_compiled_steps_are_those_of_eager_mode(
    config: LMConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comera.trainer.state.TrainStep", partial(TrainStep, backend="eager"))  # inductor is slow
    monkeypatch.setenv("COMERA_KERNELS", "none")  # with them, a CPU does not compile
    eager = lm.run(config)
    compiled = lm.run(replace(config, out=str(tmp_path / "compiled"), train=replace(config.train, mode="compile")))
    assert (compiled.mode, eager.mode) == ("compile", "eager")
    assert [row["built"] for row in records(tmp_path / "compiled", "mode")] == [1]  # one graph
    assert compiled.held_out_loss == pytest.approx(eager.held_out_loss, rel=1e-5)


def test_the_help_offers_what_these_tests_run() -> None:
    assert set(get_args(Format)) == {"tt", "btt", "dense"}
    assert {f.name for f in fields(ModelConfig)} == {
        *("family", "hidden", "layers", "heads", "kv_heads", "ffn", "dropout", "max_positions", "tie")
    }
    assert set(get_args(Method)) == {*lm.METHODS, *TABLE_METHODS}  # the latter are refused, see below


@pytest.mark.parametrize(
    ("method", "rates", "optimizer"),
    [
        ("comera", "flat", "adamw"),
        ("comera", "spectral", "muon"),
        ("comera", "spectral", "smmf"),
        ("dense", "spectral", "adarankgrad"),
        ("dense", "spectral", "tensor_galore"),
        ("narrow", "flat", "adamw"),
    ],
)
def test_a_stopped_run_resumes_to_the_bit(
    config: LMConfig, method: Method, rates: Any, optimizer: Any, tmp_path: Path
) -> None:
    train = replace(config.train, steps=6, save_every=2, threads=1, rates=rates, optimizer=optimizer)
    given = BaselineConfig(narrow=Narrow(hidden=24))  # to find the width is not what this is about
    config = replace(config, method=method, model=replace(TWO, dropout=0.1), train=train, baselines=given)
    whole = lm.run(replace(config, out=str(tmp_path / "whole")))
    cut_off(LMTask, 3, lambda: lm.run(config))
    again = lm.run(config, resume=True)
    assert (again.held_out_loss, again.metrics) == (whole.held_out_loss, whole.metrics)
    assert_same_end(config.folder, tmp_path / "whole")


def test_nats_per_byte_are_all_nats_over_all_bytes(config: LMConfig, data: LMData) -> None:
    summary = lm.run(config)
    model: Any = open_trained(config.folder, saved_config).model
    nats = size = 0.0
    with torch.no_grad():
        for batch in list(data.held_out_batches(4))[:2]:
            logits = model(batch.input_ids).logits.double()
            nats += torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).item() * 128
            size += sum(len(data.bytes.bytes_of(row.numpy())) for row in batch.labels)
    assert summary.metrics[METRIC] == pytest.approx(nats / size, rel=1e-5)
    assert summary.held_out_loss == pytest.approx(nats / 256, rel=1e-5)


def test_a_narrow_model_costs_as_much_as_the_compressed_one_and_a_wider_one_more(config: LMConfig) -> None:
    for model in (replace(TINY, hidden=128, kv_heads=2, ffn=320), replace(TINY, family="gpt2")):
        each = replace(config, model=model, compress=replace(RANKS, rank=8))
        limit = step_flops(each, meta_step, 400)
        width = build_model(replace(each, method="narrow"), 400)[0].config.hidden_size

        def flops(width: int, each: LMConfig = each) -> int:
            return step_flops(replace(each, method="dense", model=each.model.narrowed(width)), meta_step, 400)

        assert flops(width) <= limit < flops(width + 8)
        assert 8 < width < model.hidden
        by_hand = replace(each, method="narrow", baselines=BaselineConfig(narrow=Narrow(hidden=width)))
        narrow, _ = build_model(by_hand, 400)
        assert narrow.config.hidden_size == width
        assert narrow.config.num_hidden_layers == model.layers
        assert width / narrow.config.num_attention_heads == pytest.approx(model.hidden / model.heads, rel=0.5)


def test_a_narrow_run_says_its_width_keeps_it_and_has_a_ratio(
    config: LMConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, method="narrow", model=replace(TINY, kv_heads=2))
    summary = lm.run(config)
    width = build_model(config, 400)[0].config.hidden_size
    assert f"narrow: dense and {width} wide instead of 64" in capsys.readouterr().err
    assert summary.ratio is not None
    assert summary.ratio > 1
    (checkpoint,) = checkpoints(config.folder)[-1:]
    assert f'"baselines.narrow.hidden": {width}' in (checkpoint / "trainer.json").read_text()
    other = replace(config, baselines=replace(config.baselines, narrow=Narrow(hidden=8)))
    (config.folder / "summary.json").unlink()
    with pytest.raises(ConfigError, match=rf"baselines\.narrow\.hidden: expected {width}, got 8"):
        lm.run(other, resume=True)


def test_ngrams_are_shown_stored_and_drawn(config: LMConfig, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {}
    for method in ("comera", "dense"):
        runs[method] = (each := replace(config, method=method, out=f"{config.out}-{method}")).folder
        lm.run(each)
    assert "held-out nats per byte from frequencies alone: unigrams " in capsys.readouterr().err
    (references,) = read_run(runs["dense"]).references.values()
    assert math.log(256) > references["unigrams"] > references["bigrams"] > references["trigrams"] > 0
    text = compare(runs, Path(str(config.out)))
    assert "nats per byte" in text.splitlines()[0]
    assert f"{references['trigrams']:.3f}" in text.partition("For comparison, nats per byte")[2]
    page = (Path(str(config.out)) / "compare.html").read_text()
    assert page.count("trigrams") >= 2  # in the figure and in the table


def test_by_default_the_head_is_the_embeddings_table_where_the_model_ties_them(config: LMConfig) -> None:
    for tie, kind in ((True, TTMProjection), (False, BTTLinear)):
        sizes = replace(config, compress=CompressConfig(), model=replace(TINY, tie=tie))
        model: Any = build_model(sizes, 400)[0]
        assert type(model.lm_head) is kind
        assert model.model.embed_tokens.spec.core_shapes == ((1, 400, 1, 32), (32, 1, 64, 1))
        assert not tie or model.lm_head.tt is model.model.embed_tokens.tt


def test_every_kind_of_head_trains_all_parameters(config: LMConfig, data: LMData) -> None:
    kinds: dict[Any, type] = {"share": TTMProjection, "untie": TTLinear, "dense": torch.nn.Linear}
    for head, kind in kinds.items():
        model: Any = build_model(replace(config, compress=replace(RANKS, head=head)), data.vocab_size)[0]
        assert type(model.lm_head) is kind
        next_token_loss(model, data.train_batch(0, 4, seed=0)).backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_method_with_an_optimizer_of_its_own_refuses_another(config: LMConfig) -> None:
    config = replace(config, method="cola", train=replace(config.train, optimizer="muon"))
    with pytest.raises(ConfigError, match=r"train\.optimizer: lm has an optimizer of its own with method 'cola'"):
        lm.run(config)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_learns_about_held_out_code(config: LMConfig, data: LMData, optimizer: Any) -> None:
    train = replace(config.train, steps=60, batch_size=16, lr=2e-2, eval_every=0, eval_batches=0, optimizer=optimizer)
    summary = lm.run(replace(config, train=train))
    assert summary.metrics[METRIC] < data.ngram_losses(16)["unigrams"] - 0.3


def test_a_run_does_not_resume_on_other_data_or_another_model(config: LMConfig) -> None:
    lm.run(config)
    (config.folder / "summary.json").unlink()  # as if it had been killed before it ended
    changes = {
        "data.block_size": {"data": replace(config.data, block_size=16)},
        "data.prepared": {"data": replace(config.data, vocab_size=390)},
        "model.dropout": {"model": replace(config.model, dropout=0.1)},
        "compress.rank": {"compress": replace(config.compress, rank=5)},
    }
    assert_goes_on_only_as_begun(lm.run, config, changes)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_estimate_shows_all_methods_without_computing(config: LMConfig, family: Any) -> None:
    estimates = lm.estimate(replace(config, model=replace(TINY, family=family)))
    others = ["galore", "lte", "cola", "tensorly"] if family == "llama" else []
    every = ["comera", "dense", *others, "narrow", *TOKEN_METHODS]
    assert list(estimates) == [method for method in every if installed(method)]  # type: ignore[arg-type]
    assert estimates["narrow"].flops <= estimates["comera"].flops < estimates["dense"].flops


@pytest.mark.parametrize("preset", lm.PRESETS)
def test_presets_differ_by_method_in_optimizers_and_rates_alone(preset: lm.Preset) -> None:
    trains = {method: lm.preset(method, preset).train for method in lm.METHODS if installed(method)}
    muon = {method for method, train in trains.items() if train.optimizer == "muon"}
    assert muon == (set() if preset.startswith("llama") else {"comera", "dense", "narrow", *TOKEN_METHODS})
    assert all(trains[method] == trains["comera"] for method in muon)
    assert trains["comera"].recompute == (preset == "llama-7b")
    same = {"optimizer": "adamw", "lr": 1.0, "core_lr": None, "table_lr": None, "recompute": False}
    assert len({replace(train, **same) for train in trains.values()}) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(("preset", "dense"), [("llama-1b", 1_034_512_384), ("llama-7b", 6_607_343_616)])
def test_large_presets_have_the_shapes_of_llamas(preset: lm.Preset, dense: int) -> None:
    with torch.device("meta"):
        model, report = build_model(lm.preset("comera", preset), 32_000)
    assert report is not None
    assert report.dense_total == dense  # of the published model, less its head: here the table is the head, too
    assert report.ratio > 15
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_dense_weights_of_a_compressed_model_never_exist() -> None:
    config = replace(lm.preset("comera", "llama-7b"), model=ModelConfig(hidden=512, layers=4, heads=8))
    found: list[Any] = []
    peak = peak_allocated(lambda: found.append(build_model(config, 1024)))
    ((model, report),) = found
    assert 4 * report.total < peak < 4 * report.dense_total / 2
    stds = {name: tt.init_std for name, tt in named_trains(model)}
    residual = "model.layers.3.self_attn.o_proj.tt"
    assert stds.pop(residual) == pytest.approx(512**-0.5 / 8**0.5, rel=0.02)  # as `dense_model` draws them
    assert stds["model.layers.3.self_attn.q_proj.tt"] == pytest.approx(512**-0.5, rel=0.02)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_too_little_memory_is_said_before_the_first_step(
    config: LMConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = lm.estimate(config, ["comera"])["comera"].total
    monkeypatch.setattr(memory, "free_memory", lambda device: needed // 2)
    lm.run(config)
    said = capsys.readouterr().err
    assert re.search(
        r"^lm: a step needs about 0\.\d GB, 0\.\d are free: recompute .* a smaller batch", said, re.MULTILINE
    )
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * needed)
    lm.run(replace(config, out=f"{config.out}-2"))
    assert "are free" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"hidden": 64, "heads": 5}}, r"multiple of model\.heads, got 64 and 5"),
        ({"model": {"layers": 0}}, r"model\.layers must be at least 1"),
        ({"model": {"kv_heads": 0}}, r"model\.kv_heads must be at least 1"),
        ({"model": {"hidden": 12, "heads": 4}}, r"heads of even size, got 12 / 4"),
        ({"model": {"heads": 4, "kv_heads": 3}}, r"multiple of model\.kv_heads, got 4 and 3"),
        ({"model": {"family": "gpt2", "kv_heads": 2}}, r"gpt2 has as many as heads"),
        ({"model": {"family": "bert"}}, r"model\.family must be one of llama, gpt2, got 'bert'"),
        ({"model": {"dropout": 1.0}}, r"model\.dropout must be in \[0, 1\)"),
        ({"model": {"max_positions": 100}}, r"data\.block_size \(256\) must not be above model\.max_positions \(100\)"),
        ({"model": {"tie": False}, "compress": {"head": "share"}}, r"share needs a tied head"),
        ({"compress": {"format": "ttx"}}, r"compress\.format must be tt, btt or dense, got 'ttx'"),
        ({"compress": {"head": "tied"}}, r"compress\.head must be share, untie or dense, got 'tied'"),
        ({"method": "cola", "model": {"family": "gpt2"}}, "method cola converts nn.Linear, of which gpt2 has none"),
        ({"method": "hashing"}, "method hashing needs a recipe that offers it, .* or the recipe dlrm"),
        ({"method": "lora"}, "method must be one of comera, dense, .*narrow, .*, got 'lora'"),
        ({"train": {"steps": 1, "lr": 0.0}}, r"train\.lr must be a number > 0, got 0\.0"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    kinds = {"model": ModelConfig, "compress": CompressConfig, "train": TrainConfig}
    with pytest.raises(ConfigError, match=message):
        LMConfig(**{name: kinds[name](**value) if name in kinds else value for name, value in change.items()})


def test_a_folder_without_text_stops_before_anything_is_written(config: LMConfig, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="at least two documents"):
        lm.run(replace(config, data=replace(config.data, path=str(tmp_path / "empty"))))
    assert not config.folder.exists()
