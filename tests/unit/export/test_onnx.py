"""ONNX: onnxruntime computes what the model does, for any batch and length; the graph holds the small cores."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from comera import BTT, TT, TTM, TensorizeConfig, tensorize_
from comera.errors import CheckpointError, ConfigError, ConversionError, MissingPackageError
from comera.export import export_onnx
from comera.nn import BTTLinear, TTMEmbedding, TTMEmbeddingBag, TTMProjection
from comera.tt.shapes import ttm_spec

from ...helpers.specs import btt


def engine(folder: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(folder / "model.onnx", options)


def run(folder: Path, inputs: Mapping[str, Tensor]) -> np.ndarray[Any, Any]:
    outputs = engine(folder).run(None, {name: value.numpy() for name, value in inputs.items()})
    return outputs[0]


def close(outputs: np.ndarray[Any, Any], wanted: Tensor) -> None:
    np.testing.assert_allclose(outputs, wanted.detach().numpy(), rtol=1e-5, atol=1e-5)


def elements(folder: Path) -> int:
    """Elements of the graph's weights."""
    stored = onnx.load(folder / "model.onnx").graph.initializer
    return sum(int(np.prod(tensor.dims)) for tensor in stored)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 256), nn.Dropout(0.5), nn.GELU(), nn.Linear(256, 48))


def test_blocks_of_different_ranks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(BTTLinear(btt((3, 4), (5, 7), [2, 0, 3, 1, 4] * 3)))
    export_onnx(model, {"input": torch.randn(4, 12)}, tmp_path / "blocks")
    for rows in (1, 9):
        inputs = {"input": torch.randn(rows, 12)}
        close(run(tmp_path / "blocks", inputs), model(**inputs))


@pytest.mark.parametrize("form", [TT(order=4, rank=6), BTT(rank=1)], ids=["tt", "btt"])
def test_an_mlp_for_several_batches_from_cores(form: TT | BTT, tmp_path: Path) -> None:
    model = mlp()
    tensorize_(model, TensorizeConfig(linear=form))
    cores, dense = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in mlp().parameters())
    written = export_onnx(model, {"input": torch.randn(4, 48)}, tmp_path / "mlp")
    assert model.training
    assert [file.name for file in written.path.iterdir()] == ["model.onnx"]
    assert elements(written.path) <= 1.5 * cores < dense / 2
    assert written.parameters <= elements(written.path)
    assert f"onnxruntime.InferenceSession('{written.path}/model.onnx')" in str(written)
    model.eval()
    for rows in (1, 2, 33):
        inputs = {"input": torch.randn(rows, 48)}
        close(run(written.path, inputs), model(**inputs))


def test_an_mlp_from_dense_weights_given_by_position(tmp_path: Path) -> None:
    model = mlp()
    tensorize_(model, TensorizeConfig(linear=TT(order=4, rank=6)))
    written = export_onnx(model, [torch.randn(4, 48)], tmp_path / "mlp", dense=True)
    assert written.parameters == elements(written.path) == sum(p.numel() for p in mlp().parameters())
    assert [value.name for value in engine(written.path).get_outputs()] == ["output"]
    x = torch.randn(7, 48)
    close(run(written.path, {engine(written.path).get_inputs()[0].name: x}), model.eval()(x))


class Tables(nn.Module):
    """A table, a bag and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = TTMEmbedding(ttm_spec(50, 12, order=3, rank=5), padding_idx=3)
        self.bag = TTMEmbeddingBag(ttm_spec(90, 12, order=3, rank=5), "sum")
        self.head = TTMProjection(ttm_spec(50, 12, order=2, rank=5))

    def forward(self, ids: Tensor, bags: Tensor) -> Tensor:
        return self.head(self.table(ids) + self.bag(bags).unsqueeze(1))


def test_tables_bags_and_heads_for_any_batch_and_length(tmp_path: Path) -> None:
    model = Tables()
    batch, length, width = (torch.export.Dim(name) for name in ("batch", "length", "width"))
    shapes = {"ids": {0: batch, 1: length}, "bags": {0: batch, 1: width}}
    example = {"ids": torch.randint(50, (4, 6)), "bags": torch.randint(90, (4, 3))}
    export_onnx(model, example, tmp_path / "tables", dynamic_shapes=shapes)
    assert [put.shape for put in engine(tmp_path / "tables").get_inputs()] == [["batch", "length"], ["batch", "width"]]
    for rows, t, w in ((1, 1, 1), (3, 17, 2), (8, 5, 9)):
        inputs = {"ids": torch.randint(50, (rows, t)), "bags": torch.randint(90, (rows, w))}
        close(run(tmp_path / "tables", inputs), model(**inputs))
    for bad in (50, 63, -1):
        with pytest.raises(Exception, match=r"out of data bounds|invalid index"):
            run(tmp_path / "tables", {**example, "ids": torch.full((4, 6), bad)})


def compressed_bert() -> BertForSequenceClassification:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=300, max_position_embeddings=40, num_labels=3, **shape))
    keep = dict.fromkeys(("*.position_embeddings", "*.token_type_embeddings", "classifier"))
    tensorize_(model, TensorizeConfig(linear=TT(order=4, rank=6), embedding=TTM(order=2, rank=6), overrides=keep))
    return model


@pytest.mark.parametrize("dense", [False, True])
def test_a_bert_with_masks_for_any_batch_and_length(dense: bool, tmp_path: Path) -> None:
    model = compressed_bert()
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=40)
    shapes = {name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")}

    def inputs(rows: int, width: int) -> dict[str, Tensor]:
        mask = torch.ones(rows, width, dtype=torch.int64)
        mask[0, width // 2 :] = 0
        return {"input_ids": torch.randint(300, (rows, width)), "attention_mask": mask}

    written = export_onnx(model, inputs(4, 10), tmp_path / "bert", dynamic_shapes=shapes, dense=dense)
    assert sorted(file.name for file in written.path.iterdir()) == ["config.json", "model.onnx"]
    assert [value.name for value in engine(written.path).get_outputs()] == ["logits"]
    model.eval()
    for rows, width in ((1, 2), (3, 17), (7, 40)):
        batch_of = inputs(rows, width)
        close(run(written.path, batch_of), model(**batch_of).logits)


def test_the_graph_tells_nothing_of_the_machine(tmp_path: Path) -> None:
    export_onnx(mlp(), [torch.randn(4, 48)], tmp_path / "mlp")
    assert b".py" not in (tmp_path / "mlp" / "model.onnx").read_bytes()


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(x @ x.mT)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (Unknown(), ConversionError, r"ONNX has no operator for .*eigh.*, which this Unknown uses: export"),
        (Branching(), ConversionError, r"torch\.export cannot trace this Branching"),
        (Drawing(), CheckpointError, "expected the model's outputs to within .* off"),
        (nn.Linear(3, 3).bfloat16(), ConversionError, r"onnxruntime cannot run the graph of this Linear .* in float32"),
    ],
)
def test_what_onnx_cannot_do_is_one_line_and_leaves_nothing(
    model: nn.Module, error: type[Exception], message: str, tmp_path: Path
) -> None:
    dtype = next(model.parameters(), torch.ones(1)).dtype
    with pytest.raises(error, match=message) as raised:
        export_onnx(model, [torch.rand(3, 3, dtype=dtype)], tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"ONNX needs {package}: pip install 'comera\[onnx\]'"):
        export_onnx(mlp(), [torch.randn(4, 48)], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_only_an_earlier_export_is_overwritten(tmp_path: Path) -> None:
    model, example = nn.Linear(3, 3), [torch.randn(2, 3)]
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="expected a folder that is not there yet"):
        export_onnx(model, example, tmp_path / "mine")
    with pytest.raises(ConfigError, match="expected an earlier export to overwrite"):
        export_onnx(model, example, tmp_path / "mine", overwrite=True)
    export_onnx(model, example, tmp_path / "out", files={"tokenizer.json": "{}"})
    export_onnx(model, example, tmp_path / "out", overwrite=True)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.onnx"]
