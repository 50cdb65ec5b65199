"""fuse_: the same results from cheaper surroundings, on models of transformers and on plain modules."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import comera
from comera.errors import ConversionError
from comera.fusion import MLP, QKV, PostNorm, register_block
from comera.fusion.dropout import Dropout
from comera.fusion.fuse import fuse_
from comera.ops.attention import attention
from comera.ops.dropout import keep_mask
from comera.ops.low_rank import low_rank
from comera.ops.mlp import mlp

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, "hidden_size": 32}
MODELS = {
    "bert": lambda drop: BertForSequenceClassification(
        BertConfig(**SIZES, intermediate_size=64, hidden_dropout_prob=drop, attention_probs_dropout_prob=drop)
    ),
    "llama": lambda drop: LlamaModel(
        LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=2, attention_dropout=drop)
    ),
    "gpt2": lambda drop: GPT2Model(
        GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=50, resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop,
            bos_token_id=0, eos_token_id=0,
        )
    ),
}  # fmt: skip
CONFIG = comera.TensorizeConfig(linear=comera.TT(order=4, rank=6), embedding=None)


def model(name, drop=0.0):
    torch.manual_seed(0)
    made = MODELS[name](drop).double()
    comera.tensorize_(made, CONFIG)
    return made


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("comera.ops.chunking.CHUNK_CPU", 1000)


def results(made, seed=3):
    torch.manual_seed(seed)
    made.zero_grad()
    out = made(input_ids=torch.arange(80).view(4, 20) % 50, attention_mask=torch.ones(4, 20, dtype=torch.long))[0]
    out.square().sum().backward()
    return out.detach(), [p.grad for p in made.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_stay(name):
    plain = model(name)
    fused = copy.deepcopy(plain)
    report = fuse_(fused)
    assert len(report.fused("mlp")) == 2
    assert report.fused("attention")
    assert len(report.fused("qkv")) == (0 if name == "gpt2" else 2)
    assert not report.left_alone
    for found, exact in zip(results(fused), results(plain), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-10)
    assert fused.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("name", MODELS)
def test_takes_back_and_repeats(name):
    plain, fused = model(name), model(name)
    assert str(fuse_(fused)) == str(fuse_(fused))
    before = results(plain)
    assert fuse_(fused, enabled=False).fused("mlp")
    after = results(fused)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not any(type(m) is Dropout for m in fused.modules())


def test_copies_and_pickles():
    fused = model("bert")
    fuse_(fused)
    other = copy.deepcopy(fused)
    for p in other.parameters():
        p.data.zero_()
    assert results(other)[0].count_nonzero() == 0  # the copy runs on its own weights
    buffer = io.BytesIO()
    torch.save(fused, buffer)
    buffer.seek(0)
    torch.testing.assert_close(results(torch.load(buffer, weights_only=False))[0], results(fused)[0])


def test_queries_keys_and_values_come_from_one_product(monkeypatch):
    made, counts = model("bert"), []
    monkeypatch.setattr(
        "comera.fusion.qkv.low_rank", lambda x, *factors: counts.append(len(factors)) or low_rank(x, *factors)
    )
    fuse_(made)
    results(made)
    assert counts == [3, 3]  # once in each of the two layers


@pytest.mark.parametrize("name", MODELS)
def test_each_block_runs_as_one_operation(name, monkeypatch):
    made, calls = model(name), []
    for room, operation in (("mlp", mlp), ("qkv", low_rank)):
        monkeypatch.setattr(
            f"comera.fusion.{room}.{operation.__name__}", lambda *args, o=operation, r=room: calls.append(r) or o(*args)
        )
    fuse_(made)
    results(made)
    assert sorted(calls) == ["mlp"] * 2 + ["qkv"] * (0 if name == "gpt2" else 2)


def test_projections_called_by_themselves_or_with_another_input_compute_it():
    made = model("bert")
    fuse_(made)
    layer, x = made.bert.encoder.layer[0].attention.self, torch.randn(5, 32, dtype=torch.float64)
    expected = x @ layer.key.weight.t() + layer.key.bias
    torch.testing.assert_close(layer.key(x), expected)

    class Crossed(type(layer)):  # whose forward gives its key something else
        def forward(self, hidden_states):
            return self.query(hidden_states), self.key(2 * hidden_states)

    register_block(Crossed, QKV(("query", "key", "value")))
    layer.__class__ = Crossed
    fuse_(made)
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[1] - layer.key.bias, 2 * (expected - layer.key.bias))


def test_copies_of_a_layer_compute_by_themselves():
    made = model("bert")
    fuse_(made)
    layer = made.bert.encoder.layer[0].attention.self.query
    replica = copy.copy(layer)
    replica._parameters = dict(layer._parameters)
    replica.bias = nn.Parameter(layer.bias + 1)
    x = torch.randn(500, 32, dtype=torch.float64)
    torch.testing.assert_close(replica(x), layer(x) + 1)


def test_one_seed_fixes_the_masks():
    fused = model("bert", drop=0.2)
    fuse_(fused)
    first, again, other = results(fused), results(fused), results(fused, seed=4)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0], other[0])


def test_what_is_left_alone_is_said_with_the_reason():
    made = model("bert")
    first, second = made.bert.encoder.layer
    first.intermediate.register_forward_hook(lambda *_: None)
    first.attention.self.key = nn.Linear(32, 32).double()
    second.output.dropout = nn.Dropout(0.1, inplace=True)
    second.attention.output.LayerNorm = nn.RMSNorm(32).double()
    second.intermediate.intermediate_act_fn = nn.Tanh()
    report = fuse_(made)
    assert {(row.name.removeprefix("bert.encoder."), row.kind): row.reason for row in report.left_alone} == {
        ("layer.0", "mlp"): "intermediate has hooks",
        ("layer.0.attention.self", "qkv"): "key is a Linear, not a TTLinear",
        ("layer.1", "mlp"): "no kernel for the activation Tanh",
        ("layer.1.attention.output", "residual norm"): "its norm is a RMSNorm, not an nn.LayerNorm",
        ("layer.1.output", "residual norm"): "its dropout works in place",
    }
    second.output.dropout = nn.AlphaDropout(0.1)  # which is called
    assert "bert.encoder.layer.1.output" in fuse_(made).fused("residual norm")
    assert "left alone: bert.encoder.layer.0 (mlp): intermediate has hooks" in str(report)
    made.config._attn_implementation = "eager"
    assert "it uses the attention 'eager', not 'sdpa'" in str(fuse_(made, enabled=False))


def test_hooks_of_a_later_day_see_their_layer():
    made, seen = model("bert"), []
    fuse_(made)
    layer = made.bert.encoder.layer[0]
    other = made.bert.encoder.layer[1]  # whose activation alone would be fused, but for what is around it
    parts = [layer.attention.self.query, layer.intermediate.dense, layer.output.LayerNorm]
    parts += [other.intermediate, other.output]
    for part in parts:
        part.register_forward_hook(lambda *args: seen.append(args[0]))
    results(made)
    assert set(seen) == set(parts)
    assert len(seen) == len(parts)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def test_own_types_can_be_registered():
    plain = nn.Sequential(Mlp()).double()
    comera.tensorize_(plain, CONFIG)
    x = torch.randn(40, 16, dtype=torch.float64)
    assert not fuse_(plain).fused("mlp")
    before = plain(x)
    with pytest.raises(ConversionError, match="expected a method of Mlp, got the name 'run'"):
        register_block(Mlp, MLP("run", ("up",), "act", "down"))
    register_block(Mlp, MLP("forward", ("up",), "act", "down"))
    assert fuse_(plain).fused("mlp") == ("0",)
    torch.testing.assert_close(plain(x), before)


class Gated(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)
        self.act, self.drop, self.body = nn.SiLU(), nn.Dropout(0.5), body

    def forward(self, x):
        return self.body(self, x)


BODIES = {
    "usual": lambda m, x: m.down(m.act(m.gate(x)) * m.up(x)),
    "turned": lambda m, x: m.down(m.up(x) * m.act(m.gate(x))),
    "the other is activated": lambda m, x: m.down(m.act(m.up(x)) * m.gate(x)),
    "twice": lambda m, x: m.down(m.act(m.act(m.gate(x))) * m.up(x)),
    "scaled": lambda m, x: m.down(2 * m.act(m.gate(x)) * m.up(x)),
    "of two inputs": lambda m, x: m.down(m.act(m.gate(x)) * m.up(x + 1)),
    "added": lambda m, x: m.down(m.act(m.gate(x)) + m.up(x)),
    "without a gate": lambda m, x: m.down(m.act(m.gate(x))),
    "in parts": lambda m, x: m.down(torch.cat(m.act(m.gate(x)).chunk(2, -1), -1) * m.up(x)),
    "dropped by a function": lambda m, x: m.down(F.dropout(m.act(m.gate(x)) * m.up(x), 0.5, m.training)),
    "dropped by a module": lambda m, x: m.down(m.drop(m.act(m.gate(x)) * m.up(x))),
    "returned, too": lambda m, x: m.down(m.act(m.gate(x)) * m.up(x)) + (m.act(m.gate(x)) * m.up(x)).sum(),
    "through other layers": lambda m, x: m.down(m.up(m.down(m.gate(x)))),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("form", [CONFIG, None], ids=["tt", "dense"])
@pytest.mark.parametrize("body", BODIES)
def test_whatever_a_method_does_with_its_layers(body, form, train, monkeypatch):
    register_block(Gated, MLP("forward", ups=("gate", "up"), activation="act", down="down"))
    torch.manual_seed(0)
    fused = nn.Sequential(Gated(BODIES[body])).double().train(train)
    if form is not None:
        comera.tensorize_(fused, form)
    monkeypatch.setattr("comera.fusion.dropout.dropout", lambda x, p: F.dropout(x, p))  # torch's masks
    x = torch.randn(40, 16, dtype=torch.float64)
    found = []
    for enabled in (False, True):
        report = fuse_(fused, enabled=enabled)
        torch.manual_seed(1)
        y = fused(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(fused.parameters()), allow_unused=True)])
    assert report.fused("mlp" if form is not None else "gated activation") == ("0",)
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


def test_dropout_zeroes_the_share_and_keeps_the_mean():
    torch.manual_seed(0)
    keep, scale = keep_mask((1000, 1000), 0.1)
    assert abs(keep.double().mean().item() - 0.9) < 5 * (0.09 / 1e6) ** 0.5
    assert scale == pytest.approx(1 / 0.9, rel=1e-4)
    columns, rows = keep.double().mean(0), keep.double().mean(1)
    for means in (columns, rows):  # no period of the draws shows
        assert means.std().item() == pytest.approx((0.09 / 1000) ** 0.5, rel=0.15)


@pytest.mark.parametrize("shape", [(0,), (3, 5), (7, 1001)], ids=str)
def test_dropout_gradient_has_the_mask_of_its_value(shape):
    layer = Dropout(0.3)
    x = torch.randn(shape, dtype=torch.float64).add(3).requires_grad_()
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(y, x * dx)
    assert torch.equal(layer.eval()(x), x)
    assert Dropout(0.0)(x) is x or torch.equal(Dropout(0.0)(x), x)
    assert Dropout(1.0)(x).count_nonzero() == 0


@pytest.mark.parametrize("kind", ["none", "bool", "expanded", "matrix", "open", "added"])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_agrees_with_the_formula(kind, heads, dropout, monkeypatch):
    torch.manual_seed(0)
    masks = []

    def spy(shape, p):
        masks.append(keep_mask(shape, p))
        return masks[-1]

    monkeypatch.setattr("comera.ops.attention.keep_mask", spy)
    q = torch.randn(5, 4, 9, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(5, heads, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = {
        "none": None,
        "bool": torch.rand(5, 1, 9, 7) > 0.3,
        "expanded": (torch.rand(5, 1, 1, 7) > 0.3).expand(5, 4, 9, 7),
        "matrix": torch.rand(9, 7) > 0.3,
        "open": torch.ones(5, 1, 9, 7, dtype=torch.bool),
        "added": torch.randn(1, 1, 9, 7).double(),
    }[kind]
    found = attention(q, k, v, mask, dropout=dropout)
    keep, scale = masks[0] if dropout else (torch.ones(()), 1.0)
    kk, vv = (t.repeat_interleave(4 // heads, 1) for t in (k, v))
    scores = q @ kk.transpose(2, 3) / 8**0.5
    if kind == "added":
        scores = scores + mask
    elif mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    exact = (scores.softmax(-1).nan_to_num() * keep * scale) @ vv
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    do = torch.randn_like(exact)
    pair = (torch.autograd.grad(o, (q, k, v), do) for o in (found, exact))
    torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-10)


def test_autocast_leaves_the_products_of_attention_alone():
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 4, 16, 8).bfloat16() for _ in range(3))
    found = []
    for enabled in (True, False):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found.append(attention(q, k, v, dropout=0.2))
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(*found)


def test_attention_in_bfloat16_keeps_the_signal():
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 4, 16, 8).bfloat16() for _ in range(3))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    noise = attention(q, k, v).double() - exact
    assert 10 * torch.log10(exact.square().sum() / noise.square().sum()) > 45


class ScalesItsInput(nn.Module):
    """An MLP whose input changes in place before it is read."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x):
        hidden = self.up(x)
        x.mul_(0.5)
        return self.down(self.act(hidden)) + x


class ClearsItsInput(nn.Module):
    """A residual whose other term is gone before the norm reads the sum."""

    def __init__(self):
        super().__init__()
        self.mix, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x):
        total = x + self.mix(x)
        x.zero_()
        return self.norm(total)


class MovesItsInput(nn.Module):
    """Projections of two values of one tensor."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        v = self.v(x)
        x += 1
        return F.scaled_dot_product_attention(self.q(x), self.k(x), v)


@pytest.mark.parametrize("form", [comera.TT(order=4, rank=8), comera.BTT(rank=2)], ids=str)
@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        (ScalesItsInput, MLP("forward", ups=("up",), activation="act", down="down")),
        (ClearsItsInput, PostNorm((("mix", "norm"),))),
        (MovesItsInput, QKV(("q", "k", "v"))),
    ],
)
def test_what_a_block_writes_in_place_is_not_read_in_silence(kind, pattern, form):
    torch.manual_seed(0)
    register_block(kind, pattern)
    layers = nn.Sequential(kind()).requires_grad_(False)
    comera.tensorize_(layers, comera.TensorizeConfig(form))
    x = torch.randn(2, 64, 64)
    exact = layers(x.clone())
    assert fuse_(layers).rows
    if kind is MovesItsInput:  # whose layers can still be called
        torch.testing.assert_close(layers(x.clone()), exact, rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(ConversionError, match=r"got another value written in place.*do not register"):
            layers(x.clone())
