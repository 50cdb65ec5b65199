"""Recomputation: the gradients of a run without it, to the bit, from a fraction of the bytes."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

import comera
from comera.convert import BTT, TT, TTM, TensorizeConfig, materialize_, tensorize_
from comera.errors import ComeraError, ConversionError
from comera.fusion.fuse import fuse_
from comera.memory import recompute
from comera.memory.recompute import find_blocks, recompute_
from comera.nn.linear import TTLinear
from comera.nn.tensor_train import TensorTrain
from comera.rank.budget import round_
from comera.tt.spec import TTSpec

from ...helpers.families import cache_keyword
from ...helpers.live import Live, assert_same

SMALL = TensorizeConfig(linear=TT(order=4, rank=6), embedding=TTM(order=2, rank=4))
BLOCKS = TensorizeConfig(linear=BTT(rank=2), embedding=TTM(order=2, rank=4))
VOCABULARY, WIDTH, BATCH, LENGTH = 64, 64, 4, 24
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 4 * WIDTH,
}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}


class Encoder(nn.Module):
    """A block of one's own: attention by hand, a nested sequence, dropout of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2))
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, gain: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / WIDTH**0.5).softmax(-1)
        x = x + F.alpha_dropout(self.out(scores @ v), 0.1, self.training)
        return x + F.dropout(self.down(self.mix(x)), 0.3, self.training) * gain, scores


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Encoder() for _ in range(2))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x, gain=self.gain)
        return x


def bert() -> nn.Module:
    return BertModel(BertConfig(**TEXT))


def llama() -> nn.Module:
    return LlamaModel(LlamaConfig(**TEXT, num_key_value_heads=1, attention_dropout=0.1))


def gpt2() -> nn.Module:
    return GPT2Model(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2))


def t5() -> nn.Module:
    return T5EncoderModel(
        T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=32, d_ff=128, num_layers=2, num_heads=2, use_cache=False)
    )


def vit() -> nn.Module:
    return ViTModel(ViTConfig(**SIZES, image_size=16, patch_size=4, hidden_dropout_prob=0.1))


MODELS: list[Callable[[], nn.Module]] = [Plain, bert, llama, gpt2, t5, vit]


def made(make: Callable[[], nn.Module], config: TensorizeConfig = SMALL) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    tensorize_(model, config)
    return model.train()


def loss_of(model: Any) -> Tensor:
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, Plain):
        out = model(torch.linspace(-1, 1, BATCH * LENGTH * WIDTH).sin().view(BATCH, LENGTH, WIDTH))
    elif isinstance(inner, ViTModel):
        out = model(torch.linspace(-1, 1, BATCH * 3 * 256).sin().view(BATCH, 3, 16, 16)).last_hidden_state
    else:
        out = model(input_ids=torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 7 % VOCABULARY).last_hidden_state
    return out.square().mean() + out[..., 0].mean()


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Loss, gradients and the next random number of a step."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "random": torch.rand(3), **grads}


WAYS = [(make, fused, SMALL) for fused in (False, True) for make in MODELS]
WAYS += [(make, fused, BLOCKS) for make, fused in ((Plain, False), (bert, True), (llama, False))]


@pytest.mark.parametrize(("make", "fused", "config"), WAYS)
def test_losses_gradients_and_random_numbers_are_those_without_to_the_bit(
    make: Callable[[], nn.Module], fused: bool, config: TensorizeConfig
) -> None:
    model = made(make, config)
    if config is BLOCKS:
        round_(model, 0.7)  # blocks of different ranks
    if fused:
        fuse_(model)
    before = trained(model)
    assert len(before) > 20
    recompute_(model)
    assert_same(trained(model), before)
    assert_same(trained(model), before)


def test_under_autocast_too() -> None:
    model = made(bert)
    with torch.autocast("cpu", torch.bfloat16):
        before = trained(model)
        recompute_(model)
        assert_same(trained(model), before)


@pytest.mark.parametrize("make", [Plain, bert, llama])
def test_a_third_of_the_bytes_is_kept_or_less_and_none_after_the_backward(make: Callable[[], nn.Module]) -> None:
    model = made(make)
    kept = []
    for enabled in (False, True):
        if enabled:
            recompute_(model)
        with Live(model) as live:
            loss = loss_of(model)
            kept.append(live.nbytes)
            loss.backward()
            model.zero_grad()
            assert live.nbytes == loss.nbytes
    assert kept[1] * 3 <= kept[0]


def test_the_backward_draws_nothing_and_repeats_no_narrow_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMERA_KERNELS", "none")  # torch's operations are counted
    model = made(bert)
    narrow, wide, draws = [], [], []
    for enabled in (False, True):
        recompute_(model, enabled=enabled)
        loss = loss_of(model)
        with Live(model) as live:
            loss.backward()
        narrow.append(live.ran.count(("mm.default", (6, BATCH * LENGTH))))
        wide.append(live.ran.count(("mm.default", (BATCH * LENGTH, WIDTH))))
        draws.append([name for name, _ in live.ran if "bernoulli" in name or "random" in name])
    layers = sum(isinstance(module, TTLinear) for module in model.encoder.modules())  # type: ignore[union-attr]
    assert narrow[0] == narrow[1] >= layers  # U = B dyᵀ of every layer, and no P
    assert wide[1] - wide[0] == 2 * 5  # y of q, k, v, out and down
    assert draws == [[], []]


def test_without_gradients_and_in_evaluation_a_block_runs_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(Plain)
    recompute_(model)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("recomputes")

    monkeypatch.setattr(recompute, "checkpoint", refuse)
    with torch.no_grad():
        loss_of(model)
    loss_of(model.eval())
    with pytest.raises(AssertionError, match="recomputes"):
        loss_of(model.train())


class Noisy(nn.Module):
    """A block that draws from a generator of its own once it is told to, by an attribute or by an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale, self.draws = nn.Linear(64, 128), nn.Linear(128, 64), 0.0, torch.Generator()

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        h = self.up(x).relu()
        if scale := scale + self.scale:
            h = h * scale * torch.rand(h.shape, generator=self.draws)
        return self.down(h) + x


@pytest.mark.parametrize("told", ["attribute", "argument"])
def test_a_block_that_computes_otherwise_than_before_is_looked_at_anew(told: str) -> None:
    grads = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model, x = nn.Sequential(Noisy()), torch.randn(64, 64)
        comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=2, rank=4)))
        if recomputes:
            recompute_(model)
        model[0](x).square().sum().backward()
        model.zero_grad()
        model[0].scale = 0.5 if told == "attribute" else 0.0
        model[0](x, **({"scale": 0.5} if told == "argument" else {})).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_a_graph_may_be_walked_twice() -> None:
    model = made(Plain)
    recompute_(model)
    loss = loss_of(model)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None)
    assert any(grad is not None for grad in first)


@pytest.mark.parametrize("make", [Plain, bert])
def test_copies_and_pickles_recompute_and_are_on_their_own(make: Callable[[], nn.Module]) -> None:
    model = made(make)
    names = list(model.state_dict())
    before = trained(model)
    recompute_(model)
    assert list(model.state_dict()) == names
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        assert_same(trained(other), before)
        with Live(other) as live:
            loss = loss_of(other)
            kept = live.nbytes
        plain = copy.deepcopy(other)
        assert len(recompute_(plain, enabled=False).blocks) == 2
        with Live(plain) as live:
            loss = loss_of(plain)
            assert live.nbytes > 3 * kept > 3 * loss.nbytes
        model.load_state_dict(other.state_dict())


def test_a_recomputed_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model = made(bert)
    recompute_(model)
    comera.save_pretrained(model, tmp_path / "ours")
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(tmp_path / "theirs")
    other = bert()
    comera.load_pretrained(other, tmp_path / "ours")
    other.train()
    assert_same(trained(other), trained(model))
    assert (tmp_path / "theirs" / "model.safetensors").stat().st_size > 0


def test_compression_rounding_and_pruning_go_on_under_recomputation() -> None:
    model = made(bert)
    recompute_(model)
    plain = made(bert)
    for each in (model, plain):
        comera.round_(each, 0.5)
    assert_same(trained(model), trained(plain))
    for each in (model, plain):
        optimizer = torch.optim.AdamW(comera.param_groups(each, lr=1e-3))
        ranks = comera.RankController(each).attach(optimizer)
        for train in each.modules():
            if isinstance(train, TensorTrain):
                train.rank_params[0].data[0] = 0.0
        trained(each)
        optimizer.step()
        assert ranks.prune_().changed
    assert_same(trained(model), trained(plain))
    materialize_(model)
    materialize_(plain)
    assert_same(trained(model), trained(plain))
    tensorize_(model, SMALL)
    assert list(find_blocks(model)) == list(recompute_(model).blocks)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_recomputes_without_a_break_in_its_graph() -> None:
    model = made(Plain)
    assert isinstance(model, Plain)
    del model.layers[1]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    recompute_(model)
    before = trained(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    model.zero_grad()
    loss_of(compiled).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name])


def test_a_cache_of_keys_and_values_stays_empty_or_keeps_the_block_as_it_was() -> None:
    model = made(llama)
    before = trained(model)
    recompute_(model)
    assert isinstance(model, LlamaModel)
    out = model(input_ids=torch.ones(1, 5, dtype=torch.int64), use_cache=True)
    keyword = cache_keyword(model)
    assert out[keyword].get_seq_length() == 0
    assert_same(trained(model), before)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.ones(1, 5, dtype=torch.int64), **{keyword: cache})
    assert cache.get_seq_length() == 5
    more = model(input_ids=torch.ones(1, 2, dtype=torch.int64), **{keyword: cache})
    assert more[keyword].get_seq_length() == 7


def layer() -> TTLinear:
    return TTLinear(TTSpec(16, 16, (4, 4), (4, 4), (1, 2, 3, 2, 1)))


def block() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(16), layer(), nn.GELU(), layer())


def test_blocks_are_the_smallest_parts_that_hold_the_layers() -> None:
    trunk = nn.Sequential(nn.Linear(16, 16), nn.Sequential(block(), block()), layer())
    assert list(find_blocks(trunk)) == ["1.0", "1.1"]
    experts = nn.ModuleDict({"attention": block(), "experts": nn.ModuleList([block(), block()])})
    assert list(find_blocks(nn.ModuleList([experts, copy.deepcopy(experts)]))) == ["0", "1"]
    shared = block()
    assert list(find_blocks(nn.ModuleList([shared, shared]))) == ["0"]
    t5_blocks = ["encoder.block.0.layer.0", "encoder.block.0.layer.1"]
    assert list(find_blocks(made(t5)))[:2] == t5_blocks


def test_the_report_names_blocks_and_counts_numbers_a_token() -> None:
    model = nn.ModuleList([block() for _ in range(4)])
    report = recompute_(model)
    assert (report.blocks, report.layers, report.hidden, report.low_rank) == (("0", "1", "2", "3"), 8, 128, 24)
    assert str(report) == (
        "recomputation in 4 blocks (0, ..., 3): their 8 compressed layers keep 24 elements per token instead of 128"
    )
    assert str(recompute_(model, enabled=False)) == "recomputation removed from 4 blocks (0, ..., 3)"
    assert str(recompute_(model, enabled=False)) == "recomputation removed from no block"


def full_rank() -> nn.Sequential:
    """Two layers whose x A has as many elements as their outputs, or more: the second one pads its outputs."""
    return nn.Sequential(*(TTLinear(TTSpec(16, out, (4, 4), (4, 4), (1, 4, 16, 4, 1))) for out in (16, 14)))


def test_a_block_that_would_keep_more_than_it_saves_is_declined_with_the_figure() -> None:
    model = nn.ModuleList([full_rank(), block(), full_rank()])
    with pytest.warns(UserWarning, match="declined in 2 blocks") as warned:
        report = recompute_(model)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == ["1"]
    assert (report.blocks, report.layers, report.hidden, report.low_rank) == (("1",), 2, 32, 6)
    assert report.declined == {"0": (30, 32), "2": (30, 32)}
    assert (
        str(report)
        == str(warned[0].message)
        == (
            "recomputation in 1 block (1): their 2 compressed layers keep 6 elements per token instead of 32\n"
            "declined in 2 blocks (0, 2): their compressed layers would keep 64 elements per token instead of 60; "
            "lower ranks would save some"
        )
    )
    with pytest.warns(UserWarning, match=r"^recomputation in no block\ndeclined in 1 block \(0\)"):
        assert not recompute_(model, blocks="0").blocks
    assert all("forward" not in vars(module) for module in model.modules())


def test_what_block_tensor_trains_keep_is_their_blocks_inputs() -> None:
    """Their components, as many as inputs or more, are made again."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)))
    tensorize_(model, TensorizeConfig(BTT(rank=2), None))
    report = recompute_(model)
    assert (report.hidden, report.low_rank) == (384, 0)
    model(torch.ones(100, 64))  # makes indices of the blocks, which stay
    with Live(model) as live:
        loss = model(torch.ones(200, 64)).sum()
        assert live.nbytes == 4 * 200 * 2 * 64 + loss.nbytes


def test_blocks_can_be_named_and_a_second_call_replaces_the_first() -> None:
    model = nn.ModuleDict({"a": block(), "b": nn.ModuleList([block()]), "c": nn.LayerNorm(16)})
    assert recompute_(model, blocks=["a*", "c"]).blocks == ("a",)
    assert "forward" in vars(model["a"])
    for _ in range(2):
        assert recompute_(model).blocks == ("b.0",)
        assert [name for name, module in model.named_modules() if "forward" in vars(module)] == ["b.0"]
    recompute_(model, enabled=False)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_forward_of_the_instance_is_kept() -> None:
    model = nn.ModuleList([block()])
    own: Any = lambda x: x * 2  # noqa: E731
    model[0].forward = own
    x = torch.randn(3, 16)
    expected = model[0](x)
    recompute_(model)
    assert torch.equal(model[0](x), expected)
    recompute_(model, enabled=False)
    assert vars(model[0])["forward"] is own


@pytest.mark.parametrize(
    ("model", "blocks", "match"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), None, "Sequential has none: compress it first"),
        (nn.Sequential(layer(), layer()), None, "two compressed layers or more, but Sequential has none"),
        (nn.ModuleList([block()]), "b.*", r"has no module with compressed layers that matches 'b\.\*'"),
        (nn.ModuleList([block()]), "0.0", "has no module with compressed layers that matches"),
    ],
)
def test_a_model_without_blocks_is_refused_and_left_alone(model: nn.Module, blocks: str | None, match: str) -> None:
    with pytest.raises(ConversionError, match=match) as refused:
        recompute_(model, blocks=blocks)
    assert isinstance(refused.value, ComeraError)
    assert all("forward" not in vars(module) for module in model.modules())
