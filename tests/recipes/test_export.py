"""`comera export`: trained runs of each recipe leave in each form, and give the logits that they gave in training."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BertForMaskedLM, BertForSequenceClassification
from transformers.models.bert.modeling_bert import BertLMPredictionHead

from comera import load_pretrained
from comera.cli import options
from comera.cli.main import main
from comera.files import write_sums
from comera.nn.tensor_train import CompressedLayer
from comera.rank.objective import EarlyStage
from comera.recipes.bert import ModelConfig
from comera.recipes.classify import mnli
from comera.recipes.classify.data import MNLI
from comera.recipes.classify.data import prepare as prepare_pairs
from comera.recipes.classify.model import EncoderConfig
from comera.recipes.classify.recipe import ClassifyConfig, ClassifyTask
from comera.recipes.code_lm import recipe as code_lm
from comera.recipes.code_lm.data import CodeDataConfig
from comera.recipes.dlrm import recipe as dlrm
from comera.recipes.dlrm.criteo import CriteoConfig
from comera.recipes.dlrm.model import DLRMConfig
from comera.recipes.lm import recipe as lm
from comera.recipes.lm.data import LMDataConfig
from comera.recipes.lm.data import prepare as lm_prepare
from comera.recipes.lm.model import ModelConfig as LMModelConfig
from comera.trainer.checkpoint import find_checkpoint
from comera.trainer.config import TrainConfig

from ..helpers.without_comera import run_without_comera

TRAIN = TrainConfig(
    steps=3, batch_size=8, lr=1e-3, core_lr=1e-2, early=EarlyStage(1.0), eval_batches=1, progress=False, device="cpu"
)
DENSE = ("--to", "safetensors", "--dense")
SHAPES = ((1, 5), (5, 9), (2, 24))  # rows and tokens
BERT = ModelConfig(hidden=32, layers=1, heads=2, ffn=64, dropout=0.1, max_positions=40)
ENCODER = EncoderConfig(**vars(BERT))
TABLES = (700, 40, 1500, 400, *[7] * 22)


@dataclass
class Run:
    """A finished run; plain: its original architecture, fresh, built without this library's layers."""

    folder: Path
    model: nn.Module
    plain: Callable[[Path], nn.Module]
    inputs: Callable[..., dict[str, Tensor]]

    def logits(self, model: Callable[..., Any], rows: int, length: int = 9) -> Tensor:
        outputs = model(**self.inputs(rows, length))
        return outputs if isinstance(outputs, Tensor) else outputs["logits"]


def trained(folder: Path, task: Any, plain: Callable[[Path], nn.Module], inputs: Callable[[int], Any]) -> Run:
    model = load_pretrained(task.model, find_checkpoint(folder)).eval()
    assert any(isinstance(module, CompressedLayer) for module in model.modules())
    return Run(folder, model, plain, inputs)


def code_run(out: Path, cache: Path) -> Run:
    data = CodeDataConfig(path=str(Path(json.__file__).parent), cache=str(cache), vocab_size=400, block_size=24)
    ranks = code_lm.CompressConfig(order=4, rank=4, embedding_order=3, embedding_rank=4, head_rank=8)
    config = code_lm.CodeLMConfig(out=str(out), data=data, model=BERT, compress=ranks, train=TRAIN)
    code_lm.run(config)
    task = code_lm.CodeLMTask(config, code_lm.prepare(data, quiet=True))
    return trained(out, task, BertForMaskedLM.from_pretrained, ids_of)


def ids_of(rows: int, length: int = 9) -> dict[str, Tensor]:
    return {"input_ids": (torch.arange(length * rows) % 261).view(rows, length)}


def lm_run(out: Path, cache: Path, family: Any, ranks: lm.CompressConfig) -> Run:
    data = LMDataConfig(path=str(Path(json.__file__).parent), cache=str(cache), vocab_size=300, block_size=24)
    sizes = LMModelConfig(family=family, hidden=32, layers=1, heads=2, ffn=64)
    config = lm.LMConfig(out=str(out), data=data, model=sizes, compress=ranks, train=TRAIN)
    lm.run(config)
    task = lm.LMTask(config, lm_prepare(data, quiet=True))
    return trained(out, task, AutoModelForCausalLM.from_pretrained, ids_of)


def llama_run(out: Path, cache: Path) -> Run:
    return lm_run(out, cache, "llama", lm.CompressConfig(rank=2, embedding_order=2, embedding_rank=4))


def gpt2_run(out: Path, cache: Path) -> Run:
    ranks = lm.CompressConfig(format="tt", order=4, rank=4, embedding_order=2, embedding_rank=4, head="share")
    return lm_run(out, cache, "gpt2", ranks)


def mnli_run(out: Path, cache: Path) -> Run:
    cache.mkdir(parents=True)
    words = ["a", "man", "eats", "never", "sleeps"]
    pairs = [{"premise": "a man eats", "hypothesis": "a man never sleeps", "label": label} for label in range(3)]
    for part in ("train", "dev_matched"):
        (cache / f"{part}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs * 20))
    (cache / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    data = replace(MNLI, path=str(cache), max_length=24, cache=str(cache / "prepared"))
    ranks = replace(mnli.preset().compress, order=4, rank=4, embedding_order=2, embedding_rank=3)
    config = ClassifyConfig(out=str(out), data=data, model=ENCODER, compress=ranks, train=TRAIN)
    mnli.run(config)

    def inputs(rows: int, length: int = 10) -> dict[str, Tensor]:
        ids = torch.arange(length * rows).view(rows, length) % 10
        mask = torch.ones(rows, length, dtype=torch.int64)
        mask[0, length - 3 :] = 0
        return {"input_ids": ids, "token_type_ids": (ids > 5).long(), "attention_mask": mask}

    task = ClassifyTask(config, prepare_pairs(data, quiet=True))
    return trained(out / "early", task, BertForSequenceClassification.from_pretrained, inputs)


def dlrm_run(out: Path, cache: Path) -> Run:
    data = CriteoConfig(synthetic_rows=400, table_sizes=TABLES, workers=1, cache=str(cache))
    config = dlrm.DLRMTaskConfig(
        out=str(out),
        late_targets=(),
        data=data,
        model=DLRMConfig(dim=8, bottom=(16,), top=(16,)),
        compress=dlrm.CompressConfig(ratio=6, min_rows=300),
        train=replace(TRAIN, optimizer="adagrad"),  # so that dense tables are of another kind in training
    )
    dlrm.run(config)

    def inputs(rows: int, length: int = 0) -> dict[str, Tensor]:
        ids = torch.stack([torch.arange(rows) % size for size in TABLES], 1)
        return {"dense": torch.arange(13.0 * rows).view(rows, 13) % 5, "ids": ids}

    task = dlrm.DLRMTask(config, dlrm.prepare(data, quiet=True))
    return trained(out / "early", task, lambda folder: dlrm.DLRM(config.model, TABLES), inputs)


RUNS = {"code-lm": code_run, "mnli": mnli_run, "dlrm": dlrm_run, "llama": llama_run, "gpt2": gpt2_run}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Each run, trained once."""
    folder = tmp_path_factory.mktemp("runs")
    return cache(lambda name: RUNS[name](folder / name / "run", folder / name / "cache"))


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest, made: Callable[[str], Run]) -> Run:
    return made(request.param)


@pytest.fixture
def code(made: Callable[[str], Run]) -> Run:
    return made("code-lm")


def test_a_program_runs_without_this_library(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "program"
    assert main(["export", str(run.folder), "--to", "program", "--out", str(out)]) == 0
    shown, named = capsys.readouterr().out, ", ".join(f"{name}=..." for name in run.inputs(2))
    assert shown.startswith(f"{out}: ")
    assert (out / "tokenizer.json").exists() == (run.folder / "tokenizer.json").exists()
    assert f"run it with torch.export.load('{out}/model.pt2').module()({named})" in shown
    batches = [run.inputs(*shape) for shape in SHAPES]
    with torch.no_grad():
        wanted = [run.logits(run.model, *shape) for shape in SHAPES]
    for outputs, logits in zip(run_without_comera(out / "model.pt2", batches), wanted, strict=True):
        got = outputs if isinstance(outputs, Tensor) else outputs["logits"]
        torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("run", ["mnli", "dlrm", "llama", "gpt2"], indirect=True)
@torch.no_grad()
def test_onnxruntime_agrees_on_batches_and_lengths(run: Run, dense: bool, tmp_path: Path) -> None:
    out, weights = tmp_path / "onnx", ["--dense"] if dense else []
    assert main(["export", str(run.folder), "--to", "onnx", *weights, "--out", str(out)]) == 0
    assert (out / "tokenizer.json").exists() == (run.folder / "tokenizer.json").exists()
    session = onnxruntime.InferenceSession(out / "model.onnx")

    def onnx(**inputs: Tensor) -> Tensor:
        (logits,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        return torch.from_numpy(logits)

    for shape in SHAPES:
        torch.testing.assert_close(run.logits(onnx, *shape), run.logits(run.model, *shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", ["mnli", "code-lm", "llama"], indirect=True)
def test_exports_have_the_tokenizer_of_the_run(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = AutoTokenizer.from_pretrained(run.folder)("a man eats", "a man never").input_ids
    assert len(ids) > 3
    for place, target in (("compressed", DENSE[:2]), ("dense", DENSE)):
        out = tmp_path / place
        assert main(["export", str(run.folder), *target, "--out", str(out)]) == 0
        assert AutoTokenizer.from_pretrained(out)("a man eats", "a man never").input_ids == ids
    (run.folder / "tokenizer.json").rename(run.folder / "moved")
    try:
        assert "expected the run's tokenizer in" in refused(capsys, run.folder, tmp_path / "out", "--to", "program")
    finally:
        (run.folder / "moved").rename(run.folder / "tokenizer.json")


@torch.no_grad()
def test_dense_weights_load_into_the_original_architecture(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "dense"
    checkpoint = str(find_checkpoint(run.folder))
    assert main(["export", checkpoint, "--to", "safetensors", "--dense", "--out", str(out)]) == 0
    plain = run.plain(out).eval()
    if (out / "config.json").exists():
        assert type(AutoModel.from_pretrained(out)).__name__ in type(plain).__name__ + "BertModel LlamaModel GPT2Model"
    else:
        plain.load_state_dict(load_file(out / "model.safetensors"))
    torch.testing.assert_close(run.logits(plain, 4), run.logits(run.model, 4), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_compressed_weights_load_into_the_original_architecture(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "small"
    assert main(["export", str(run.folder), "--to", "safetensors", "--out", str(out)]) == 0
    if (out / "config.json").exists():
        kind = type(run.model)
        plain = kind(kind.config_class.from_pretrained(out))
    else:
        plain = run.plain(out)
    loaded = load_pretrained(plain, out).eval()
    torch.testing.assert_close(run.logits(loaded, 4), run.logits(run.model, 4), rtol=1e-5, atol=1e-5)
    about = json.loads((out / "comera.json").read_text())["metadata"]
    assert about["checkpoint"] == find_checkpoint(run.folder).name
    assert about["method"] == "comera"


@pytest.mark.parametrize("method", ["dense", "cola"])
def test_runs_of_other_methods_leave_in_the_forms_that_they_have(
    method: Any, code: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = options.saved_config("code-lm", code.folder / "config.yaml")
    run = tmp_path / "run"
    code_lm.run(replace(saved, method=method, out=str(run)))
    capsys.readouterr()
    for target in ("safetensors", "program"):
        assert main(["export", str(run), "--to", target, "--out", str(tmp_path / target)]) == 0
    if method == "dense":
        assert main(["export", str(run), *DENSE, "--out", str(tmp_path / "dense")]) == 0
    else:
        assert "do not fit the dense" in refused(capsys, run, tmp_path / "dense", *DENSE)


def refused(capsys: pytest.CaptureFixture[str], path: Path, out: Path, *options: str) -> str:
    """What is said when an export is refused, in one line."""
    assert main(["export", str(path), "--out", str(out), *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("comera: ")
    assert said.count("\n") == 1
    return said


def test_what_is_no_run_is_refused(code: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    to = DENSE
    assert "found nothing" in refused(capsys, tmp_path / "nowhere", out, *to)
    (tmp_path / "file").write_text("")
    assert "found a file" in refused(capsys, tmp_path / "file", out, *to)
    assert "found another folder" in refused(capsys, tmp_path, out, *to)
    for name in ("one", "two"):
        (tmp_path / "both" / name).mkdir(parents=True)
        (tmp_path / "both" / name / "metrics.jsonl").touch()
    assert "with several (one, two)" in refused(capsys, tmp_path / "both", out, *to)
    empty = shutil.copytree(code.folder, tmp_path / "run", ignore=shutil.ignore_patterns("step-*"))
    assert "expected checkpoints" in refused(capsys, empty, out, *to)
    alone = shutil.copytree(find_checkpoint(code.folder), tmp_path / "moved" / "checkpoints" / "step-00000003")
    assert "expected the run's config.yaml" in refused(capsys, alone, out, *to)
    saved = shutil.copytree(alone, tmp_path / "saved")
    assert "expected a complete checkpoint in the folder of its run" in refused(capsys, saved, out, *to)
    assert not out.exists()


@pytest.fixture
def damaged(code: Run, tmp_path: Path) -> Path:
    """The checkpoint of a copy of a run."""
    return find_checkpoint(shutil.copytree(code.folder, tmp_path / "run"))


def test_an_unfinished_or_damaged_checkpoint_is_refused(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = damaged.parents[1]
    out, to = run.parent / "out", ("--to", "program")
    unfinished = shutil.copytree(damaged, damaged.with_name(f".{damaged.name}.new"))
    assert "expected a complete checkpoint" in refused(capsys, unfinished, out, *to)
    trainer, weights = damaged / "trainer.json", damaged / "model.safetensors"
    whole = trainer.read_text()
    for text, said in [
        (whole[:-9], "expected a readable trainer.json"),
        ("{}", "expected trainer.json with"),
        (whole.replace('"recipe": "code-lm"', '"recipe": "mine"'), "got one of 'mine'"),
    ]:
        trainer.write_text(text)
        write_sums(damaged)
        assert said in refused(capsys, run, out, *to)
    trainer.write_text(whole)
    write_sums(damaged)
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "is truncated" in refused(capsys, run, out, *to)
    assert not out.exists()


def test_what_is_there_is_kept(code: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export", str(code.folder), "--to", "safetensors", "--out", str(out)]) == 0
    assert "that is not there yet" in refused(capsys, code.folder, out, *DENSE)
    assert (out / "comera.json").exists()
    assert main(["export", str(code.folder), *DENSE, "--out", str(out), "--overwrite"]) == 0
    assert not (out / "comera.json").exists()
    assert "an earlier export to overwrite" in refused(capsys, code.folder, code.folder, *DENSE, "--overwrite")
    assert "a folder to export to" in refused(capsys, code.folder, tmp_path / "model.onnx", "--to", "onnx")


def test_only_runs_of_dlrm_are_scored(code: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.txt").write_text("1\t2\n")
    assert main(["score", str(code.folder), str(tmp_path / "rows.txt"), "--out", str(tmp_path / "out.csv")]) == 2
    said = capsys.readouterr().err
    assert "expected a run of dlrm, whose input is a file of rows, got one of code-lm" in said
    assert [path.name for path in tmp_path.iterdir()] == ["rows.txt"]


@pytest.mark.parametrize("form", ["safetensors", "program", "onnx"])
def test_a_folder_that_cannot_be_made_is_refused(
    form: str, code: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    said = refused(capsys, code.folder, tmp_path / "file" / "out", "--to", form)
    assert said.startswith(f"comera: expected a place that can be written to, got {tmp_path}/file/out (")
    assert said.endswith("): give another\n")


def test_onnx_says_which_package_it_lacks_and_which_operator(
    code: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "onnxscript", None)
        said = refused(capsys, code.folder, out, "--to", "onnx")
        assert said == "comera: an export to ONNX needs onnxscript: pip install 'comera[onnx]'\n"
    plain = BertLMPredictionHead.forward

    def odd(self: nn.Module, hidden: Tensor) -> Tensor:
        return plain(self, hidden) + torch.linalg.eigvalsh(hidden @ hidden.mT).sum()

    monkeypatch.setattr(BertLMPredictionHead, "forward", odd)
    said = refused(capsys, code.folder, out, "--to", "onnx")
    assert said.startswith(
        "comera: ONNX has no operator for aten._linalg_eigh, which this BertForMaskedLM uses: export "
    )
    assert not out.exists()


@pytest.mark.parametrize("argv", [[], ["run", "--to", "onnx"], ["run", "--to", "pickle", "--out", "out"]])
def test_a_wrong_command_shows_its_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["export", *argv])
    assert capsys.readouterr().err.startswith("usage: comera export")
