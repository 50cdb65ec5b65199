"""The MNLI recipe end to end, small: its model, its batches, the early and late stages, the dense baseline."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import BertForSequenceClassification

from comera.baselines import LINEAR_METHODS, BaselineConfig, Method, Narrow
from comera.cli import options
from comera.cli.options import saved_config
from comera.errors import ConfigError, DataError
from comera.export.runs import export_run
from comera.files import write_sums
from comera.nn.size import model_size
from comera.rank.objective import EarlyStage
from comera.recipes import base as stages
from comera.recipes.base import runs, step_flops
from comera.recipes.classify import mnli
from comera.recipes.classify.data import MNLI, ClassifyDataConfig, PreparedExamples, prepare
from comera.recipes.classify.model import CompressConfig, EncoderConfig
from comera.recipes.classify.recipe import ClassifyConfig, ClassifyTask, meta_step, untrained
from comera.recipes.classify.task import example_loss, scores
from comera.recipes.data.prepared import ExampleBatch
from comera.recipes.trained import open_trained
from comera.trainer.checkpoint import find_checkpoint
from comera.trainer.config import TrainConfig
from comera.trainer.metrics import Summary

from ..helpers.recipe_runs import assert_goes_on_only_as_begun
from ..helpers.run_folders import history, records

TINY = EncoderConfig(hidden=32, layers=1, heads=2, ffn=64, dropout=0.1, max_positions=32)
RANKS = CompressConfig(ratio=None, format="tt", order=4, rank=6, embedding_order=2, embedding_rank=6)
ANSWERS = {"certainly": "entailment", "perhaps": "neutral", "never": "contradiction"}
PAIRS = 60
BATCH = 8
EPOCH = 8  # steps: the last batch has four pairs


def rows(count: int) -> Iterator[dict[str, str]]:
    """Sentence pairs of several lengths; one word determines the label, and labels alternate."""
    names = product(("a man", "the old woman", "a dog", "one of the children"), ("eats", "sees the red house", "runs"))
    for number, ((who, does), (word, label)) in enumerate(product(list(names) * 2, ANSWERS.items())):
        if number == count:
            return
        yield {"premise": f"{who} {does}", "hypothesis": f"{word} {who} sleeps", "label": label}


@pytest.fixture(scope="module")
def data_config(tmp_path_factory: pytest.TempPathFactory) -> ClassifyDataConfig:
    folder = tmp_path_factory.mktemp("mnli")
    pairs = list(rows(PAIRS))
    blank = {"premise": "a man eats", "hypothesis": "never", "label": "-"}
    for name, part in (("train", [*pairs, blank]), ("dev_matched", pairs[:22])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    words = sorted({word for row in pairs for name in ("premise", "hypothesis") for word in row[name].split()})
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    return replace(MNLI, path=str(folder), max_length=24, cache=str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def data(data_config: ClassifyDataConfig) -> PreparedExamples:
    return prepare(data_config, quiet=True)


@pytest.fixture
def config(data_config: ClassifyDataConfig, tmp_path: Path) -> ClassifyConfig:
    train = TrainConfig(
        epochs=1, batch_size=BATCH, lr=1e-3, early=EarlyStage(0.1), prune_every=2, progress=False, device="cpu"
    )
    return ClassifyConfig(
        out=str(tmp_path / "run"),
        late_targets=(0.8, 0.5),
        late_epochs=0.5,
        data=data_config,
        model=TINY,
        compress=RANKS,
        train=train,
    )


def same(one: ExampleBatch, two: ExampleBatch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("method", ["comera", "dense"])
def test_padding_changes_nothing_and_the_mask_is_the_models_own(
    config: ClassifyConfig, data: PreparedExamples, method: Method
) -> None:
    model = untrained(replace(config, method=method), data.vocab_size)[0].double().eval()
    batch = data.train_batch(0, BATCH, seed=0)
    own = model(
        input_ids=batch.input_ids,
        token_type_ids=batch.token_type_ids,
        attention_mask=batch.attention_mask.long(),
        labels=batch.labels,
    )
    torch.testing.assert_close(scores(model, batch), own.logits, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(example_loss(model, batch), own.loss, rtol=1e-10, atol=0)
    padded = ExampleBatch(*(torch.nn.functional.pad(part, (0, 5)) for part in batch[:3]), batch.labels)
    torch.testing.assert_close(scores(model, padded), own.logits, rtol=1e-10, atol=1e-12)


def test_all_parameters_are_trained(config: ClassifyConfig, data: PreparedExamples) -> None:
    model, _ = untrained(config, data.vocab_size)
    example_loss(model, data.train_batch(0, BATCH, seed=0)).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert without <= {"bert.encoder.layer.0.attention.self.key.bias"}  # softmax cancels it


def test_evaluation_is_the_share_of_right_answers_over_all_held_out_pairs(
    config: ClassifyConfig, data: PreparedExamples
) -> None:
    task = ClassifyTask(config, data)
    task.model.eval()
    batches = list(task.eval_batches())
    assert sum(len(batch.labels) for batch in batches) == data.dev_size == 22
    means, weights, rows = zip(*(task.evaluate(task.model, batch) for batch in batches), strict=True)
    assert list(weights) == [len(batch.labels) for batch in batches]
    assert torch.equal(torch.cat(rows)[:, 1], torch.cat([batch.labels for batch in batches]))
    right = sum(round(float(mean["accuracy"]) * weight) for mean, weight in zip(means, weights, strict=True))
    answers = torch.cat([scores(task.model, batch).argmax(-1) == batch.labels for batch in batches])
    assert right == int(answers.sum())
    for batch, mean in zip(batches, means, strict=True):
        torch.testing.assert_close(mean["loss"], example_loss(task.model, batch))


def test_the_first_held_out_batches_are_not_the_shortest(config: ClassifyConfig, data: PreparedExamples) -> None:
    tasks = [
        ClassifyTask(replace(config, method=m, train=replace(config.train, seed=s)), data)
        for m, s in (("comera", 0), ("dense", 7))
    ]
    one, two = (list(task.eval_batches()) for task in tasks)
    assert all(map(same, one, two))
    lengths = [float(batch.attention_mask.sum(1).float().mean()) for batch in one]
    assert lengths != sorted(lengths)


def test_early_late_and_dense_runs_meet_the_same_batches(config: ClassifyConfig, data: PreparedExamples) -> None:
    early, late = ClassifyTask(config, data), ClassifyTask(config, data, first=EPOCH)
    dense = ClassifyTask(replace(config, method="dense"), data)
    assert early.steps_per_epoch == EPOCH
    for step in range(EPOCH):
        assert same(early.train_batch(step, 0, 0, 1), dense.train_batch(step, 0, 0, 1))
        assert same(late.train_batch(step, 0, 0, 1), dense.train_batch(EPOCH + step, 0, 0, 1))
        assert not same(early.train_batch(step, 0, 0, 1), late.train_batch(step, 0, 0, 1))


def test_micro_batches_of_all_processes_are_one_sequence(config: ClassifyConfig, data: PreparedExamples) -> None:
    task = ClassifyTask(replace(config, train=replace(config.train, accumulation=3)), data, first=2)
    order = [(step, micro, rank) for step in range(2) for micro in range(3) for rank in range(2)]
    for index, (step, micro, rank) in enumerate(order, start=2 * 3 * 2):
        assert same(task.train_batch(step, micro, rank, 2), data.train_batch(index, BATCH, seed=0))
    assert task.steps_per_epoch == 3  # eight batches, three a step


def test_a_narrow_model_costs_as_much_as_the_compressed_one_keeps_its_width_and_leaves(
    config: ClassifyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = replace(config.model, hidden=128, heads=4, ffn=512)
    config = replace(config, method="narrow", model=wide, train=replace(config.train, steps=2))
    summary = mnli.run(config)
    trained = open_trained(config.folder, saved_config)
    width = trained.model.config.hidden_size
    assert f"narrow: dense and {width} wide instead of 128" in capsys.readouterr().err
    assert 8 < width < 128
    vocab_size = trained.model.config.vocab_size

    def flops(width: int) -> int:
        return step_flops(replace(config, method="dense", model=wide.narrowed(width)), meta_step, vocab_size)

    assert flops(width) <= step_flops(replace(config, method="comera"), meta_step, vocab_size) < flops(width + 8)
    assert summary.ratio is not None
    assert summary.ratio > 1
    assert export_run(trained, "safetensors", tmp_path / "dense", dense=True).difference < 1e-4
    assert BertForSequenceClassification.from_pretrained(tmp_path / "dense").config.hidden_size == width
    (config.folder / "summary.json").unlink()
    with pytest.raises(ConfigError, match=rf"baselines\.narrow\.hidden: expected {width}, got 8"):
        mnli.run(replace(config, baselines=BaselineConfig(narrow=Narrow(hidden=8))), resume=True)


def test_a_run_from_before_formats_had_names_resumes(config: ClassifyConfig) -> None:
    config = replace(config, late_targets=(), train=replace(config.train, steps=2))
    summary = mnli.run(config)
    folder = runs(config)["early"]
    file = find_checkpoint(folder) / "trainer.json"
    stored = json.loads(file.read_text())
    for name in ("format", "blocks"):
        del stored["identity"][f"compress.{name}"]
    file.write_text(json.dumps(stored))
    write_sums(file.parent)
    (folder / "summary.json").unlink()
    assert mnli.run(config, resume=True).held_out_loss == summary.held_out_loss


def test_late_stages_start_from_the_early_one_and_meet_their_targets(config: ClassifyConfig) -> None:
    last = mnli.run(config)
    folders = runs(config)
    assert list(folders) == ["early", "late 0.8", "late 0.5"]
    summaries = {name: Summary.read(folder / "summary.json") for name, folder in folders.items()}
    assert last == summaries["late 0.5"]
    early = summaries["early"]
    assert early is not None
    assert early.steps == EPOCH
    assert [row["epoch"] for row in records(folders["early"], "eval")] == [1.0]
    for target in (0.8, 0.5):
        folder, summary = folders[f"late {target}"], summaries[f"late {target}"]
        assert summary is not None
        assert summary.steps == EPOCH // 2
        assert summary.tensorized <= target * early.tensorized
        (stage,) = records(folder, "stage")
        assert (stage["stage"], stage["step"], stage["size"]) == ("late", 0, early.tensorized)
        assert stage["target_size"] == int(target * early.tensorized)
        assert records(folder, "size")[0]["tensorized"] == early.tensorized
    for folder in (config.folder, *folders.values()):
        assert yaml.safe_load((folder / "config.yaml").read_text())["out"] == str(config.folder)


def test_the_dense_baseline_is_as_long_as_the_early_stage_and_one_late_stage(config: ClassifyConfig) -> None:
    dense = replace(config, method="dense")
    assert runs(dense) == {"dense": dense.folder}
    summary = mnli.run(dense)
    assert (summary.recipe, summary.method) == ("mnli", "dense")
    assert (summary.steps, summary.tensorized) == (EPOCH + EPOCH // 2, 0)
    assert summary.examples == PAIRS + EPOCH // 2 * BATCH
    assert [row["epoch"] for row in records(dense.folder, "eval")] == [1.0, 1.5]


def test_a_protocol_that_is_killed_between_its_runs_goes_on_as_if_nothing_had_happened(
    config: ClassifyConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    straight = mnli.run(config)
    killed = replace(config, out=str(tmp_path / "killed"))
    fit = stages.fit

    def fit_early(task: Any, train: Any, out: Path, **others: Any) -> Summary:
        if out.name != "early":
            raise KeyboardInterrupt
        return fit(task, train, out, **others)

    monkeypatch.setattr(stages, "fit", fit_early)
    with pytest.raises(KeyboardInterrupt):
        mnli.run(killed)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"expected a folder without a run, got .*killed with .*early"):
        mnli.run(killed)
    early = (killed.folder / "early" / "metrics.jsonl").stat()
    resumed = mnli.run(killed, resume=True)
    assert (killed.folder / "early" / "metrics.jsonl").stat() == early  # not touched again
    assert (resumed.steps, resumed.held_out_loss) == (straight.steps, straight.held_out_loss)
    for name, folder in runs(config).items():
        assert history(runs(killed)[name]) == history(folder)


def test_an_interruption_ends_the_protocol_there(config: ClassifyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = stages.fit
    begun: list[tuple[Any, ...]] = []

    def interrupted(task: Any, train: TrainConfig, out: Path, **others: Any) -> Summary:
        begun.append((out.name, train.epochs, train.late.target_size, train.late.steps))
        summary = fit(task, train, out, **others)
        return replace(summary, stopped="interrupted") if out.name == "late-0.8" else summary

    monkeypatch.setattr(stages, "fit", interrupted)
    assert not mnli.run(config).finished
    # the size falls over the first half of a late stage, of four steps here
    assert begun == [("early", 1, None, None), ("late-0.8", 0.5, 0.8, 2)]


def test_a_run_does_not_resume_on_other_data_another_model_or_other_batches(config: ClassifyConfig) -> None:
    config = replace(config, late_targets=(0.5,), late_epochs=0.25)
    mnli.run(config)
    late = config.folder / "late-0.5"
    (late / "summary.json").unlink()  # as if it had been killed before it ended
    changes = {
        "data.prepared": {"data": replace(config.data, max_length=20)},
        "model.dropout": {"model": replace(config.model, dropout=0.0)},
        "compress.rank": {"compress": replace(config.compress, rank=5)},
        "epochs": {"late_epochs": 0.5},
    }
    assert_goes_on_only_as_begun(mnli.run, config, changes)


def test_training_learns_to_answer(config: ClassifyConfig, capsys: pytest.CaptureFixture[str]) -> None:
    train = replace(config.train, epochs=20, lr=5e-3, early=EarlyStage(0.0), eval_every=0)
    ranks = replace(RANKS, order=2, rank=16, embedding_rank=16)
    model = replace(TINY, dropout=0.0)
    summary = mnli.run(replace(config, late_targets=(), model=model, compress=ranks, train=train))
    shown = capsys.readouterr().err
    assert f"skipped 1 rows of {config.data.path}/train.jsonl: no label (the first: " in shown
    assert "mnli: always answering 'entailment' is correct for 0.3636 of the 22 held-out examples" in shown
    assert summary.metrics["accuracy"] > 0.9


def test_estimate_shows_all_methods_without_data(config: ClassifyConfig) -> None:
    estimates = mnli.estimate(replace(mnli.preset(preset="mnli"), data=replace(MNLI, path="on/the-hub")))
    assert set(estimates) == set(LINEAR_METHODS)
    assert estimates["dense"].weights / estimates["comera"].weights > 40
    assert estimates["dense"].flops / estimates["comera"].flops > 3
    model, _ = untrained(replace(config, method="dense"), len(Path(config.data.path, "vocab.txt").read_text().split()))
    assert mnli.estimate(config)["dense"].gradients == sum(p.numel() * 4 for p in model.parameters())
    with pytest.raises(DataError, match="WordPiece vocabulary"):
        mnli.estimate(replace(config, data=replace(config.data, tokenizer="nowhere.txt")))


def test_the_command_line_takes_presets_lists_and_nested_fields() -> None:
    for argv in (
        [],
        ["--method", "dense"],
        ["--preset", "published"],
        ["--preset=short"],
        ["--preset=small", "--method=dense"],
    ):
        words = dict(zip(*[iter(" ".join(argv).replace("=", " ").replace("--", "").split())] * 2, strict=True))
        named = {"small": "mnli-small", "short": "mnli-short", "published": "mnli-published", "tuned": "mnli"}
        words |= {"preset": named[words["preset"]]} if "preset" in words else {}
        assert options.parse("train", "mnli", argv)[1] == mnli.preset(**words)  # type: ignore[arg-type]
        same = [f"--{name}={value}" for name, value in ({"preset": "mnli-small"} | words).items()]
        assert options.parse("train", "classify", same)[1] == options.parse("train", "mnli", argv)[1]
    argv = ["--preset", "published", "--late_targets", "[0.5, 0.1]", "--late_epochs", "0.5"]
    argv += ["--train.late.loss_weight", "0.2", "--train.core_lr", "3e-4", "--model.layers", "2", "--out", "here"]
    _, config, _ = options.parse("train", "mnli", argv)
    assert (config.late_targets, config.late_epochs, config.model.layers) == ((0.5, 0.1), 0.5, 2)
    assert (config.train.late.loss_weight, config.train.late.shrink) == (0.2, "surrogate")
    assert (config.train.core_lr, config.train.lr) == (3e-4, 5e-5)
    assert runs(config) == {
        name: Path("here", path)
        for name, path in (("early", "early"), ("late 0.5", "late-0.5"), ("late 0.1", "late-0.1"))
    }


def test_the_names_of_before_mean_the_same(tmp_path: Path) -> None:
    old = {
        "preset": "short",
        "method": "dense",
        "data": {"path": "pairs.csv", "premise_field": "q", "label_field": "good", "vocab": "words.txt"},
        "compress": {"format": "btt", "order": 6, "rank": 12, "blocks": [4, 8], "embedding_order": 4},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    argv = ["--config", str(tmp_path / "config.yaml"), "--data.hypothesis_field=a", "--data.held_out_path", "held.csv"]
    _, config, _ = options.parse("train", "mnli", argv)
    assert config.data.named == ("q", "a", "good")
    assert (config.data.tokenizer, config.data.valid, config.data.max_examples) == ("words.txt", "held.csv", 20_000)
    assert (config.preset, config.method, config.folder) == ("mnli-short", "dense", Path("runs/mnli-dense"))
    assert (config.compress.rank, config.compress.blocks, config.compress.ratio) == (12, (4, 8), None)
    with pytest.raises(ConfigError, match=r"unknown field --data\.premise_field"):
        options.parse("train", "classify", ["--data.premise_field", "q"])


def test_a_run_and_prepared_data_of_before_are_understood(
    config: ClassifyConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, late_targets=(), train=replace(config.train, steps=1))
    config = replace(config, data=replace(config.data, cache=str(config.folder.parent / "cache")))
    folder = prepare(config.data).folder
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("texts", "label", "guessed", "names", "long_words", "roles"):  # what mnli did not note
        del manifest[name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_sums(folder)
    capsys.readouterr()
    mnli.run(config)
    assert "mnli: columns: text 'premise', text 'hypothesis', label 'label'" in capsys.readouterr().err
    assert json.loads((folder / "manifest.json").read_text()) == manifest  # it was not made anew
    known = open_trained(config.folder / "early", saved_config).model
    (config.folder / "early" / "config.json").unlink()  # which mnli did not write
    again = open_trained(config.folder / "early", saved_config).model
    assert again.config.label2id == known.config.label2id
    for one, two in zip(known.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_command_line_resumes_with_the_configuration_of_the_runs(config: ClassifyConfig) -> None:
    config = replace(config, late_targets=(), train=replace(config.train, steps=1))
    mnli.run(config)
    _, resumed, resume = options.parse("train", "mnli", ["--resume", "--out", str(config.folder)])
    assert resume
    assert resumed == config


# --- the model at full size, on the meta device -----------------------------------------------------------------------


def test_the_full_model_has_the_published_shapes_and_sizes() -> None:
    with torch.device("meta"):
        dense, _ = untrained(mnli.preset("dense", "mnli"), 30_522)
        model, report = untrained(mnli.preset(preset="mnli"), 30_522)
    assert report is not None
    shapes = {row.name: str(row.spec) for row in report.rows if row.spec}
    square = "TT 12·8·8 / 8·8·12 ranks 12-30-30-30-12"
    expected = {
        "bert.embeddings.word_embeddings": "TTM 16·20·10·10 × 4·4·8·6 ranks 30-30-30",
        "bert.pooler.dense": square,
    }
    for k in range(6):
        layer = f"bert.encoder.layer.{k}"
        names = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
        expected |= {f"{layer}.{name}": square for name in names}
        expected[f"{layer}.intermediate.dense"] = "TT 12·8·8 / 12·16·16 ranks 12-30-30-30-16"
        expected[f"{layer}.output.dense"] = "TT 16·16·12 / 8·8·12 ranks 16-30-30-30-12"
    assert shapes == expected
    left = {row.name for row in report.rows if row.layer and row.spec is None}
    assert left == {"bert.embeddings.position_embeddings", "bert.embeddings.token_type_embeddings", "classifier"}

    size, original = model_size(model, dense_total=report.dense_total), model_size(dense)
    assert report.dense_total == original.total
    megabytes = [4 * n / 2**20 for n in (original.total, size.dense_tensorized, size.total, size.tensorized)]
    assert megabytes == pytest.approx([255.42, 253.67, 5.61, 3.86], abs=0.005)  # published: 256, 253


def test_the_full_model_has_the_published_settings() -> None:
    config = mnli.preset("comera", "mnli-published")
    with torch.device("meta"):
        bert = untrained(config, 30_522)[0].config
    assert (bert.num_hidden_layers, bert.hidden_size, bert.num_attention_heads, bert.intermediate_size) == (
        6,
        768,
        12,
        3072,
    )
    assert (bert.max_position_embeddings, bert.type_vocab_size, bert.num_labels) == (512, 2, 3)
    assert (bert.hidden_act, bert.hidden_dropout_prob, bert.attention_probs_dropout_prob) == ("gelu", 0.1, 0.1)
    train = config.train
    assert (train.core_lr, train.table_lr, train.lr, train.rank_lr) == (1e-4, None, 5e-5, 1e-3)
    assert train.weight_decay == 0
    assert 32 <= train.batch_size <= 128
    assert (train.late.shrink, config.late_targets, config.data.max_length) == ("surrogate", (0.8, 0.5, 0.2), 128)


def test_other_widths_and_vocabularies_get_balanced_modes() -> None:
    config = replace(mnli.preset(preset="mnli"), model=EncoderConfig(hidden=512, layers=1, heads=8, ffn=2048))
    with torch.device("meta"):
        _, report = untrained(config, 30_522)
        _, other = untrained(replace(mnli.preset(preset="mnli"), model=EncoderConfig(layers=1)), 8_000)
    assert report is not None
    assert other is not None
    for row in [row for row in report.rows if row.spec] + [row for row in other.rows if row.spec]:
        assert row.spec is not None
        assert row.spec.order == (4 if row.after == "TTMEmbedding" else 6)
    assert "8·8·8 / 8·8·8" in str({row.name: row.spec for row in report.rows}["bert.pooler.dense"])
