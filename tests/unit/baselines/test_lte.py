"""LTE against a plain formula, head by head: its split of the batch, its merge, what it trains."""

import pytest
import torch
from torch import Tensor, nn

from comera.baselines.lte import LTE, LTELinear, lte_, merge_, parts
from comera.errors import ConfigError, ConversionError
from comera.trainer.config import TrainConfig

IN, OUT, HEADS, RANK, ALPHA = 7, 5, 6, 3, 12.0


def layer(heads: int = HEADS, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> LTELinear:
    torch.manual_seed(0)
    made = LTELinear(nn.Linear(IN, OUT, bias=bias, dtype=dtype), heads, RANK, ALPHA)
    made.up.data.normal_()
    return made


def by_hand(made: LTELinear, x: Tensor) -> Tensor:
    """Each example through the weight, and through the mean of the heads whose part it is in."""
    heads, examples = len(made.down), len(x)
    start = [n * examples // heads for n in range(heads + 1)]
    members: dict[int, list[int]] = {}
    for n in range(heads):
        for example in range(start[n], max(start[n] + 1, start[n + 1])):
            members.setdefault(example, []).append(n)
    assert sorted(members) == list(range(examples))
    rows = []
    for example, own in members.items():
        update = sum((made.up[n] @ made.down[n] for n in own), torch.zeros(OUT, IN, dtype=x.dtype)) / len(own)
        y = x[example] @ (made.weight + ALPHA / RANK * update).T
        rows.append(y if made.bias is None else y + made.bias)
    return torch.stack(rows)


@pytest.mark.parametrize("examples", [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 18])
@pytest.mark.parametrize("tokens", [None, 4])
def test_each_head_sees_its_own_part_of_the_batch(examples: int, tokens: int | None) -> None:
    made = layer()
    x = torch.randn(*(d for d in (examples, tokens, IN) if d), dtype=torch.float64, requires_grad=True)
    y, expected = made(x), by_hand(made, x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(y)
    wanted = [x, made.down, made.up, made.bias]
    for came, right in zip(
        torch.autograd.grad(y, wanted, seed), torch.autograd.grad(expected, wanted, seed), strict=True
    ):
        torch.testing.assert_close(came, right, rtol=1e-11, atol=1e-11)


def test_with_one_head_an_example_no_other_head_matters() -> None:
    made = layer()
    x = torch.randn(HEADS, 4, IN, dtype=torch.float64)
    before = made(x)
    made.up.data[2].normal_()
    changed = (made(x) != before).flatten(1).any(1)
    assert changed.tolist() == [n == 2 for n in range(HEADS)]


@pytest.mark.parametrize("shape", [(IN,), (0, IN), (3, 0, IN), (2, 3, 4, IN)])
def test_inputs_of_any_shape(shape: tuple[int, ...]) -> None:
    made = layer()
    x = torch.randn(shape, dtype=torch.float64)
    for mode in (True, False):
        assert made.train(mode)(x).shape == (*shape[:-1], OUT)
    one = torch.randn(IN, dtype=torch.float64)
    torch.testing.assert_close(made.train()(one), by_hand(made, one[None])[0], rtol=1e-12, atol=1e-12)
    turned = torch.randn(4, IN, HEADS, dtype=torch.float64).permute(2, 0, 1)  # not contiguous
    torch.testing.assert_close(made(turned), by_hand(made, turned), rtol=1e-12, atol=1e-12)


def test_a_merge_keeps_the_function_and_lets_the_heads_begin_anew() -> None:
    made = layer()
    x = torch.randn(8, IN, dtype=torch.float64)
    down, before = made.down.detach().clone(), made.eval()(x)
    update = ALPHA / RANK * torch.stack([made.up[n] @ made.down[n] for n in range(HEADS)]).mean(0)
    torch.testing.assert_close(made.delta(), update.detach(), rtol=1e-12, atol=1e-12)
    weight = made.weight.detach() + update.detach()
    model = nn.Sequential(made, nn.ReLU())
    merge_(model)
    torch.testing.assert_close(made(x), before, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(made.train()(x), before, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(made.weight, weight, rtol=1e-12, atol=1e-12)
    assert torch.equal(made.down, down)
    assert not made.up.any()
    assert not made.weight.requires_grad


def test_heads_start_orthogonal_and_change_nothing_at_first() -> None:
    torch.manual_seed(0)
    dense = nn.Linear(IN, OUT)
    x = torch.randn(4, IN)
    before = dense(x)
    made = LTELinear(dense, HEADS, 64, ALPHA)  # a rank that is clipped to the narrower side
    assert made.down.shape == (HEADS, OUT, IN)
    gram = made.down @ made.down.mT
    torch.testing.assert_close(gram, torch.eye(OUT).expand_as(gram) * IN / OUT, rtol=1e-5, atol=1e-5)
    assert torch.equal(made(x), before)
    assert made.weight is dense.weight
    assert made.bias is dense.bias


def test_parts_are_as_equal_as_can_be() -> None:
    for examples in range(1, 15):
        example_NS, weight_NS = parts(examples, HEADS)
        count = torch.zeros(examples).index_add(0, example_NS.flatten(), weight_NS.flatten())
        torch.testing.assert_close(count, torch.ones(examples))
        filled = (weight_NS > 0).sum(1)
        assert filled.min() >= 1
        assert filled.max() - filled.min() <= 1


def test_numbers_and_what_is_trained() -> None:
    model = nn.Sequential(nn.Embedding(9, IN), nn.Linear(IN, OUT), nn.LayerNorm(OUT), nn.Linear(OUT, 2))
    applied = LTE(heads=4, rank=2, alpha=8).apply_(model, skip=("3",))
    made = model[1]
    assert isinstance(made, LTELinear)
    assert type(model[3]) is nn.Linear
    (row,) = applied.rows
    assert (row.name, row.before, row.after, row.dense) == ("1", "Linear", "LTELinear", IN * OUT)
    assert row.stored == IN * OUT + 4 * 2 * (IN + OUT)
    assert "4 heads of rank 2" in row.note
    assert applied.dense_total == 9 * IN + IN * OUT + OUT + 2 * OUT + 2 * OUT + 2
    optimizer = applied.optimizer(TrainConfig(steps=1, lr=0.1, core_lr=0.3, weight_decay=0.5))
    heads, *others = optimizer.param_groups
    assert (heads["name"], heads["lr"], heads["params"]) == ("heads", 0.3, [made.down, made.up])
    assert [(group["name"], group["lr"]) for group in others] == [("dense", 0.1), ("dense_no_decay", 0.1)]
    assert made.weight not in {p for group in others for p in group["params"]}


def test_merges_come_every_few_steps() -> None:
    model = nn.Sequential(nn.Linear(IN, OUT), nn.ReLU())
    applied = LTE(heads=2, rank=2, merge_every=3).apply_(model)
    made = model[0]
    assert isinstance(made, LTELinear)
    merged = []
    for step in range(1, 8):
        made.up.data.fill_(1.0)
        applied.after_step(step)
        merged.append(not made.up.any())
    assert merged == [False, False, True, False, False, True, False]


def test_bfloat16_autocast_is_close_to_float32() -> None:
    made = layer(dtype=torch.float32)
    for examples in (HEADS, HEADS + 1, 4, 3):
        x = torch.randn(examples, 4, IN)
        exact = made(x)
        with torch.autocast("cpu", torch.bfloat16):
            came = made(x)
        assert came.dtype == torch.bfloat16
        noise = (came.float() - exact).square().sum() / exact.square().sum()
        assert 10 * torch.log10(noise) < -38


def test_settings_out_of_range_are_refused() -> None:
    for name, value in (("heads", 0), ("rank", 1.5), ("merge_every", 0), ("alpha", 0.0), ("heads", True)):
        with pytest.raises(ConfigError, match=rf"lte\.{name} must be"):
            LTE(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match="nothing to convert in Sequential"):
        lte_(nn.Sequential(nn.ReLU()))
