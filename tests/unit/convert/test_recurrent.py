"""torch's recurrent layers: their matrices are made once for a sequence, in the place of its list of parameters."""

import copy
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves

from comera.convert import BTT, TT, TensorizeConfig, materialize_, tensorize_
from comera.nn import CompressedParameter, TensorTrain
from comera.pretrained import load_pretrained, save_pretrained
from comera.rank import prune_, round_

F64 = torch.float64
KINDS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 12, "bias": False}),
    (nn.GRU, {"num_layers": 2}),
    (nn.RNN, {"nonlinearity": "relu"}),
]
each = pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
CONFIG = TensorizeConfig(TT(order=4, rank=6))


def pair(kind: type[nn.RNNBase], options: dict[str, Any], config: TensorizeConfig = CONFIG) -> tuple[Any, Any]:
    """A module with a compressed recurrent layer, and the same with dense weights of their own."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": kind(20, 24, **options)}).to(F64)
    tensorize_(model, config)
    return model, materialize_(copy.deepcopy(model))


def held(model: nn.Module) -> dict[str, CompressedParameter]:
    return {
        name.rpartition(".")[2]: part for name, part in model.named_modules() if isinstance(part, CompressedParameter)
    }


def exact(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@each
@pytest.mark.parametrize("format_", [TT(order=4, rank=6), BTT(rank=1)], ids=str)
def test_it_computes_what_the_dense_layer_does(
    kind: type[nn.RNNBase], options: dict[str, Any], format_: TT | BTT
) -> None:
    model, dense = pair(kind, options, TensorizeConfig(format_))
    assert {*held(model)} == {name for name, p in dense["rnn"].named_parameters() if p.ndim == 2}
    assert isinstance(model["rnn"], kind)
    x = torch.randn(5, 5, 20, dtype=F64)
    lengths = pack_padded_sequence(x, [5, 4, 2, 2, 1], batch_first=options.get("batch_first", False))
    for given in (x, x[0], lengths):
        exact(model["rnn"](given), dense["rnn"](given))
        with torch.no_grad():
            exact(model["rnn"](given), dense["rnn"](given))
    for rnn in (model["rnn"], dense["rnn"]):
        rnn(x)[0].square().sum().backward()
    for name, part in held(model).items():
        train = list(part.tt.parameters())
        wanted = torch.autograd.grad(part.layout.parameter(part.tt.dense()), train, getattr(dense["rnn"], name).grad)
        exact([p.grad for p in train], list(wanted))
    for name, p in dense["rnn"].named_parameters():
        if p.ndim == 1:
            exact(getattr(model["rnn"], name).grad, p.grad)


@each
def test_a_forward_makes_each_matrix_once_and_keeps_none(
    kind: type[nn.RNNBase], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pair(kind, options)
    made: list[TensorTrain] = []
    dense = TensorTrain.dense
    monkeypatch.setattr(TensorTrain, "dense", lambda self, *args: (made.append(self), dense(self, *args))[1])
    x = torch.randn(5, 5, 20, dtype=F64)
    for _ in range(2):
        made.clear()
        model["rnn"](x)
        assert len(made) == len(set(made)) == len(held(model))
    assert not any(isinstance(leaf, Tensor | weakref.ref) for leaf in tree_leaves(_attributes(model["rnn"])))


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in ("_parameters", "_modules")}


@each
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # the dense one's, too
def test_copies_files_and_the_way_back(kind: type[nn.RNNBase], options: dict[str, Any], tmp_path: Path) -> None:
    model, dense = pair(kind, options)
    x = torch.randn(5, 5, 20, dtype=F64)
    wanted = model["rnn"](x)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        exact(other["rnn"](x)[0], wanted)
        assert not {*other.parameters()} & {*model.parameters()}
    assert type(dense["rnn"]) is kind
    assert dict(dense["rnn"].named_parameters()).keys() == dict(kind(20, 24, **options).named_parameters()).keys()
    round_(model, 0.7)
    wanted = model["rnn"](x)[0]
    save_pretrained(model, tmp_path)
    fresh = nn.ModuleDict({"rnn": kind(20, 24, **options)}).to(F64)
    assert torch.equal(load_pretrained(fresh, tmp_path)["rnn"](x)[0], wanted)
    half = model.float()
    assert half["rnn"](x.float())[0].dtype == torch.float32
    with torch.no_grad():
        for part in held(model).values():
            part.tt.rank_params[0][0] = 0.0
    prune_(model)
    model["rnn"](x.float())


@each
def test_trained_weights_decompose(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": kind(20, 24, **options)}).to(F64)
    x = torch.randn(5, 5, 20, dtype=F64)
    wanted = model["rnn"](x)[0]
    tensorize_(model, TensorizeConfig(TT(order=2, rank=999), init="decompose", min_ratio=0.0))
    exact(model["rnn"](x)[0], wanted)


def test_an_override_leaves_a_matrix_dense() -> None:
    model = nn.ModuleDict({"rnn": nn.LSTM(20, 24)}).to(F64)
    report = tensorize_(model, TensorizeConfig(TT(order=4, rank=6), overrides={"*.weight_hh*": None}))
    assert {*held(model)} == {"weight_ih_l0"}
    assert {row.name: row.note for row in report.rows}["rnn.weight_hh_l0"] == "left dense as configured"
    model["rnn"](torch.randn(3, 2, 20, dtype=F64))[0].sum().backward()
    assert all(p.grad is not None for p in model.parameters())
