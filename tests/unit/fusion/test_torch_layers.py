"""PyTorch's own transformer layers: what is fused in them, and that nothing else changes, their fast path neither."""

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.export.layers import serving_copy
from comera.fusion import sums
from comera.fusion.fuse import fuse_
from comera.memory.recompute import recompute_

from ...helpers.counted import counted
from ...helpers.families import FORMATS
from ...helpers.live import assert_same
from ...helpers.near import assert_near
from ...helpers.torch_layers import KINDS, LAYERS, OPERATIONS, inputs, model, trained

ACTIVATIONS: dict[str, Any] = {"relu": F.relu, "gelu": F.gelu, "nn.GELU": nn.GELU()}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each fused operation ran."""
    return counted(monkeypatch, OPERATIONS)


def expected(kind: str, form: str, *, norm_first: bool) -> Counter[str]:
    """The operations of a forward. A norm that comes first in its layer has no sum before it."""
    norms = (2 if kind == "encoder" else 3) - norm_first
    return Counter({"mlp" if form == "tt" else "activation": LAYERS, "residual norm": norms * LAYERS})


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_model_is_the_plain_one(
    kind: str, norm_first: bool, activation: str, form: str, ran: Counter[str]
) -> None:
    made = model(kind, form, norm_first=norm_first, activation=ACTIVATIONS[activation])
    keys, given = list(made.state_dict()), [inputs(kind), inputs(kind, masked=True)]
    before = [trained(made, each) for each in given]
    assert not ran
    report = fuse_(made)
    assert Counter(row.kind for row in report.rows) == {
        "mlp" if form == "tt" else "activation": LAYERS,
        "pre-norm" if norm_first else "residual norm": LAYERS,
    }
    assert not report.left_alone
    for each, exact in zip(given, before, strict=True):
        ran.clear()
        assert_near(trained(made, each), exact)
        assert ran == expected(kind, form, norm_first=norm_first)
    assert list(made.state_dict()) == keys
    fuse_(made, enabled=False)
    assert_same(trained(made, given[0]), before[0])


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"batch_first": False}, id="sequence first"),
        pytest.param({"bias": False}, id="no biases"),
        pytest.param({"dtype": torch.float64}, id="float64"),
        pytest.param({"activation": torch.relu}, id="torch.relu"),
        pytest.param({"activation": F.silu}, id="silu"),
        pytest.param({"activation": nn.GELU("tanh")}, id="tanh GELU"),
    ],
)
def test_all_their_options(options: dict[str, Any], kind: str, norm_first: bool, ran: Counter[str]) -> None:
    made = model(kind, norm_first=norm_first, **options)
    given = inputs(kind, masked=True, batch_first=options.get("batch_first", True), dtype=options.get("dtype"))
    before = trained(made, given)
    fuse_(made)
    assert_near(trained(made, given), before, 1e-10 if "dtype" in options else 1e-4)
    assert ran == expected(kind, "tt", norm_first=norm_first)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_without_kernels(kind: str, norm_first: bool, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMERA_KERNELS", "none")
    made = model(kind, form, norm_first=norm_first)
    before = trained(made, inputs(kind, masked=True))
    fuse_(made)
    assert_near(trained(made, inputs(kind, masked=True)), before)


def test_one_text_without_a_batch() -> None:
    for kind in KINDS:
        made = model(kind)
        given = {name: t[0] for name, t in inputs(kind).items()}
        before = trained(made, given)
        fuse_(made)
        assert_near(trained(made, given), before)


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_of_a_sum_is_drawn_with_its_norm(
    kind: str, norm_first: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[float] = []
    run = sums.residual_layer_norm
    monkeypatch.setattr(sums, "residual_layer_norm", lambda *given: drawn.append(given[-1]) or run(*given))
    made = model(kind, form, drop=0.3, norm_first=norm_first)
    exact = copy.deepcopy(made).eval()(**inputs(kind)).detach()
    report = fuse_(made)
    assert len(report.fused("activation")) == LAYERS  # dropout before linear2 needs the hidden activation
    assert report.dropout == (3 if kind == "encoder" else 4) * LAYERS
    found, again = trained(made, inputs(kind)), trained(made, inputs(kind))
    assert drawn == [0.3] * 2 * expected(kind, form, norm_first=norm_first)["residual norm"]
    assert all(t.isfinite().all() for t in found.values())
    assert_same(found, again)  # one seed, the same masks
    assert not torch.allclose(found["out"], exact, rtol=1e-3, atol=1e-3)
    drawn.clear()
    assert_near({"out": made.eval()(**inputs(kind)).detach()}, {"out": exact})
    assert set(drawn) == {0.0}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", ["dropout", "dropout1", "dropout2", "dropout3"])
def test_dropout_alone_keeps_the_mean(name: str, norm_first: bool) -> None:
    """One dropout of the three or four in a layer, often: its results are those of torch's, on average."""
    layer = model("decoder", norm_first=norm_first).layers[0]
    getattr(layer, name).p = 0.5
    tgt, memory = (t[:1].expand(4000, -1, -1) for t in inputs("decoder").values())
    means = []
    for enabled in (False, True):
        fuse_(layer, enabled=enabled)
        with torch.no_grad():
            out = layer(tgt, memory)
        means.append(out.mean(0))
        assert out.std(0).max() > 0.05
        error = out.std(0) / 4000**0.5
    assert ((means[1] - means[0]).abs() < 7 * error + 1e-5).all()


# --- who else looks at a layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("late", [False, True])
def test_hooks_see_every_call(late: bool, kind: str, norm_first: bool, ran: Counter[str]) -> None:
    options = {"norm_first": norm_first, "activation": nn.GELU()}
    exact = trained(model(kind, **options), inputs(kind))
    names = ["self_attn", "linear1", "activation", "linear2", "dropout", "dropout1", "dropout2", "norm1", "norm2"]
    for name in names + ["dropout3", "norm3", "multihead_attn"] * (kind == "decoder"):
        made, calls = model(kind, **options), []
        if late:
            fuse_(made)
        hooked = [layer.get_submodule(name) for layer in made.layers]
        for module in hooked:
            module.register_forward_hook(lambda module, *_, calls=calls: calls.append(module))
        if not late:
            fuse_(made)
        ran.clear()
        assert_near(trained(made, inputs(kind)), exact)
        assert calls == hooked
        if name in ("linear1", "activation", "linear2", "dropout"):
            assert not ran["mlp"]


def test_methods_of_somebody_else_stay() -> None:
    made = model("encoder", drop=0.5)
    first, second = made.layers
    own = first._sa_block

    def doubled(*args: Any, **kwargs: Any) -> Tensor:
        return 2 * own(*args, **kwargs)

    first._sa_block = doubled
    second._ff_block = lambda x: torch.zeros_like(x)
    plain = copy.deepcopy(made).eval()
    report = fuse_(made)
    assert [row.name + ": " + row.reason for row in report.left_alone] == [
        "layers.1: its _ff_block was replaced by someone else"
    ]
    assert len(report.fused("residual norm")) == LAYERS
    assert trained_out(made).isfinite().all()
    assert_near({"out": trained_out(made.eval())}, {"out": trained_out(plain)})


def trained_out(made: nn.Module) -> Tensor:
    out: Tensor = made(**inputs("encoder"))
    return out.detach()


def test_subclasses_and_other_activations_are_left_alone() -> None:
    class Own(nn.TransformerEncoderLayer):
        def _ff_block(self, x: Tensor) -> Tensor:
            return super()._ff_block(x)

    assert fuse_(Own(48, 4, 80)).rows == ()
    report = fuse_(model("encoder", activation=torch.tanh))
    assert {row.reason for row in report.left_alone} == {"no kernel for the activation tanh"}
    assert len(report.fused("residual norm")) == LAYERS
    made = model("encoder", activation=nn.Tanh())
    made.layers[0].dropout2 = nn.Dropout(0.1, inplace=True)
    made.layers[1].norm2 = nn.RMSNorm(48)
    assert {row.reason for row in fuse_(made).left_alone} == {
        "no kernel for the activation Tanh",
        "its dropout works in place",
        "its norm is a RMSNorm, not an nn.LayerNorm",
    }
    trained_out(made)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_run_on_their_own_weights(kind: str) -> None:
    made = model(kind)
    fuse_(made)
    before = trained(made, inputs(kind))
    second, other = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.5)
    assert_same(trained(second, inputs(kind)), before)
    assert_same(trained(other, inputs(kind)), before)
    assert not torch.equal(trained(made, inputs(kind))["out"], before["out"])


def test_a_copied_decoder_layer_computes_what_torch_makes_of_it() -> None:
    made = copy.deepcopy(model("decoder", "dense", activation=nn.GELU()))
    exact = trained(made, inputs("decoder"))
    fuse_(made)
    assert_near(trained(made, inputs("decoder")), exact)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_and_autocast_keep_the_signal(kind: str, norm_first: bool, form: str) -> None:
    exact = model(kind, form, norm_first=norm_first)
    wanted = exact(**inputs(kind)).detach().double()
    for made, autocast in ((copy.deepcopy(exact).bfloat16(), False), (copy.deepcopy(exact), True)):
        given = inputs(kind, dtype=torch.float32)
        if not autocast:
            given = {name: t.bfloat16() for name, t in given.items()}
        noises, types = [], set()
        for on in (False, True):
            fuse_(made, enabled=on)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = made(**given)
            out.float().square().sum().backward()
            types.add(out.dtype)
            noises.append((out.detach().double() - wanted).square().sum() / wanted.square().sum())
        assert noises[1] < 1.5 * noises[0] + 1e-4
        assert len(types) == 1


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_repeats_it(kind: str, norm_first: bool) -> None:
    made = model(kind, drop=0.3, norm_first=norm_first)
    fuse_(made)
    before = trained(made, inputs(kind))
    recompute_(made)
    assert_near(trained(made, inputs(kind)), before, 1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch.compile
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_runs_as_before(kind: str, ran: Counter[str]) -> None:
    made = model(kind, norm_first=kind == "decoder")
    before = trained(made, inputs(kind))
    fuse_(made)
    torch._dynamo.reset()
    compiled: Any = torch.compile(made, backend="aot_eager")
    assert_near(trained(compiled, inputs(kind)), before)
    assert not ran


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transforms_of_functions() -> None:
    made = model("encoder")
    fuse_(made)
    x, exact = inputs("encoder")["src"], trained_out(made)

    def run(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(made, parameters, (one[None],))
        return out[0]

    parameters = {name: p.detach() for name, p in made.named_parameters()}
    found = torch.func.vmap(run, (None, 0), randomness="different")(parameters, x)
    assert_near({"out": found}, {"out": exact})


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
