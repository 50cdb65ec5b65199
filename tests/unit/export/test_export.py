"""Exports: each format loads again with the same outputs, or nothing is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5EncoderModel,
)

from comera import BTT, TT, TTM, TensorizeConfig, load_pretrained, tensorize_
from comera.errors import CheckpointError, ConfigError, ConversionError
from comera.export import export_compressed, export_dense, export_program, program, serving_copy, write
from comera.fusion import fuse_
from comera.nn import BTTLinear, TTLinear, TTMEmbedding, TTMEmbeddingBag, TTMProjection
from comera.nn.linear import CompressedLinear
from comera.nn.tensor_train import named_trains
from comera.tt.shapes import tt_spec, ttm_spec

from ...helpers.specs import btt
from ...helpers.without_comera import run_without_comera


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(30, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 3))


FORMATS = pytest.mark.parametrize("model", [TT(order=4, rank=6), BTT(rank=2)], ids=["tt", "btt"], indirect=True)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> nn.Sequential:
    """A compressed MLP in training mode, with some slices pruned and no gate at one."""
    torch.manual_seed(0)
    made = mlp()
    tensorize_(made, TensorizeConfig(linear=getattr(request, "param", TT(order=4, rank=6))))
    with torch.no_grad():
        for _, tt in named_trains(made):
            for d in tt.rank_params:
                d.uniform_(0.5, 1.5)
            tt.rank_params[tt.spec.order // 2 - 1][::2] = 1e-3
    return made


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 30, generator=torch.Generator().manual_seed(1))


def bert(**sizes: Any) -> BertForMaskedLM:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(vocab_size=300, max_position_embeddings=64, **shape, **sizes))
    nn.init.normal_(model.cls.predictions.bias)
    return model


def compressed_bert(tied: str) -> BertForMaskedLM:
    model = bert()
    dense = dict.fromkeys(("*.position_embeddings", "*.token_type_embeddings"))
    tensorize_(model, TensorizeConfig(linear=TT(order=4, rank=6), embedding=TTM(rank=6), overrides=dense, tied=tied))
    return model


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(300, (rows, length), generator=torch.Generator().manual_seed(rows))


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@FORMATS
def test_a_program_of_an_mlp_runs_without_this_library(model: nn.Sequential, x: Tensor, tmp_path: Path) -> None:
    specs = [train.spec for _, train in named_trains(model)]
    written = export_program(model, (x,), tmp_path / "mlp")
    assert model.training
    assert [train.spec for _, train in named_trains(model)] == specs  # the model is unchanged
    assert written.parameters < sum(p.numel() for p in model.parameters())
    assert written.difference < 1e-5
    assert "differ from the model's by at most" in str(written)
    batches = [torch.randn(rows, 30) for rows in (0, 1, 2, 33)]
    model.eval()
    for batch, outputs in zip(
        batches, run_without_comera(written.path / "model.pt2", [[b] for b in batches]), strict=True
    ):
        close(outputs, model(batch))
    assert leftovers(tmp_path) == ["mlp"]


def test_a_program_of_a_bert_takes_any_batch_and_length(tmp_path: Path) -> None:
    model = compressed_bert("share")
    fuse_(model)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=64)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    example = {"input_ids": ids(2, 9), "attention_mask": mask}
    shapes = {name: {0: batch, 1: length} for name in example}
    written = export_program(model, example, tmp_path / "bert", dynamic_shapes=shapes)
    longer = {"input_ids": ids(3, 40), "attention_mask": torch.ones(3, 40, dtype=torch.int64)}
    model.eval()
    for inputs, outputs in zip(
        [example, longer], run_without_comera(written.path / "model.pt2", [example, longer]), strict=True
    ):
        close(outputs["logits"], model(**inputs).logits)
    assert fuse_(model).fused("mlp")  # the model is unchanged
    with pytest.raises(RuntimeError, match=r"expected every id in 0 \.\.\. 299"):
        torch.export.load(written.path / "model.pt2").module()(**{**example, "input_ids": ids(2, 9) + 300})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [1, 2, 4])
def test_inference_layers_match_the_layers(dtype: torch.dtype, order: int) -> None:
    torch.manual_seed(0)
    spec = ttm_spec(50, 12, order=order, rank=5)
    table, head = TTMEmbedding(spec, padding_idx=3, dtype=dtype), TTMProjection(spec, padding_idx=3, dtype=dtype)
    nn.init.normal_(head.bias)
    linear = TTLinear(tt_spec(12, 35, order=max(2, order), rank=4), dtype=dtype)
    blocks = BTTLinear(btt((3, 4), (5, 7), [order, 0, 3, 1, 4] * 3), dtype=dtype)
    ids = torch.tensor([[0, 3, 49], [7, 7, 1]])
    x = torch.randn(4, 2, 12, dtype=dtype)
    allowed = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 1e-2)  # half precision: 40 dB
    with torch.no_grad():
        cases = [
            (table, ids),
            (table, ids[:, :0]),
            (head, x),
            (linear, x),
            (linear, x[:0]),
            (blocks, x),
            (blocks, x[:0]),
        ]
        for layer, inputs in cases:
            outputs, wanted = serving_copy(nn.Sequential(layer))(inputs), layer(inputs)
            assert (outputs.shape, outputs.dtype) == (wanted.shape, dtype)
            assert (outputs - wanted).double().norm() <= allowed * wanted.double().norm()
            assert torch.equal(serving_copy(layer)(inputs), outputs)


class Bags(nn.Module):
    """A model that calls a bag with offsets, as DLRM does."""

    def __init__(self, bag: nn.Module) -> None:
        super().__init__()
        self.bag = bag

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.bag(ids, offsets)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 3])
def test_inference_bags_match_the_bags(mode: Any, padding: int | None) -> None:
    torch.manual_seed(0)
    ids, weights = torch.tensor([[0, 3, 49], [7, 7, 1], [3, 3, 3]]), torch.rand(3, 3)
    flat, starts = ids.view(-1), torch.tensor([0, 2, 2, 7, 9])
    for last in (False, True):
        bag = TTMEmbeddingBag(ttm_spec(50, 12, order=3, rank=5), mode, padding, include_last_offset=last)
        served = serving_copy(bag)
        with torch.no_grad():
            close(served(ids), bag(ids))
            close(served(ids[:0]), bag(ids[:0]))
            close(served(flat, starts), bag(flat, starts))
            close(served(flat.int(), starts.int()), bag(flat, starts))
            if mode == "sum":
                close(served(ids, None, weights), bag(ids, None, weights))
                close(served(flat, starts, weights.view(-1)), bag(flat, starts, weights.view(-1)))


def test_a_program_of_bags_takes_any_number_of_ids_and_bags(tmp_path: Path) -> None:
    model = Bags(TTMEmbeddingBag(ttm_spec(50, 12, order=3, rank=5), "mean"))
    shapes = {"ids": {0: torch.export.Dim("ids")}, "offsets": {0: torch.export.Dim("bags")}}
    example = torch.arange(7), torch.tensor([0, 2, 6])
    export_program(model, example, tmp_path / "bags", dynamic_shapes=shapes)
    program = torch.export.load(tmp_path / "bags" / "model.pt2").module()
    for ids, offsets in [(torch.arange(30) % 50, torch.tensor([0, 4, 9, 9, 21])), (torch.arange(1), torch.tensor([0]))]:
        close(program(ids, offsets), model(ids, offsets))


def test_a_program_can_hold_dense_weights(model: nn.Sequential, x: Tensor, tmp_path: Path) -> None:
    written = export_program(model, (x,), tmp_path / "mlp", dense=True)
    loaded = torch.export.load(written.path / "model.pt2")
    assert written.parameters == sum(p.numel() for p in mlp().parameters())
    close(loaded.module()(x), model.eval()(x))


def test_dense_bags_are_lookups_where_that_is_the_same() -> None:
    torch.manual_seed(0)
    ids, weights = torch.randint(50, (4, 3)), torch.rand(4, 3)
    for bag in (nn.EmbeddingBag(50, 6, mode="sum"), nn.EmbeddingBag(50, 6, mode="sum", sparse=True)):
        served = serving_copy(nn.Sequential(bag))[0]
        assert type(served) is not nn.EmbeddingBag
        close(served(ids), bag(ids))
        close(served(ids, None, weights), bag(ids, None, weights))
        close(served(ids.view(-1), torch.tensor([0, 2, 7])), bag(ids.view(-1), torch.tensor([0, 2, 7])))
    for bag in (nn.EmbeddingBag(50, 6), nn.EmbeddingBag(50, 6, mode="sum", padding_idx=1)):
        assert serving_copy(nn.Sequential(bag))[0] is not bag
        assert type(serving_copy(nn.Sequential(bag))[0]) is nn.EmbeddingBag


def test_rank_zero_is_exported_as_the_bias(x: Tensor, tmp_path: Path) -> None:
    model = mlp()
    tensorize_(model, TensorizeConfig(linear=TT(order=4, rank=6)))
    with torch.no_grad():
        model[3].tt.rank_params[0].zero_()
    export_program(model, (x,), tmp_path / "mlp")
    served = torch.export.load(tmp_path / "mlp" / "model.pt2").module()
    close(served(x), model.eval()(x))


def test_tied_inference_layers_share_their_cores(tmp_path: Path) -> None:
    served = serving_copy(compressed_bert("share"))
    assert served.cls.predictions.decoder.tt is served.bert.embeddings.word_embeddings.tt
    untied = serving_copy(compressed_bert("untie"))
    assert untied.cls.predictions.decoder.tt is not untied.bert.embeddings.word_embeddings.tt


@FORMATS
def test_compressed_weights_are_pruned_and_load_into_the_dense_model(
    model: nn.Sequential, x: Tensor, tmp_path: Path
) -> None:
    specs = [train.spec for _, train in named_trains(model)]
    written = export_compressed(model, (x,), tmp_path / "mlp", lambda folder: mlp(), metadata={"made": "here"})
    loaded = load_pretrained(mlp(), tmp_path / "mlp").eval()
    close(loaded(x), model.eval()(x))
    for _, tt in named_trains(loaded):
        assert all(bool((d == 1).all()) for d in tt.rank_params)
    for (_, tt), before in zip(named_trains(loaded), specs, strict=True):
        k = before.order // 2
        assert tt.spec.ranks[k] == before.ranks[k] // 2
    assert written.parameters == sum(p.numel() for p in loaded.parameters())
    assert written.bytes == sum(file.stat().st_size for file in (tmp_path / "mlp").iterdir())
    assert json.loads((tmp_path / "mlp" / "comera.json").read_text())["metadata"] == {"made": "here"}
    assert [train.spec for _, train in named_trains(model)] == specs


@FORMATS
def test_dense_weights_have_the_original_names(model: nn.Sequential, x: Tensor, tmp_path: Path) -> None:
    export_dense(model, (x,), tmp_path / "mlp", lambda folder: mlp())
    plain = mlp().eval()
    plain.load_state_dict(load_file(tmp_path / "mlp" / "model.safetensors"))
    close(plain(x), model.eval()(x))
    assert isinstance(model[0], CompressedLinear)
    assert leftovers(tmp_path) == ["mlp"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("tied", ["share", "untie"])
def test_a_dense_bert_is_one_for_transformers(tied: str, tmp_path: Path) -> None:
    model = compressed_bert(tied)
    inputs = {"input_ids": ids(2, 9)}
    fresh: Callable[[Path], nn.Module] = lambda folder: BertForMaskedLM(BertConfig.from_pretrained(folder))  # noqa: E731
    export_dense(model, inputs, tmp_path / "dense", fresh)
    export_compressed(model, inputs, tmp_path / "compressed", fresh)
    plain = AutoModelForMaskedLM.from_pretrained(tmp_path / "dense").eval()
    head, table = plain.get_output_embeddings().weight, plain.get_input_embeddings().weight
    assert (head is table) == (tied == "share")
    want = model.eval()(**inputs).logits
    close(plain(**inputs).logits, want)
    again = load_pretrained(fresh(tmp_path / "compressed"), tmp_path / "compressed").eval()
    close(again(**inputs).logits, want)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 32), nn.Linear(32, 300, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tied_table_is_stored_and_counted_once(tmp_path: Path) -> None:
    model = Tied()
    written = export_dense(model, (ids(2, 9),), tmp_path / "dense", lambda folder: Tied())
    assert written.parameters == 300 * 32
    assert written.bytes < 1.1 * 4 * 300 * 32
    assert str(written).startswith(f"{tmp_path}/dense: 9,600 parameters, 0.04 MB;")  # 2^20 bytes, as in reports
    assert export_program(model, (ids(2, 9),), tmp_path / "program", dense=True).parameters == 300 * 32
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, use_cache=False, bos_token_id=1, eos_token_id=1)
    gpt2 = GPT2LMHeadModel(config).eval()
    export_dense(gpt2, {"input_ids": ids(2, 9)}, tmp_path / "gpt2", lambda folder: GPT2LMHeadModel(config))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")
    assert plain.lm_head.weight is plain.transformer.wte.weight
    assert torch.equal(plain.lm_head.weight, gpt2.lm_head.weight)


def test_a_dense_model_is_exported_unchanged(x: Tensor, tmp_path: Path) -> None:
    model = mlp().eval()
    for export, name in ((export_dense, "dense"), (export_compressed, "compressed")):
        assert export(model, (x,), tmp_path / name, lambda folder: mlp()).difference == 0
    assert export_program(model, (x,), tmp_path / "mlp").difference < 1e-6


def test_only_an_earlier_export_is_overwritten(model: nn.Sequential, x: Tensor, tmp_path: Path) -> None:
    fresh: Callable[[Path], nn.Module] = lambda folder: mlp()  # noqa: E731
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep")
    for export in (export_dense, export_compressed):
        with pytest.raises(ConfigError, match="expected a folder that is not there yet"):
            export(model, (x,), tmp_path / "mine", fresh)
        with pytest.raises(ConfigError, match="expected an earlier export to overwrite"):
            export(model, (x,), tmp_path / "mine", fresh, overwrite=True)
    with pytest.raises(ConfigError, match="expected an earlier export to overwrite"):
        export_program(model, (x,), tmp_path / "mine", overwrite=True)
    shutil.copytree(tmp_path / "mine", tmp_path / "checkpoint")
    for name in ("model.safetensors", "trainer.json"):
        (tmp_path / "checkpoint" / name).touch()
    with pytest.raises(ConfigError, match="expected an earlier export to overwrite"):
        export_program(model, (x,), tmp_path / "checkpoint", overwrite=True)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "keep"
    export_dense(model, (x,), tmp_path / "out", fresh)
    export_compressed(model, (x,), tmp_path / "out", fresh, overwrite=True)
    assert leftovers(tmp_path / "out") == ["comera.json", "model.safetensors"]
    export_program(model, (x,), tmp_path / "out", overwrite=True)
    with pytest.raises(ConfigError, match="expected a folder that is not there yet"):
        export_program(model, (x,), tmp_path / "out")
    assert leftovers(tmp_path / "out") == ["model.pt2"]
    assert leftovers(tmp_path) == ["checkpoint", "mine", "out"]


def test_a_path_that_cannot_be_written_is_an_error(model: nn.Sequential, x: Tensor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="expected a place that can be written to"):
        export_program(model, (x,), tmp_path / "file" / "a")
    with pytest.raises(ConfigError, match="expected a place that can be written to"):
        export_dense(model, (x,), tmp_path / "file" / "a", lambda folder: mlp())
    with pytest.raises(ConfigError, match=r"expected a folder to export to, got .*a\.pt2, the name of a file"):
        export_program(model, (x,), tmp_path / "a.pt2")


def test_nothing_is_written_if_outputs_differ_after_loading(
    model: nn.Sequential, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> nn.Module:
        return mlp().append(nn.Softplus())

    for export in (export_dense, export_compressed):
        with pytest.raises(CheckpointError, match=r"expected the model's outputs to within .* off"):
            export(model, (x,), tmp_path / "out", broken)
    with torch.no_grad():
        model[0].bias[0] = torch.nan
    with pytest.raises(CheckpointError, match="nan off"):
        export_program(model, (x,), tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_weights_that_do_not_fit_the_dense_model_are_an_error(model: nn.Sequential, x: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="do not fit the dense Sequential"):
        export_dense(model, (x,), tmp_path / "out", lambda folder: mlp()[:3])
    assert leftovers(tmp_path) == []


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


def test_a_model_that_cannot_be_traced_is_an_error(x: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="cannot trace this Branching"):
        export_program(Branching(), (x,), tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_an_interrupted_export_leaves_nothing(
    model: nn.Sequential, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object) -> float:
        raise KeyboardInterrupt

    export_dense(model, (x,), tmp_path / "out", lambda folder: mlp())
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    for module in (write, program):
        monkeypatch.setattr(module, "compare", stop)
    with pytest.raises(KeyboardInterrupt):
        export_dense(model, (x,), tmp_path / "out", lambda folder: mlp(), overwrite=True)
    with pytest.raises(KeyboardInterrupt):
        export_program(model, (x,), tmp_path / "other")
    assert leftovers(tmp_path) == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_hooks_go_along_to_a_serving_copy_and_another_forward_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(3, 64)
    tensorize_(model, ratio=2)
    model[0].register_forward_hook(lambda module, args, out: 3 * out)
    torch.testing.assert_close(serving_copy(model)(x), model.eval()(x))
    own = model[2].forward
    model[2].forward = lambda x: 3 * own(x)
    with pytest.raises(ConversionError, match="with the forward of its class, got one with another"):
        serving_copy(model)


class Cast(nn.Module):
    """Casts its input to the dtype of a layer's weight, as parts of T5 and CLIP do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype))


@pytest.mark.parametrize("form", [TT(order=4, rank=6), BTT(rank=2)], ids=["tt", "btt"])
def test_a_program_that_reads_the_dtype_of_a_weight_does_not_make_it(form: TT | BTT, tmp_path: Path) -> None:
    model, x = Cast(), torch.randn(3, 64)
    tensorize_(model, TensorizeConfig(linear=form))
    written = export_program(model, [x], tmp_path / "cast")
    loaded = torch.export.load(written.path / "model.pt2")
    close(loaded.module()(x), model(x))
    made = [node.meta["val"] for node in loaded.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert not any(tensor.numel() == 64 * 96 for tensor in made)


def test_a_program_of_a_t5(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = T5EncoderModel(T5Config(vocab_size=300, **sizes)).eval()
    tensorize_(model, ratio=1.5)
    written = export_program(model, {"input_ids": ids(2, 9)}, tmp_path / "t5")
    outputs = torch.export.load(written.path / "model.pt2").module()(input_ids=ids(3, 9))
    close(outputs["last_hidden_state"], model(ids(3, 9)).last_hidden_state)


def test_weights_of_inference_layers_are_those_of_the_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Conv2d(8, 16, 3), nn.Embedding(60, 32, padding_idx=1))
    tensorize_(model, TensorizeConfig(TT(order=4, rank=6), TTM(rank=6), conv=TT(order=2, rank=4)))
    layers = [*model, BTTLinear(btt((3, 4), (5, 7), 2)), nn.EmbeddingBag(60, 32, mode="sum")]
    for layer, served in zip(layers, serving_copy(nn.Sequential(*layers)), strict=True):
        assert type(served) is not type(layer)
        torch.testing.assert_close(served.weight, layer.weight)


class Masked(nn.Module):
    """Returns closed logits, or which are above 0, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("closed", torch.arange(64) > 50)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = self.linear(x)
        return y.masked_fill(self.closed, -torch.inf), y > 0


def test_closed_logits_and_truth_values_compare(tmp_path: Path) -> None:
    model = Masked()
    tensorize_(model, ratio=2)
    export_compressed(model, [torch.randn(4, 64)], tmp_path / "out", lambda folder: Masked())
    export_program(model, [torch.randn(4, 64)], tmp_path / "program")
