"""The classification recipe from a trained checkpoint: decomposed weights, its tokenizer, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertForMaskedLM, RobertaConfig

from comera.cli.main import main
from comera.errors import CheckpointError, ConfigError
from comera.recipes.classify import recipe as classify
from comera.recipes.classify.model import CompressConfig, dense_config, trained_model
from comera.recipes.classify.recipe import ClassifyConfig
from comera.trainer.checkpoint import checkpoints

from ..helpers.tiny_classifier import SIZES, TINY, checkpoint, steps, task_of, tiny_config


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def config(cache: Path, tmp_path: Path) -> ClassifyConfig:
    return tiny_config(cache, tmp_path / "run")


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
        (
            {name: value for name, value in whole.items() if "layer.1" not in name},
            r"without \d+ of them, such as bert",
        ),
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
