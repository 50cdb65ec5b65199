"""Models from the meta device: values as the model's own code draws them, and never any in silence without."""

from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import comera
from comera.errors import ConversionError, WeightError
from comera.nn.tensor_train import named_trains

SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
IDS = {"input_ids": torch.arange(8)[None]}


class Tied(nn.Module):
    """A table and a head that share a weight, each of which draws its own when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(90, 64, padding_idx=0), nn.Linear(64, 90, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


CASES: dict[str, tuple[Callable[[], nn.Module], float, dict[str, Tensor]]] = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=99)), 3, IDS),
    # residual layers with a smaller standard deviation
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=99)), 3, IDS),
    "bert": (lambda: BertForMaskedLM(BertConfig(**SIZES, vocab_size=99)), 3, IDS),
    # a standard deviation for each kind of layer
    "t5": (
        lambda: T5ForConditionalGeneration(
            T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=99)
        ),
        3,
        {**IDS, "decoder_input_ids": IDS["input_ids"]},
    ),
    # truncated normal ones, by rejection
    "vit": (
        lambda: ViTForImageClassification(ViTConfig(**SIZES, image_size=32, patch_size=8)),
        2,
        {"pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))},
    ),
    "nn.Transformer": (
        lambda: nn.Transformer(64, 4, 2, 2, 128, batch_first=True),
        2,
        dict.fromkeys(("src", "tgt"), torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))),
    ),
    "tied": (Tied, 2, {"ids": IDS["input_ids"]}),
}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("name", CASES)
def test_values_are_of_the_distribution_that_a_dense_model_has(name: str) -> None:
    make, ratio, inputs = CASES[name]
    torch.manual_seed(0)
    converted = make()
    dense = {key: value.clone() for key, value in converted.state_dict().items()}
    expected = comera.tensorize_(converted, ratio=ratio)
    model = on_meta(make)
    report = comera.tensorize_(model, ratio=ratio, device="cpu")
    assert (report.total, report.dense_total) == (expected.total, expected.dense_total)
    stds = {key: tt.init_std for key, tt in named_trains(converted)}
    assert stds.keys() == {key for key, _ in named_trains(model)}
    for key, tt in named_trains(model):
        spread = 5 / sqrt(2 * tt.spec.dense_numel) + 0.01  # of the std of as many random elements, and of the sample
        assert tt.init_std == pytest.approx(stds[key], rel=spread), key
    for key, value in model.state_dict().items():
        if key in dense and value.dim() == 1:  # norms and biases
            assert float(value.std(correction=0)) == pytest.approx(float(dense[key].std(correction=0)), abs=0.05), key
    buffers = dict(converted.named_buffers())
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    out = model.eval()(**inputs)
    assert (out if isinstance(out, Tensor) else out[0]).isfinite().all()


def test_ties_and_padding_are_kept() -> None:
    model: Any = on_meta(Tied)
    comera.tensorize_(model, ratio=2, device="cpu")
    assert model.head.tt is model.table.tt
    assert model.table.padding_idx == 0
    assert model.table.tt.padding_row  # an output of the head, too
    dense: Any = on_meta(Tied)
    dense.more = on_meta(lambda: nn.Linear(512, 512))
    config = comera.TensorizeConfig(comera.TT(rank=4), embedding=None, overrides={"head": None, "table": None})
    comera.tensorize_(dense, config, device="cpu")
    assert dense.head.weight is dense.table.weight
    assert float(dense.table.weight.detach().std()) == pytest.approx(1, rel=0.1)  # the table's, not the head's


def test_a_weight_that_one_of_its_layers_keeps_dense_is_drawn_for_it() -> None:
    config = comera.TensorizeConfig(comera.TT(rank=4), embedding=None)
    model: Any = on_meta(Tied)
    report = comera.tensorize_(model, config, device="cpu")
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert float(model.table.weight.detach().std()) == pytest.approx(1, rel=0.1)
    assert float(model.head.weight.detach().std()) == pytest.approx(1, rel=0.2)
    assert report.to_dict() == comera.tensorize_(Tied(), config).to_dict()


def test_the_same_seed_gives_the_same_model() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        model = on_meta(CASES["llama"][0])
        comera.tensorize_(model, ratio=3, device="cpu")
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


class Scaled(nn.Linear):
    """Has a parameter that nothing draws after it was made."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.scale = nn.Parameter(torch.full((1,), 3.0))


def test_what_nothing_draws_is_named_before_anything_is_allocated() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(64, 64), Scaled()))
    with pytest.raises(ConversionError, match=r"nothing draws 1\.scale.*reset_parameters"):
        comera.tensorize_(model, ratio=1.5, device="cpu")
    assert all(p.is_meta for p in model.parameters())


def test_a_weight_that_is_not_drawn_by_elements_needs_a_standard_deviation() -> None:
    class Orthogonal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64, bias=False)

        def reset_parameters(self) -> None:
            nn.init.orthogonal_(self.layer.weight)

    model = on_meta(Orthogonal)
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(rank=4), init_std=0.1), device="cpu")
    assert not next(model.parameters()).is_meta


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(64, 64)), {}, "expected a model on the meta device"),
        (lambda: on_meta(lambda: nn.Sequential(nn.Linear(64, 64))), {"init": "decompose"}, "meta device has none"),
    ],
)
def test_other_models_are_refused(make: Callable[[], nn.Module], options: Any, message: str) -> None:
    model = make()
    before = [id(p) for p in model.parameters()]
    with pytest.raises(ConversionError, match=message):
        comera.tensorize_(model, ratio=1.5, device="cpu", **options)
    assert [id(p) for p in model.parameters()] == before


def test_a_model_that_is_compressed_on_meta_already_is_refused() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    comera.tensorize_(model, ratio=1.5)
    model.append(on_meta(lambda: nn.Linear(64, 64)))
    with pytest.raises(ConversionError, match="compressed layers: make it anew"):
        comera.tensorize_(model, ratio=1.5, device="cpu")


# --- without a device: never in silence ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [comera.TT(order=4, rank=4), comera.BTT(rank=1)])
def test_memory_without_values_is_refused_until_something_gives_them(form: comera.TT | comera.BTT) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64))
        comera.tensorize_(model, comera.TensorizeConfig(form))
        return model

    x = torch.ones(3, 64)
    for give in (lambda model: model[0].reset_parameters(), lambda model: model.load_state_dict(make().state_dict())):
        model = on_meta(make).to_empty(device="cpu")
        with pytest.raises(WeightError, match=r"to_empty.*device=.*reset_parameters"):
            model(x)
        with pytest.raises(WeightError, match="to_empty"):
            model[0].weight.sum()
        give(model)
        assert model(x).isfinite().all()


def test_a_model_of_transformers_after_its_own_init_weights_is_refused() -> None:
    model: Any = on_meta(CASES["llama"][0])
    comera.tensorize_(model, ratio=3)
    model.to_empty(device="cpu").init_weights()
    with pytest.raises(WeightError, match="to_empty"):
        model(**IDS)
