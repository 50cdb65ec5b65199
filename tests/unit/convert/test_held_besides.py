"""Layers that a plain attribute holds, too: a swap would leave the model calling the old ones, so they stay dense."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.small_net import SMALL
from torch import Tensor, nn

from comera.adapters import TTAdapter, adapt_, merge_adapters_
from comera.convert import materialize_, tensorize_
from comera.errors import ConversionError
from comera.nn import TTLinear
from comera.pretrained import load_pretrained, save_pretrained


class Held(nn.Module):
    """Three layers, of which the forward gets the first from what `hold` makes of it, by `get`."""

    def __init__(self, hold: Callable[[nn.Module], Any], get: Callable[[Any], Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.inner = nn.Sequential(nn.Linear(64, 64))
        self.get = get
        self.hold(hold)

    def hold(self, hold: Callable[[nn.Module], Any]) -> None:
        vars(self)["kept"] = hold(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.b(self.get(self.kept)(x)))


def first(held: Any) -> Any:
    return next(iter(held))


WAYS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], Any]]] = {
    "itself": (lambda layer: layer, lambda held: held),
    "list": (lambda layer: [layer], first),
    "tuple": (lambda layer: (layer,), first),
    "set": (lambda layer: {layer}, first),
    "dict": (lambda layer: {"x": layer}, lambda held: held["x"]),
    "method": (lambda layer: layer.forward, lambda held: held),
    "methods": (lambda layer: [layer.forward], first),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_an_attribute_holds_stays_dense_and_trains(way: str) -> None:
    model = Held(*WAYS[way])
    a = model.a
    report = tensorize_(model, SMALL)
    assert model.a is a
    assert {row.name: row.after for row in report.rows} == {"a": "Linear", "b": "TTLinear", "inner.0": "TTLinear"}
    note = next(row.note for row in report.rows if row.name == "a")
    assert note.startswith("Held.kept holds it, too, which a swap would not reach: use nn.ModuleList")
    model(torch.randn(3, 64)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_the_place_is_named_by_its_path() -> None:
    model = nn.ModuleDict({"part": Held(*WAYS["list"])})
    notes = {row.name: row.note for row in tensorize_(model, SMALL).rows}
    assert notes["part.a"].startswith("part.kept holds it, too")
    assert notes["part.b"] == ""


@pytest.mark.parametrize(
    "hold",
    [
        weakref.ref,
        weakref.proxy,
        lambda layer: weakref.WeakValueDictionary({"x": layer}),
        lambda layer: {layer: "a"},  # a name for it
        lambda layer: [layer.weight.shape, "a", None],
    ],
)
def test_what_does_not_hold_a_layer_is_no_obstacle(hold: Callable[[nn.Module], Any]) -> None:
    model = Held(hold, lambda held: nn.Identity())
    model.b.again = model.b.forward  # which goes with the layer
    model.all_of_them = [model.inner]  # stays the same object
    assert all(row.compressed for row in tensorize_(model, SMALL).rows)


def test_a_module_that_keeps_its_place_may_be_held() -> None:
    model = nn.ModuleDict({"lstm": nn.LSTM(64, 64), "attention": nn.MultiheadAttention(64, 4)})
    model.order = [model["lstm"], model["attention"]]
    notes = {row.name: row.note for row in tensorize_(model, SMALL).rows if row.compressed}
    assert {"lstm.weight_ih_l0", "attention.in_proj_weight", "attention.out_proj"} <= set(notes)
    assert not any("holds it, too" in note for note in notes.values())
    assert model.order[0] is model["lstm"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # torch's own, in its import
def test_a_layer_compiled_by_itself_stays_dense() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(64, 64)), nn.Linear(64, 64))  # type: ignore[arg-type]
    notes = {row.name: row.note for row in tensorize_(model, SMALL).rows}
    assert "holds it, too" in notes["0._orig_mod"]  # the compiled call is bound to it
    assert notes["1"] == ""


def test_a_model_with_nothing_else_says_why() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    model.order = [model[0]]
    with pytest.raises(ConversionError, match=r"nothing .*0 \(Linear 64 -> 64\): Sequential\.order holds it"):
        tensorize_(model, SMALL)


def test_other_swaps_refuse_before_they_change_anything(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(64, 64))
    tensorize_(plain, SMALL)
    save_pretrained(plain, tmp_path)
    dense = nn.Sequential(nn.Linear(64, 64))
    dense.order = [dense[0]]
    with pytest.raises(ConversionError, match=r"got a Linear: Sequential\.order holds it, too"):
        load_pretrained(dense, tmp_path)
    assert type(dense[0]) is nn.Linear
    plain.order = [plain[0]]
    with pytest.raises(ConversionError, match=r"got a TTLinear: Sequential\.order holds it, too"):
        materialize_(plain)
    assert type(plain[0]) is TTLinear
    adapt_(plain, TTAdapter(), targets="0")
    with pytest.raises(ConversionError, match=r"Sequential\.order holds it, too"):
        merge_adapters_(plain, materialize=True)
    assert isinstance(plain[0], TTLinear)
    assert hasattr(plain[0], "adapter")
