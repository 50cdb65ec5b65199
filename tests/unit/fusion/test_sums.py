"""Residual sums that wait for their norm: in blocks of transformers, and in blocks that use them otherwise."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import comera
from comera.fusion import EmbeddingNorm, PreNorm, embedding_norm, fuse_, register_block, sums
from comera.fusion import norm as norms

from ...helpers.families import inputs, model, trained
from ...helpers.near import assert_near

# name -> dropout of the sums of a block that are computed with their norms; ModernBERT's is drawn in its attention
SUMS = {"modernbert": [0.0], "vit": [0.3], "gpt2": [0.3], "opt": [0.3], "opt, post-norm": [0.3, 0.3]}


@pytest.mark.parametrize("name", SUMS)
def test_dropout_of_a_sum_is_drawn_with_its_norm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    run = sums.residual_layer_norm

    def spied(*given: Any) -> Any:
        drawn.append(given[-1])
        return run(*given)

    monkeypatch.setattr(sums, "residual_layer_norm", spied)
    made = model(name, drop=0.3)
    fuse_(made)
    trained(made, name)
    assert drawn == SUMS[name] * 2
    drawn.clear()
    trained(made.eval(), name)
    assert drawn == [0.0] * len(SUMS[name]) * 2


def test_blocks_with_more_than_two_norms_and_recorded_attention_stay() -> None:
    made = model("gpt2", add_cross_attention=True, attn_implementation="eager")
    plain = copy.deepcopy(made)
    assert len(fuse_(made).fused("pre-norm")) == 2
    given = inputs("gpt2") | {"encoder_hidden_states": torch.randn(4, 9, 48), "output_attentions": True}
    results = []
    for each in (made, plain):
        out = each(**given)
        out.loss.backward()
        tensors = [t.detach() for t in tree_leaves([out.loss, out.logits, out.attentions])]
        grads = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
        results.append(dict(zip("01234567", tensors, strict=False)) | grads)
    assert_near(*results)
    assert len(results[0]) > len(list(made.parameters())) + 2


class Block(nn.Module):
    """A block of an own type, with what its forward does to the first sum."""

    def __init__(self, norm: nn.Module, between: Callable[[Any], Any] = lambda total: total) -> None:
        super().__init__()
        self.first, self.second, self.between = LlamaRMSNorm(8), norm, between
        self.mix, self.mlp, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.between(self.drop(self.mix(self.first(x))) + x)
        return y + self.mlp(self.second(y)), y


register_block(Block, PreNorm("first", ("drop",), "second"))


@pytest.mark.parametrize("norm", [LlamaRMSNorm, nn.LayerNorm])
def test_own_blocks_return_what_they_did(norm: Callable[[int], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[bool] = []
    run = norms.residual_rms_norm
    monkeypatch.setattr(norms, "residual_rms_norm", lambda z, *given: summed.append(z is not None) or run(z, *given))
    made, x = Block(norm(8)).eval(), torch.randn(3, 8)
    expected = made(x)
    assert fuse_(made).fused("pre-norm") == ("",)
    for found in (made(x), made(x=x)):
        assert type(found) is tuple
        torch.testing.assert_close(found, expected)
    assert summed == [False, True, False, True] if norm is LlamaRMSNorm else [False, False]
    made.train()
    _, y = made(x)
    kept = y != x
    assert 0 < kept.sum() < kept.numel()  # dropout leaves some of x as it is
    torch.testing.assert_close(y[kept], (2 * expected[1] - x)[kept])
    with pytest.raises(TypeError):
        made()


@pytest.mark.parametrize(
    "between",
    [
        lambda total: total.tanh(),
        torch.sigmoid,
        lambda total: nn.functional.dropout(total, 0.0),
        lambda total: total + total,
        lambda total: torch.ones(8) + total,
        lambda total: 1.0 + total,
        lambda total: 2.0 * total - total / 3 + (1.0 - total) * total - 1.0 / (2.0 + total**2),
        lambda total: torch.cat([-total[:1], total[1:] @ torch.eye(8)])[: len(total)],
        lambda total: total.view(1, 3, 8).reshape(-1, total.size(-1)).view(total.shape),
        lambda total: total.new_zeros(total.shape) + total.to(total.dtype),
    ],
)
@pytest.mark.parametrize("norm", [LlamaRMSNorm, nn.LayerNorm])
def test_a_sum_that_is_used_otherwise_is_a_tensor(norm: Callable[[int], nn.Module], between: Any) -> None:
    made, x = Block(norm(8), between).eval(), torch.randn(3, 8, requires_grad=True)
    results = []
    for enabled in (False, True):
        fuse_(made, enabled=enabled)
        out, y = made(x)
        results.append([out, y, *torch.autograd.grad(out.square().sum() + y.sin().sum(), [x, *made.parameters()])])
    torch.testing.assert_close(*results)


# --- sums of embeddings and their norm --------------------------------------------------------------------------------


SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 50,
    "max_position_embeddings": 40,
    "type_vocab_size": 3,
    "hidden_dropout_prob": 0.0,
}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: BertModel(BertConfig(**SIZES)).embeddings,
    "roberta": lambda: RobertaModel(RobertaConfig(**SIZES)).embeddings,  # position 1 is that of padding
}


def embeddings(name: str) -> nn.Module:
    torch.manual_seed(0)
    made = MODELS[name]()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shape of the table of each fused operation."""
    shapes = []
    operation = embedding_norm.residual_layer_norm

    def run(z: Tensor, table: Tensor, *given: Any, **rows: Any) -> Any:
        shapes.append(table.shape)
        return operation(z, table, *given, **rows)

    monkeypatch.setattr(embedding_norm, "residual_layer_norm", run)
    return shapes


def ids(samples: int, tokens: int) -> Tensor:
    made = torch.randint(2, 50, (samples, tokens), generator=torch.Generator().manual_seed(1))
    made[0, tokens // 2 :] = 1  # padding
    return made


def results(made: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    made.zero_grad()
    y = made(**inputs)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return {"y": y.detach(), **{name: p.grad for name, p in made.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("setting", ["all", "none"])
@pytest.mark.parametrize(("samples", "tokens"), [(1, 1), (1, 9), (2, 38), (60, 5)])
@pytest.mark.parametrize("name", MODELS)
def test_a_sum_and_its_norm_are_one_operation(
    name: str, samples: int, tokens: int, setting: str, calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMERA_KERNELS", setting)
    plain, read = embeddings(name), ids(samples, tokens)
    fused = copy.deepcopy(plain)
    assert fuse_(fused).fused("embedding norm") == ("",)
    types, positions = read % 3, (torch.arange(tokens) * 3 % 40).expand(samples, tokens)
    given: list[dict[str, Any]] = [{}, {"token_type_ids": types}, {"position_ids": positions}]
    given += [{"token_type_ids": types, "position_ids": positions[:1]}]
    for chosen in given:
        assert_near(results(fused, input_ids=read, **chosen), results(plain, input_ids=read, **chosen))
    vectors = torch.randn(samples, tokens, 24)
    assert_near(results(fused, inputs_embeds=vectors), results(plain, inputs_embeds=vectors))
    assert len(calls) == 5
    assert all(rows <= samples * tokens for rows, _ in calls)


def test_padding_learns_no_position(calls: list[torch.Size]) -> None:
    for samples in (2, 60):  # as many ids as rows, or more
        made = embeddings("roberta")
        fuse_(made)
        found = results(made, input_ids=ids(samples, 6))["position_embeddings.weight"]
        assert found[1].count_nonzero() == 0
        assert found[2].count_nonzero()
    assert calls


def test_one_table_serves_all_samples(calls: list[torch.Size]) -> None:
    made = embeddings("bert")
    fuse_(made)
    made(input_ids=ids(60, 5))
    assert calls == [(3 * 5, 24)]  # a row for each type and position


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torchs(dtype: torch.dtype) -> None:
    plain = embeddings("bert").to(dtype)
    fused = copy.deepcopy(plain)
    fuse_(fused)
    found, exact = (made(input_ids=ids(60, 5)) for made in (fused, plain))
    assert found.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 2**-6
    torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance)


def test_autocast_leaves_the_sum_to_torch(calls: list[torch.Size]) -> None:
    plain = embeddings("bert")
    fused = copy.deepcopy(plain)
    fuse_(fused)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fused(input_ids=ids(2, 38)), plain(input_ids=ids(2, 38)))
    assert not calls


def _hooked(made: nn.Module) -> None:
    made.position_embeddings.register_forward_hook(lambda *_: None)


def _bounded(made: nn.Module) -> None:
    made.token_type_embeddings.max_norm = 1.0


def _sparse(made: nn.Module) -> None:
    made.position_embeddings.sparse = True


def _compressed(made: nn.Module) -> None:
    formats = comera.TensorizeConfig(None, comera.TTM(order=2, rank=2), overrides={"word_embeddings": None})
    comera.tensorize_(made, formats)


def _other_norm(made: nn.Module) -> None:
    made.LayerNorm = nn.RMSNorm(24)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hooked, "position_embeddings has hooks"),
        (_bounded, "token_type_embeddings has max_norm, scale_grad_by_freq or sparse gradients"),
        (_sparse, "position_embeddings has max_norm, scale_grad_by_freq or sparse gradients"),
        (_compressed, "_embeddings is a TTMEmbedding, not an nn.Embedding"),
        (_other_norm, "its norm is a RMSNorm, not an nn.LayerNorm"),
    ],
)
def test_what_stands_in_the_way_is_said_now_and_seen_later(
    change: Callable[[nn.Module], None], reason: str, calls: list[torch.Size]
) -> None:
    made = embeddings("bert")
    change(made)
    (row,) = fuse_(made).left_alone
    assert row.kind == "embedding norm"
    assert row.reason.endswith(reason)
    later = embeddings("bert")
    fuse_(later)
    change(later)
    plain = copy.deepcopy(later)
    fuse_(plain, enabled=False)
    assert torch.equal(later(input_ids=ids(60, 5)), plain(input_ids=ids(60, 5)))
    assert not calls


class Sums(nn.Module):
    """Uses its sums in other ways, too."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.kind, self.place = (nn.Embedding(9, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        kinds, places = self.kind(ids % 3), self.place(ids % 5)
        rows = kinds + places
        summed = rows + self.token(ids)
        y = self.norm(summed) + summed * 2 + rows.view(-1, 8).view_as(summed) + torch.relu(kinds) - places[:1]
        return y + self.norm(rows) + self.norm(self.token(ids) + torch.ones(8) + places)


def test_sums_that_are_used_otherwise(calls: list[torch.Size]) -> None:
    register_block(Sums, EmbeddingNorm(("kind", "place"), "norm"))
    torch.manual_seed(0)
    plain = Sums()
    fused = copy.deepcopy(plain)
    fuse_(fused)
    read = torch.arange(40).view(4, 10) % 9
    assert_near(results(fused, ids=read), results(plain, ids=read))
    assert len(calls) == 2


def test_an_id_outside_its_table_is_no_row_of_another_pair() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    made = RobertaModel(RobertaConfig(vocab_size=99, max_position_embeddings=18, **sizes)).eval()
    assert fuse_(made).fused("embedding norm")
    ids = torch.randint(4, 99, (8, 24))  # the table has positions for 16 tokens
    with pytest.raises(IndexError):
        made(ids, token_type_ids=torch.zeros_like(ids))
