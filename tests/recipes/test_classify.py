"""The classification recipe end to end, small: from sizes and configurations to reports and exports."""

import json
import os
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    PretrainedConfig,
    RobertaConfig,
)

from comera.baselines import LINEAR_METHODS, BaselineConfig, Method, Narrow
from comera.cli import options
from comera.cli.main import main
from comera.cli.options import saved_config
from comera.errors import CheckpointError, ComeraError, ConfigError, ConversionError
from comera.export.runs import export_run
from comera.nn.tensor_train import named_trains
from comera.rank.objective import LateStage
from comera.recipes.base import runs
from comera.recipes.classify import recipe as classify
from comera.recipes.classify.data import ClassifyDataConfig
from comera.recipes.classify.model import CompressConfig, EncoderConfig, dense_config, outside, trained_model
from comera.recipes.classify.recipe import ClassifyConfig, ClassifyTask
from comera.recipes.classify.task import confusion_matrix, macro_f1
from comera.recipes.data.prepared import ExampleBatch
from comera.recipes.trained import open_trained
from comera.report import read_run
from comera.trainer.checkpoint import checkpoints

from ..helpers.recipe_runs import assert_same_end
from ..helpers.review_rows import reviews, write_csv
from ..helpers.run_folders import history
from ..helpers.tiny_classifier import SIZES, TINY, checkpoint, steps, task_of, tiny_config

FAST = ("--train.steps", "2", "--train.progress", "false", "--train.device", "cpu")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def config(cache: Path, tmp_path: Path) -> ClassifyConfig:
    return tiny_config(cache, tmp_path / "run")


# --- learning --------------------------------------------------------------------------------------------------------


def test_a_compressed_model_learns_to_tell_two_words_apart(config: ClassifyConfig, cache: Path, tmp_path: Path) -> None:
    test = write_csv(tmp_path / "test.csv", reviews(40, 1))
    summary = classify.run(replace(config, data=replace(config.data, test=str(test)), late_targets=(0.9,)))
    folders = runs(replace(config, late_targets=(0.9,)))
    losses = [row["loss"] for row in history(folders["early"], "train")]
    assert losses[-1] < 0.5 * losses[0]
    assert summary.held_out_loss is not None
    assert summary.held_out_loss < 0.2
    assert summary.metrics["accuracy"] == summary.metrics["f1"] == 1.0
    for folder in folders.values():
        run = read_run(folder)
        assert run.test["accuracy"] == 1.0
        assert run.confusion is not None
        assert run.confusion.labels == ("negative", "positive")
        assert run.confusion.counts["test"].sum() == 40
        assert (run.confusion.counts["held-out"] > 0).tolist() == [[True, False], [False, True]]
    (folders["early"] / "confusion.json").unlink()  # as after a run that was killed in between
    before = read_run(folders["early"]).test
    classify.run(replace(config, data=replace(config.data, test=str(test)), late_targets=(0.9,)), resume=True)
    again = read_run(folders["early"])
    assert again.confusion is not None
    assert again.confusion.counts["test"].tolist() == run.confusion.counts["test"].tolist()
    assert again.test == pytest.approx(before)


def test_stages_of_other_data_or_settings_are_refused(config: ClassifyConfig) -> None:
    """Held-out rows of another split were training rows of the early stage."""
    config = steps(config, 2)
    classify.run(config)
    before = {path: path.read_bytes() for path in config.folder.rglob("*") if path.is_file()}
    others = (
        replace(config, data=replace(config.data, split_seed=5), late_targets=(0.9,)),
        replace(config, train=replace(config.train, seed=7)),
    )
    for other in others:
        with pytest.raises(ConfigError, match="a resumed run must go on as it was begun"):
            classify.run(other, resume=True)
        assert {path: path.read_bytes() for path in config.folder.rglob("*") if path.is_file()} == before


def test_accuracy_and_f1_are_those_of_all_rows(config: ClassifyConfig) -> None:
    predicted, labels = torch.tensor([0, 0, 1, 2, 2, 2, 0]), torch.tensor([0, 1, 1, 2, 0, 2, 0])
    matrix = confusion_matrix(predicted, labels, 4)
    assert matrix.tolist() == [[2, 0, 1, 0], [1, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0]]
    assert macro_f1(matrix) == pytest.approx((2 / 3 + 2 / 3 + 4 / 5) / 3)
    task = task_of(config)
    task.model.eval()
    rows = torch.cat([task.evaluate(task.model, batch)[2] for batch in task.eval_batches()])
    assert len(rows) == task.data.dev_size
    values = task.evaluate_rows(rows)
    assert task.confusion is not None
    assert values == {"f1": macro_f1(task.confusion)}
    assert task.references == {"accuracy": {"always " + task.data.most_frequent[0]: task.data.most_frequent[1]}}


class Stopped(ClassifyTask):
    """Gets a SIGTERM in the middle of its fourth step."""

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> ExampleBatch:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_batch(step, micro, rank, world)


@pytest.mark.parametrize("method", ["comera", "dense"])
def test_a_stopped_run_resumes_to_the_bit(
    method: Method, config: ClassifyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = steps(replace(config, method=method), 8, prune_every=3, log_every=1)
    parted = replace(whole, out=str(tmp_path / "parted"))
    classify.run(whole)
    with monkeypatch.context() as patch:
        patch.setattr(classify, "ClassifyTask", Stopped)
        assert not classify.run(parted).finished
    with pytest.raises(ConfigError, match="expected a folder without a run"):
        classify.run(parted)
    assert classify.run(parted, resume=True).finished
    for (_, one), (_, two) in zip(runs(whole).items(), runs(parted).items(), strict=True):
        assert history(one) == history(two)
        assert_same_end(one, two)
        assert (one / "confusion.json").read_text() == (two / "confusion.json").read_text()


@pytest.mark.parametrize("method", LINEAR_METHODS)
def test_two_steps_of_every_method(method: Method, config: ClassifyConfig) -> None:
    width = Narrow(hidden=16)  # at this size nothing is cheaper than dense
    config = steps(replace(config, method=method, baselines=BaselineConfig(narrow=width)), 2)
    summary = classify.run(config)
    assert (summary.method, summary.recipe, summary.steps, summary.examples) == (method, "classify", 2, 32)
    data = task_of(config).data
    assert summary.tokens == sum(int(data.train_batch(k, 16, seed=0).attention_mask.sum()) for k in range(2))
    assert set(summary.metrics) == {"accuracy", "f1"}
    (folder,) = runs(config).values()
    assert folder == (config.folder / "early" if method == "comera" else config.folder)
    if method == "narrow":
        assert json.loads((folder / "config.json").read_text())["hidden_size"] == 16
        assert summary.ratio is not None
        assert summary.ratio > 1
    assert classify.run(config, resume=True) == summary


# --- encoders --------------------------------------------------------------------------------------------------------


def encoders() -> list[PretrainedConfig]:
    distil = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 32}
    sizes = SIZES | {"num_hidden_layers": 1}
    return [
        BertConfig(**sizes, max_position_embeddings=32),
        RobertaConfig(**sizes, max_position_embeddings=34, type_vocab_size=1),
        DistilBertConfig(**distil),
    ]


@pytest.mark.parametrize("encoder", encoders(), ids=lambda config: config.model_type)
def test_any_encoder_trains_leaves_and_is_read_back_with_its_labels(
    encoder: PretrainedConfig, config: ClassifyConfig, tmp_path: Path
) -> None:
    encoder.save_pretrained(tmp_path / "encoder")
    sizes = classify.preset().model
    model = replace(sizes, config=str(tmp_path / "encoder"))
    config = steps(replace(config, preset="small", model=model), 2)
    classify.run(config)
    (run,) = runs(config).values()
    texts = ["a good film", "the plot is bad and the actor is not"]
    tokenizer = AutoTokenizer.from_pretrained(run)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    task = task_of(config)
    logits = []
    for target in (("safetensors", "--dense"), ("safetensors",), ("program",)):
        out = tmp_path / "-".join(target)
        assert main(["export", str(run), "--to", *target, "--out", str(out)]) == 0
        assert AutoTokenizer.from_pretrained(out)(texts).input_ids == tokenizer(texts).input_ids
        if target == ("program",):
            program = torch.export.load(out / "model.pt2").module()
            logits.append(program(**inputs)["logits"])
    dense = AutoModelForSequenceClassification.from_pretrained(tmp_path / "safetensors---dense").eval()
    assert type(dense) is type(task.model)
    assert dense.config.id2label == {0: "negative", 1: "positive"}
    assert dense.config.label2id == {"negative": 0, "positive": 1}
    torch.testing.assert_close(dense(**inputs).logits, logits[0], rtol=1e-4, atol=1e-5)
    longest = 33 if encoder.model_type == "roberta" else 32  # of 34, as its positions begin after that of the padding
    with pytest.raises(ConfigError, match=rf"data\.max_length \(34\) must not be above .* \({longest}\)"):
        task_of(replace(config, data=replace(config.data, max_length=34)))


def test_a_size_that_cannot_be_says_what_can(config: ClassifyConfig) -> None:
    with pytest.raises(ConversionError, match=r"smaller at most.*lower compress\.ratio, or take compress\.format tt"):
        task_of(replace(config, compress=CompressConfig(ratio=50.0)))


def test_decomposed_weights_get_two_factors_by_default(config: ClassifyConfig, tmp_path: Path) -> None:
    source = replace(classify.preset().model, checkpoint=str(checkpoint(tmp_path / "bert", vocab_size=8192)))
    trained = replace(config, preset="small", model=source)

    def specs(config: ClassifyConfig) -> set[tuple[str, int]]:
        trains = [train for _, train in named_trains(task_of(config).model)]
        return {(type(train.spec).__name__, train.spec.order) for train in trains}

    assert specs(trained) == {("TTSpec", 2), ("TTMSpec", 2)}
    for own in ({"init": "random"}, {"format": "btt", "embedding_order": 3}):
        assert specs(replace(trained, compress=CompressConfig(ratio=1.5, **own))) == {("BTTSpec", 2), ("TTMSpec", 3)}
    assert specs(config) == {("BTTSpec", 2), ("TTMSpec", 3)}
    plain = {"init": "random", "embedding": "low_rank"}
    assert specs(replace(trained, compress=CompressConfig(ratio=1.5, **plain))) == {("BTTSpec", 2), ("TTMSpec", 2)}
    # a run's model is rebuilt in the same formats, to load its weights
    built, _ = classify.build_model(trained, task_of(trained).model.config)
    assert {train.spec.order for _, train in named_trains(built)} == {2}


def test_n_grams_beside_the_tokens_of_what_is_read(config: ClassifyConfig, tmp_path: Path) -> None:
    compress = CompressConfig(ratio=2.0, ngrams=3, ngram_rank=8)
    config = steps(replace(config, compress=compress, late_targets=(0.8,)), 6, prune_every=1)
    summary = classify.run(config)
    assert classify.run(config, resume=True) == summary
    early, late = (read_run(folder).summary for folder in runs(config).values())
    assert early is not None
    assert late is not None
    assert late.size_bytes < early.size_bytes
    run = runs(config)["late 0.8"]
    out = tmp_path / "folder"
    assert main(["export", str(run), "--to", "safetensors", "--out", str(out)]) == 0
    with pytest.raises(ConversionError, match=r"one whole text; export its weights \(safetensors\)"):
        export_run(open_trained(run, saved_config), "program", tmp_path / "program")
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert model.get_input_embeddings().ngrams.spec.longest == 3
    texts = ["a good film", "the plot is bad and the actor is not"]
    tokenizer = AutoTokenizer.from_pretrained(run)
    together = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    for text, expected in zip(texts, together, strict=True):  # padding is in no n-gram
        alone = model(**tokenizer(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)


def test_head_positions_and_segments_stay_dense(config: ClassifyConfig) -> None:
    task = task_of(config)
    dense = {row["name"] for row in task.report_rows if row["layer"] and not row["spec"]}
    assert {"classifier", "bert.embeddings.position_embeddings", "bert.embeddings.token_type_embeddings"} <= dense
    assert "bert.embeddings.word_embeddings" not in dense
    with torch.device("meta"):
        roberta = AutoModelForSequenceClassification.from_config(RobertaConfig(**SIZES))
    assert outside(roberta)[-2:] == ("classifier.dense", "classifier.out_proj")


# --- configurations --------------------------------------------------------------------------------------------------


def test_configurations_that_do_not_fit_are_refused(config: ClassifyConfig) -> None:
    small = classify.preset()
    late = LateStage(target_size=0.2)
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"method": "lora"},
            "must be one of comera, dense, galore, lte, cola, tensorly, narrow, .*hashing, .*, got 'lora'",
        ),
        ({"preset": "large"}, "preset must be one of small, base, mnli, .*, got 'large'"),
        ({"late_targets": (0.5, 1.0)}, "> 0 and < 1, got 1.0"),
        ({"late_targets": (float("nan"),)}, "> 0 and < 1, got nan"),
        ({"late_targets": (0.5, 0.5)}, "late_targets must differ"),
        ({"late_epochs": 0.0}, "late_epochs must be a number > 0, got 0.0"),
        ({"train": replace(small.train, late=late)}, "set late_targets and train.epochs"),
        ({"train": replace(small.train, late=replace(late, start_epoch=1))}, "set late_targets and train.epochs"),
        ({"data": ClassifyDataConfig(max_length=600)}, r"\(600\) must not be above model.max_positions \(128\)"),
        ({"compress": CompressConfig(init="decompose")}, "decompose needs trained weights: set model"),
        ({"model": replace(small.model, config="x", hidden=64)}, r"model\.hidden: expected the sizes of model"),
        ({"model": replace(small.model, config="x"), "method": "narrow"}, "expected a BERT of sizes"),
    ]
    for fields, said in wrong:
        with pytest.raises(ConfigError, match=said):
            replace(small, **fields)
    with pytest.raises(ConfigError, match=r"expected model\.config or model\.checkpoint, got both"):
        EncoderConfig(config="x", checkpoint="y")
    for ranks in ({"ratio": None}, {"rank": 3}, {"ratio": None, "rank": 3}, {"ratio": 1.0}, {"format": "cp"}):
        with pytest.raises(ComeraError, match=r"compress\."):
            CompressConfig(**ranks)  # type: ignore[arg-type]
    assert CompressConfig(ratio=None, rank=2, embedding_rank=4)


def test_estimates_need_no_rows(config: ClassifyConfig, tmp_path: Path) -> None:
    estimates = classify.estimate(classify.preset())
    assert set(estimates) == set(LINEAR_METHODS)
    assert estimates["dense"].weights / estimates["comera"].weights > 4
    assert estimates["narrow"].flops <= estimates["comera"].flops < estimates["dense"].flops
    BertConfig(**SIZES).save_pretrained(tmp_path)
    other = classify.estimate(replace(classify.preset(), model=replace(classify.preset().model, config=str(tmp_path))))
    assert set(other) == {*LINEAR_METHODS} - {"narrow"}


# --- what the pages show ---------------------------------------------------------------------------------------------

SHOWN = {
    "csv": "--data.path reviews.csv --data.text sentence --data.label label",
    "pairs": "--data.path pairs.tsv --data.text question --data.pair answer --data.label good",
    "parts": "--data.path reviews.csv --data.valid valid.csv --data.test test.csv",
    "share": "--data.path reviews.csv --data.held_out 0.2 --data.split_seed 1 --data.lowercase false",
    "vocabulary": "--data.path reviews.csv --data.tokenizer words/",
    "lengths": "--data.path reviews.csv --data.max_length 16 --data.max_examples 64 --data.vocab_size 300",
    "config": "--data.path reviews.csv --model.config encoder/",
    "file": "--data.path reviews.csv --model.config encoder/config.json",
    "checkpoint": "--data.path reviews.csv --model.checkpoint bert/ --compress.ratio 2",
    "random": "--data.path reviews.csv --model.checkpoint bert/ --compress.init random",
    "tt": "--data.path reviews.csv --compress.ratio 2 --compress.format tt --compress.order 4",
    "ranks": "--data.path reviews.csv --compress.ratio null --compress.rank 2 --compress.embedding_rank 4",
    "low rank": "--data.path reviews.csv --compress.embedding low_rank",
    "late": "--data.path reviews.csv --late_targets [0.8] --late_epochs 0.1",
    "muon": "--data.path reviews.csv --train.optimizer muon",
    "rates": "--data.path reviews.csv --train.lr 1e-3 --train.rates flat",
    "sizes": "--data.path reviews.csv --model.hidden 64 --model.layers 1 --model.heads 4 --model.ffn 128",
}


@pytest.mark.parametrize("name", SHOWN)
def test_options_that_the_pages_show_run_for_two_steps(
    name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, part in enumerate(("reviews", "valid", "test")):
        write_csv(tmp_path / f"{part}.csv", reviews(120 if part == "reviews" else 20, seed))
    pairs = ["question\tanswer\tgood", *(f"is the {a}?\t{a}\t{b}" for a, b in reviews(100))]
    (tmp_path / "pairs.tsv").write_text("\n".join(pairs))
    BertConfig(**SIZES).save_pretrained(tmp_path / "encoder")
    checkpoint(tmp_path / "bert", vocab_size=8192)
    (tmp_path / "words").mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *{word for text, _ in reviews(120) for word in text.split()}]
    (tmp_path / "words" / "vocab.txt").write_text("\n".join(sorted(words)))
    argv = ["--out", "run", "--data.cache", str(cache), *FAST, *shlex.split(SHOWN[name])]
    if "compress.ratio" not in SHOWN[name]:
        argv += ["--compress.ratio", "1.5"]
    assert main(["train", "classify", *argv]) == 0
    run = tmp_path / "run" / ("late-0.8" if name == "late" else "early")
    page = (run / "report.html").read_text()
    assert "Confusion matrix" in page
    assert '<svg class="confusion"' in page
    assert ("Test accuracy" in page) == (name == "parts")
    assert "columns: text '" in capsys.readouterr().err
    _, resumed, resume = options.parse("train", "classify", ["--resume", "--out", "run"])
    assert resume
    assert resumed.late_targets == ((0.8,) if name == "late" else ())


def test_methods_are_compared(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_csv(tmp_path / "reviews.csv", reviews(60))
    sizes = ("--model.hidden", "32", "--model.layers", "1", "--model.heads", "2", "--model.ffn", "64")
    argv = ["--data.path", str(file), "--data.cache", str(cache), *sizes, "--compress.ratio", "1.5", *FAST]
    assert main(["compare", "classify", "--methods", "dense,comera", "--out", str(tmp_path / "all"), *argv]) == 0
    shown = capsys.readouterr().out
    assert "accuracy %" in shown
    assert "macro F1 %" in shown
    assert [row["name"] for row in json.loads((tmp_path / "all" / "compare.json").read_text())] == ["dense", "comera"]


def test_a_folder_with_a_single_run_stands_for_it(config: ClassifyConfig, tmp_path: Path) -> None:
    classify.run(config)
    folder, out = str(config.folder), str(tmp_path / "out")
    assert list(runs(config).values()) == [config.folder / "early"]
    assert main(["inspect", folder]) == 0
    assert main(["export", folder, "--to", "safetensors", "--out", out]) == 0


# --- from a trained checkpoint ----------------------------------------------------------------------------------------


def from_checkpoint(config: ClassifyConfig, folder: Path, **compress: Any) -> ClassifyConfig:
    model = replace(classify.preset().model, checkpoint=str(folder))
    return replace(config, preset="small", model=model, compress=CompressConfig(**{"ratio": 1.5, **compress}))


def test_trained_weights_are_decomposed(config: ClassifyConfig, tmp_path: Path) -> None:
    config = from_checkpoint(config, checkpoint(tmp_path / "bert"), ratio=1.05, order=2, format="tt")
    dense = task_of(replace(config, method="dense")).model.eval()
    stored = load_file(tmp_path / "bert" / "model.safetensors")
    assert all(torch.equal(p, stored[name]) for name, p in dense.named_parameters())
    decomposed, random = (
        task_of(replace(config, compress=replace(config.compress, init=init))) for init in (None, "random")
    )
    errors = [row["error"] for row in decomposed.report_rows if row["spec"]]
    assert errors
    assert all(0 <= error < 0.9 for error in errors)
    assert all(row["error"] is None for row in random.report_rows)
    batch = next(iter(decomposed.eval_batches()))
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.long()}
    with torch.no_grad():
        truth, near, far = (model.eval()(**inputs).logits for model in (dense, decomposed.model, random.model))
    assert (near - truth).norm() < (far - truth).norm()
    classify.run(steps(config, 2))
    assert len(checkpoints(config.folder / "early")) > 0
    (tmp_path / "bert" / "model.safetensors").unlink()  # the run does not need it any more
    assert main(["export", str(config.folder / "early"), "--to", "safetensors", "--out", str(tmp_path / "out")]) == 0


def test_another_head_begins_anew_and_is_named(
    config: ClassifyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, fields in {"labels": {"labels": 5}, "masked": {"kind": BertForMaskedLM}}.items():
        folder = checkpoint(tmp_path / name, **fields)  # type: ignore[arg-type]
        classify.run(replace(steps(from_checkpoint(config, folder), 1), out=str(tmp_path / f"run-{name}")))
        begun = capsys.readouterr().err.partition("begun anew: ")[2].splitlines()[0].split(", ")
        head = ["classifier.bias", "classifier.weight"]
        pooler = ["bert.pooler.dense.bias", "bert.pooler.dense.weight"]
        assert begun == (head if name == "labels" else [*pooler, *head])


def test_the_tokenizer_of_a_checkpoint_is_taken(config: ClassifyConfig, tmp_path: Path) -> None:
    tokenizer = classify.prepare(config.data, quiet=True).tokenizer
    folder = checkpoint(tmp_path / "bert", vocab_size=400)
    for name, text in tokenizer.files(32).items():
        (folder / name).write_text(text)
    config = from_checkpoint(replace(config, data=replace(config.data, vocab_size=300)), folder)
    assert task_of(config).data.tokenizer.size == tokenizer.size
    small = from_checkpoint(config, checkpoint(tmp_path / "small", vocab_size=100))
    with pytest.raises(ConfigError, match=r"data\.tokenizer: expected one with up to the 100 tokens of .*, got 3"):
        task_of(small)


def test_a_checkpoint_of_another_architecture_or_none_is_refused(config: ClassifyConfig, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "bert")
    whole = load_file(folder / "model.safetensors")
    about = dense_config(replace(TINY, checkpoint=str(folder)), 300, 0, ("a", "b"))
    other = RobertaConfig(**SIZES, vocab_size=400, max_position_embeddings=32)
    other.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"model\.checkpoint: expected all weights of a RobertaFor.*without \d+"):
        trained_model(str(folder), dense_config(replace(TINY, checkpoint=str(folder)), 300, 0, ("a", "b")))
    about.save_pretrained(folder)
    wide = {name: torch.zeros(*(2 * n for n in value.shape)) for name, value in whole.items()}
    for tensors, said in (
        ({name: value for name, value in whole.items() if "layer.1" not in name}, r"without \d+ of them, such as bert"),
        (wide, "or with other shapes: are they of another architecture"),
    ):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=said):
            trained_model(str(folder), about)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="expected a folder that save_pretrained of transformers wrote, got"):
        trained_model(str(folder), about)
    with pytest.raises(ConfigError, match=r"model\.checkpoint: expected a folder with a config\.json of transformers"):
        dense_config(replace(TINY, checkpoint=str(tmp_path / "no" / "where")), 300, 0, ("a", "b"))


def test_compressed_weights_are_no_checkpoint_to_start_from(config: ClassifyConfig, tmp_path: Path) -> None:
    config = steps(config, 1)
    classify.run(config)
    task = task_of(config)
    task.model.save_pretrained(tmp_path / "compressed")  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"expected dense weights, got compressed ones in .*--dense"):
        task_of(from_checkpoint(config, tmp_path / "compressed"))
