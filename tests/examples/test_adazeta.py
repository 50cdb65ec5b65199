"""The AdaZeta example: each method trains what it says, repeats to the bit, takes the memory that it is for, and says
what is wrong with its input."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertModel, GPT2Config, GPT2Model

from comera.adapters import load_adapters_
from comera.errors import ConfigError
from comera.recipes.bert import ModelConfig

from ..helpers.fresh_python import run_script
from ..helpers.scripts import load_script

SCRIPT = Path(__file__).parents[2] / "examples" / "adazeta.py"
TINY = {"hidden": 32, "layers": 1, "vocab": 400, "pretrain_steps": 2, "steps": 2, "zeroth_steps": 2, "batch": 8}
TINY |= {"epochs": 2, "alpha": 3.0}  # 1 query, then 3


example = load_script(SCRIPT)
METHODS = list(example.RATES)


def options(out: Path, *others: str, **changed: Any) -> list[str]:
    given = TINY | {"out": out} | changed
    return [*(f"--{name.replace('_', '-')}={value}" for name, value in given.items()), *others]


def results(out: Path) -> dict[str, dict[str, Any]]:
    """The row of each method."""
    return {row["method"]: row for row in json.loads((out / "results.json").read_text())}


def trainer(method: str, out: Path, **changed: Any) -> tuple[Any, Any]:
    """A trainer, and the texts."""
    settings = example.Settings(**(TINY | {"out": str(out)} | changed))
    data = example.prepared(settings)
    return example.Trainer(method, 1e-2, example.encoder_folder(data, settings), data, settings), data


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """What is compared with a run of the script computes as the script does: sums differ with the threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two steps of all methods, at two rates, with warnings as errors."""
    out = tmp_path_factory.mktemp("adazeta")
    done = run_script(SCRIPT, *options(out, "--rates", "1e-2", "1e-1"))
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_every_method_has_a_row(first: tuple[Path, str]) -> None:
    out, printed = first
    rows = results(out)
    assert list(rows) == ["untrained", *METHODS]
    header, *table = printed.splitlines()[-len(rows) - 1 :]
    assert header.split() == list(example.COLUMNS)
    assert [line.split()[0] for line in table] == list(rows)
    assert float(table[-1].split()[-1]) == pytest.approx(rows["mezo"]["memory"], rel=1e-3)
    assert "figures say that it runs, and little else" in printed
    for method in METHODS:
        assert rows[method]["valid"] == max(rows[method]["tried"].values())
        assert set(rows[method]["tried"]) == {"0.01", "0.1"}


def test_passes_are_two_a_query_and_the_same_for_all_that_estimate(first: tuple[Path, str]) -> None:
    rows = results(first[0])
    taken = {method: (rows[method]["steps"], rows[method]["passes"]) for method in METHODS}
    assert taken == {"head": (2, 2), "first-order": (2, 2), "adazeta": (2, 8), "mezo-tt": (4, 8), "mezo": (4, 8)}


def test_gains_are_shares_of_first_orders(tmp_path: Path) -> None:
    names = ("untrained", "first-order", "adazeta")
    rows = [{"method": name, "valid": valid, "dev": 0.5} for name, valid in zip(names, (0.5, 0.9, 0.8), strict=True)]
    example.write(rows, tmp_path)
    found = results(tmp_path)
    assert [found[name].get("gain_valid") for name in names] == pytest.approx([0.0, 1.0, 0.75])
    assert "gain_dev" not in found["adazeta"]  # first-order gained nothing


@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_trains(method: str, first: tuple[Path, str]) -> None:
    out, _ = first
    made, data = trainer(method, out)
    before = {name: value.clone() for name, value in made.model.named_parameters()}
    assert made.model.accuracy(data.dev) == results(out)["untrained"]["valid"]  # adapters start at zero
    for step in range(2):
        made.step(data.train_batch(step, 8, 0))
    moved = {name for name, value in made.model.named_parameters() if not torch.equal(value, before[name])}
    heads, all_ = {"head.weight", "head.bias"}, set(before)
    adapters = {name for name in all_ if ".adapter." in name}
    assert moved == {"head": heads, "mezo": all_}.get(method, heads | adapters)
    assert len(adapters) == (0 if method in ("head", "mezo") else 2 * (4 + 3))  # query and value: cores and gates
    assert results(out)[method]["trained"] == sum(before[name].numel() for name in moved)


def test_the_steps_of_adazeta_are_those_of_its_estimates(first: tuple[Path, str]) -> None:
    made, data = trainer("adazeta", first[0])
    other, _ = trainer("adazeta", first[0])
    start = {name: value.clone() for name, value in other.model.named_parameters()}
    for step, queries in enumerate((1, 3)):
        batch = data.train_batch(step, 8, 0)
        made.step(batch)
        estimator = other.estimator
        estimator.queries = queries
        estimator.estimate(lambda batch=batch: torch.nn.functional.cross_entropy(other.model(batch), batch.labels))
        for group in other.optimizer.param_groups:
            assert group["lr"] > 0
        other.optimizer.step()
        other.decay.step()
    for (name, value), expected in zip(made.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(value, expected), name
    assert any(not torch.equal(value, start[name]) for name, value in made.model.named_parameters())


def test_a_second_run_gives_the_same_figures_and_takes_the_encoder(
    first: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, printed = first
    shutil.copytree(out / "encoder", tmp_path / "encoder")
    example.main(options(tmp_path, "--rates", "1e-2", "1e-1"))
    assert results(tmp_path) == results(out)
    assert "encoder: step 0" in printed
    assert "encoder: step" not in capsys.readouterr().out
    for method in ("first-order", "adazeta", "mezo-tt"):
        weights = Path(f"adapters-{method}", "adapter_model.safetensors")
        one, other = load_file(out / weights), load_file(tmp_path / weights)
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_encoder_is_the_same_when_it_is_trained_again(first: tuple[Path, str], tmp_path: Path) -> None:
    example.encoder_folder(example.prepared(settings := example.Settings(**TINY, out=str(tmp_path))), settings)
    one, other = (load_file(each / "encoder" / "model.safetensors") for each in (first[0], tmp_path))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_of_adazeta_takes_hardly_more_memory_than_inference(first: tuple[Path, str]) -> None:
    rows = results(first[0])
    for method in ("adazeta", "mezo-tt", "head"):
        assert 1 <= rows[method]["memory"] <= 1.2, method
    assert rows["first-order"]["memory"] > 1.5
    assert rows["adazeta"]["inference_mb"] == rows["first-order"]["inference_mb"]


def test_trained_adapters_load_into_the_model(first: tuple[Path, str]) -> None:
    out, _ = first
    made, data = trainer("head", out)
    report = load_adapters_(made.model, out / "adapters-adazeta")
    assert len(report.rows) == 2
    assert made.model.accuracy(data.test) == results(out)["adazeta"]["dev"]


def test_a_given_encoder(first: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = first
    given = tmp_path / "given"
    shutil.copytree(out / "encoder", given)
    settings = example.Settings(**TINY, out=str(out))
    for name, text in example.prepared(settings).tokenizer.files(64).items():
        (given / name).write_text(text, "utf-8")
    example.main(options(tmp_path / "out", "--methods", "head", "--rates", "1e-2", encoder=given))
    assert not (tmp_path / "out" / "encoder").exists()
    assert results(tmp_path / "out")["head"]["tried"].keys() == {"0.01"}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Own texts of two labels, in their three files."""
    for part in ("train", "valid", "dev"):
        lines = [f"it is {word} {k}\t{label}" for k in range(8) for word, label in (("good", "1"), ("bad", "0"))]
        write(tmp_path / f"sst2_{part}.tsv.gz", "\n".join(["sentence\tlabel", *lines]))
    return tmp_path


def write(file: Path, text: str) -> None:
    file.write_bytes(gzip.compress(text.encode()))


def test_own_texts(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(options(tmp_path / "out", "--methods", "adazeta", "--rates", "1e-2", data=texts))
    assert "generated" not in capsys.readouterr().out
    assert results(tmp_path / "out")["adazeta"]["dev"] in {k / 16 for k in range(17)}


def refused(out: Path, *others: str, **changed: Any) -> str:
    """The one line that a run ends with."""
    with pytest.raises(SystemExit) as ended:
        example.main(options(out, *others, **changed))
    message = str(ended.value)
    assert message.startswith("adazeta: ")
    assert "\n" not in message
    return message.removeprefix("adazeta: ")


def test_missing_files_and_columns(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(texts / "sst2_dev.tsv.gz", "text\tlabel\ngood\t1\n")
    message = refused(out, data=texts)
    assert "sst2_dev.tsv.gz: expected the columns sentence, label" in message
    assert "got text, label" in message
    (texts / "sst2_dev.tsv.gz").unlink()
    assert refused(out, data=texts) == f"--data: expected sst2_dev.tsv.gz in {texts}, found none"
    write(texts / "sst2_dev.tsv.gz", "sentence\tlabel\ngood\tsplendid\n")
    assert "got 'splendid'" in refused(out, data=texts)


def test_another_encoder(first: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(first[0], out)
    assert "expected an encoder of these options, got hidden 32, not 64" in refused(out, hidden=64)
    other = tmp_path / "other"
    assert refused(out, encoder=other).startswith("--encoder: expected a BERT with its config.json, found none")
    other.mkdir()
    (other / "config.json").write_text("{}")
    assert "expected tokenizer.json, vocab.txt, a folder with one" in refused(out, encoder=other)
    tokenizer = example.prepared(example.Settings(**TINY, out=str(out))).tokenizer
    for name, text in tokenizer.files(64).items():
        (other / name).write_text(text, "utf-8")
    assert f"{other}: expected a BERT that transformers reads, found none" in refused(out, encoder=other)
    GPT2Model(GPT2Config(vocab_size=400, n_embd=16, n_layer=1, n_head=1)).save_pretrained(other)
    assert f"{other}: expected" in refused(out, encoder=other)
    BertModel(ModelConfig(32, 1, 1, 64).bert(100)).save_pretrained(other)
    assert refused(out, encoder=other).endswith(f"with weights for {tokenizer.size} tokens, got a table of 100")


@pytest.mark.parametrize("name", ["steps", "zeroth_steps", "pretrain_steps", "batch", "epochs"])
def test_nothing_to_do(name: str) -> None:
    option = name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"^--{option}: expected at least 1, got 0$"):
        example.Settings(**(TINY | {name: 0}))


def test_zero_steps_are_one_line(tmp_path: Path) -> None:
    assert refused(tmp_path, steps=0) == "--steps: expected at least 1, got 0"
    assert refused(tmp_path, alpha=-1) == "alpha must be a number > 0, got -1.0"
    assert "targets: expected a pattern that matches linear layers" in refused(
        tmp_path, "--methods", "adazeta", targets="q"
    )
