"""PyTorch's own transformer layers in evaluation: their fast path stays, and results are those of plain layers."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comera.export.layers import serving_copy
from comera.fusion.fuse import fuse_

from ...helpers.counted import counted
from ...helpers.families import FORMATS
from ...helpers.near import assert_near
from ...helpers.torch_layers import KINDS, LAYERS, OPERATIONS, inputs, model, trained


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each fused operation ran."""
    return counted(monkeypatch, OPERATIONS)


# --- evaluation, and the fast path of an encoder layer ----------------------------------------------------------------


def padded(out: Tensor, given: dict[str, Any]) -> Tensor:
    """Without what is said of padding: nested tensors have zeros there."""
    padding = given.get("src_key_padding_mask", given.get("tgt_key_padding_mask"))
    return out.detach() if padding is None else out.detach()[~padding]


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor is True:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation(kind: str, norm_first: bool, form: str, ran: Counter[str]) -> None:
    made = model(kind, form, drop=0.3, nested=kind == "encoder", norm_first=norm_first).eval()
    plain = copy.deepcopy(made)
    fuse_(made)
    full = inputs(kind, masked=True)
    padding = "src_key_padding_mask" if kind == "encoder" else "tgt_key_padding_mask"
    for given in (inputs(kind), full, inputs(kind) | {padding: full[padding]}):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                ran.clear()
                exact, fast = plain(**given), ran["fast path"]
                assert bool(fast) == (kind == "encoder" and form == "dense" and not grad)
                ran.clear()
                found = made(**given)
            assert ran["fast path"] == fast  # as it was
            assert bool(ran["residual norm"]) == (not fast)
            assert_near({"out": padded(found, given)}, {"out": padded(exact, given)})
            if fast:
                assert torch.equal(found, exact)
        with torch.inference_mode():
            assert_near({"out": padded(made(**given), given)}, {"out": padded(exact, given)})
    assert_near(trained(made, full), trained(plain, full))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_nested_tensors(norm_first: bool, hooked: bool, ran: Counter[str]) -> None:
    layer = model("encoder", "dense", norm_first=norm_first).layers[0].eval()
    if hooked:  # keeps the layer from its fast path, but not its attention
        layer.linear1.register_forward_hook(lambda *_: None)
    nested = torch.nested.nested_tensor([torch.randn(4, 48), torch.randn(6, 48)])
    with torch.no_grad():
        exact = layer(nested)
        fuse_(nn.Sequential(layer))
        found = layer(nested)
    assert bool(ran["fast path"]) == (not hooked)
    for one, other in zip(found.unbind(), exact.unbind(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_frozen_layers_take_their_fast_path_with_gradients_enabled(ran: Counter[str]) -> None:
    made = model("encoder", "dense").eval().requires_grad_(False)
    exact = made(**inputs("encoder"))
    fuse_(made)
    assert torch.equal(made(**inputs("encoder")), exact)
    assert ran == {"fast path": 2 * LAYERS}


def test_a_served_copy_of_a_fused_model() -> None:
    for kind in KINDS:
        made = model(kind)
        fuse_(made)
        served = serving_copy(made)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                found, exact = served(**inputs(kind)), made.eval()(**inputs(kind))
            assert_near({"out": found.detach()}, {"out": exact.detach()})
