"""`comera generate`: text streams from runs, checkpoints and exports, and every mistake is one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from comera.cli.main import main
from comera.cli.options import saved_config
from comera.errors import ConfigError
from comera.recipes.lm.generate import Sampling, _Stream, open_writer
from comera.recipes.lm.tokenizer import byte_tokenizer, token_bytes

TINY = {
    "data.path": Path(json.__file__).parent,
    "data.vocab_size": 300,
    "data.block_size": 24,
    "data.held_out": 0.2,
    "model.hidden": 32,
    "model.layers": 1,
    "model.heads": 2,
    "compress.rank": 4,
    "compress.head_rank": 4,
    "compress.ngrams": "null",  # which have no dense form to export
    "train.steps": 2,
    "train.batch_size": 4,
    "train.eval_batches": 1,
    "train.progress": "false",
    "train.device": "cpu",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm") / "run"
    options = {**TINY, "data.cache": folder.parent / "cache", "out": folder}
    assert main(["train", "lm", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]) == 0
    return folder


def write(capfd: pytest.CaptureFixture[str], *argv: object) -> str:
    capfd.readouterr()
    assert main(["generate", *map(str, argv)]) == 0
    return capfd.readouterr().out


def test_a_run_its_checkpoint_and_its_exports_write_the_same(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("def ", "--max_new_tokens", 12, "--seed", 3)
    text = write(capfd, run, *options)
    assert text.startswith("def ")
    assert text.endswith("\n")
    assert len(text) > len("def \n")
    places = [next((run / "checkpoints").glob("step-*"))]
    for target in (["safetensors"], ["safetensors", "--dense"]):
        places.append(tmp_path / "-".join(target))
        assert main(["export", str(run), "--to", *target, "--out", str(places[-1])]) == 0
        assert Tokenizer.from_file(str(places[-1] / "tokenizer.json")).get_vocab_size() == 300
    assert [write(capfd, place, *options) for place in places] == [text] * 3
    assert write(capfd, run, "def ", "--max_new_tokens", 12, "--seed", 4) != text


def test_temperature_0_takes_the_likeliest_token_with_and_without_a_cache(run: Path) -> None:
    writer = open_writer(run, saved_config)
    pieces: list[str] = []
    writer.write("import é", Sampling(max_new_tokens=8, temperature=0), pieces.append)
    ids = [0, *writer.tokenizer.encode("import é").ids]
    for _ in range(8):
        ids.append(int(writer.model(torch.tensor([ids])).logits[0, -1].argmax()))
    table, new = token_bytes(writer.tokenizer), ids[-8:]
    new = new[: new.index(0)] if 0 in new else new
    assert "".join(pieces) == b"".join(table[id] for id in new).decode("utf-8", "replace")


def test_text_ends_with_the_context_and_says_so(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writer = open_writer(run, saved_config)
    prompt = "x" * 16
    used = 1 + len(writer.tokenizer.encode(prompt).ids)
    with torch.no_grad():  # no end of a document
        writer.model.get_output_embeddings().register_forward_hook(
            lambda layer, args, logits: logits.index_fill(-1, torch.tensor([0]), -1e9)
        )
    assert "full: stopped after" in writer.write(prompt, Sampling(max_new_tokens=100), print)
    assert writer.write(prompt, Sampling(max_new_tokens=24 - used), print) == ""
    too_long = "x = 1\n" * 30
    beyond = 1 + len(writer.tokenizer.encode(too_long).ids) - 24 + 1
    with pytest.raises(ConfigError, match=rf"context of 24 tokens, got one that is {beyond} too long"):
        writer.write(too_long, Sampling(), print)


def test_the_document_can_end_before_the_last_token(run: Path) -> None:
    writer = open_writer(run, saved_config)
    writer.model.get_output_embeddings().register_forward_hook(
        lambda layer, args, logits: logits.index_fill(-1, torch.tensor([0]), 1e9)
    )
    pieces: list[str] = []
    assert writer.write("def ", Sampling(), pieces.append) == ""
    assert pieces == []


def test_a_character_of_several_bytes_appears_once_it_is_whole() -> None:
    pieces: list[str] = []
    stream = _Stream(token_bytes(byte_tokenizer()), 0, pieces.append)
    stream.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for byte in "aé🙂".encode() + b"\xff\xf0\x9f":
        stream.put(torch.tensor([byte]))
    stream.end()
    assert pieces == ["a", "é", "🙂", "\ufffd", "\ufffd"]
    assert (stream.count, stream.ended) == (10, False)
    stream.put(torch.tensor([0]))
    assert stream.ended


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["", "--seed", "1"], "expected a prompt, the beginning of a text, got an empty one"),
        (["a", "--temperature", "-1"], "temperature must be a number >= 0; 0 takes the likeliest token, got -1.0"),
        (["a", "--temperature", "nan"], "temperature must be a number >= 0"),
        (["a", "--top_p", "0"], "top_p must be a probability, > 0 and <= 1, got 0.0"),
        (["a", "--max_new_tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (["a", "--seed", "-1"], "seed must be an integer >= 0, got -1"),
        (["\udcff"], "expected a prompt of valid UTF-8"),
        (["word " * 99], "shorten it"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert main(["generate", str(run), *argv]) == 2
    said = capfd.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_other_folders_and_damaged_ones_are_refused(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, message: str) -> None:
        capfd.readouterr()
        assert main(["generate", str(path), "def "]) == 2
        said = capfd.readouterr().err
        assert message in said
        assert said.count("\n") == 1

    refused(tmp_path, "found another folder: give one that `comera train` wrote")
    other = tmp_path / "other"
    shutil.copytree(run, other)
    byte_tokenizer().save(str(other / "tokenizer.json"))
    refused(other, "expected the tokenizer that the model was trained with, of 300 tokens, got one of 256")
    (other / "tokenizer.json").unlink()
    refused(other, "expected the run's tokenizer in")
    for name, dense in (("safetensors", []), ("dense", ["--dense"])):
        assert main(["export", str(run), "--to", "safetensors", *dense, "--out", str(tmp_path / name)]) == 0
    weights = tmp_path / "dense" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if "norm" not in name}, weights)
    refused(tmp_path / "dense", "got one that does not load")
    weights.write_bytes(b"damaged")
    refused(tmp_path / "dense", "got one that does not load")
    manifest = json.loads((tmp_path / "safetensors" / "comera.json").read_text())
    assert manifest["metadata"]["recipe"] == "lm"


def test_a_run_of_another_recipe_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fields = {name: value for name, value in TINY.items() if not name.startswith("compress")}
    options = {**fields, "data.cache": tmp_path / "cache", "out": tmp_path / "code", "model.ffn": 64, "preset": "base"}
    assert main(["train", "code-lm", *(w for name, value in options.items() for w in (f"--{name}", str(value)))]) == 0
    capfd.readouterr()
    assert main(["generate", str(tmp_path / "code"), "def "]) == 2
    assert "expected a run of lm, which writes text, got one of code-lm" in capfd.readouterr().err
