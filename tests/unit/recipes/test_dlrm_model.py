"""DLRM against a plain one, row by row; its published sizes and initialization, dense and compressed."""

from itertools import pairwise
from math import sqrt

import pytest
import torch
from torch import Tensor, nn

from comera.convert import TT, TTM, TensorizeConfig, tensorize_
from comera.errors import ConfigError
from comera.nn import TTLinear, TTMEmbeddingBag
from comera.recipes.dlrm.criteo import KAGGLE_TABLES
from comera.recipes.dlrm.model import DLRM, DLRMConfig
from comera.recipes.dlrm.table_budget import LEAST_RANK, fit_tables
from comera.tt.format import spec_size
from comera.tt.spec import TTMSpec

TINY = DLRMConfig(dim=4, bottom=(6, 5), top=(7,))
SIZES = (3, 50, 2)


def by_rows(model: DLRM, dense: Tensor, ids: Tensor) -> Tensor:
    """The same, one example and one product at a time."""

    def mlp(layers: nn.Module, x: Tensor, last: bool) -> Tensor:
        linears = [layer for layer in layers.modules() if isinstance(layer, nn.Linear)]
        for k, linear in enumerate(linears):
            x = linear.weight @ x + linear.bias
            x = x.clamp_min(0) if last or k + 1 < len(linears) else x
        return x

    logits = []
    for integers, row in zip(dense, ids, strict=True):
        x = mlp(model.bottom, integers, last=True)
        vectors = [x, *(table.get_parameter("weight")[i] for table, i in zip(model.tables, row.tolist(), strict=True))]
        products = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        logits.append(mlp(model.top, torch.cat([x, torch.stack(products)]), last=False))
    return torch.cat(logits)


@pytest.mark.parametrize("batch", [1, 9])
def test_logits_are_those_of_a_plain_model(batch: int) -> None:
    torch.manual_seed(0)
    model = DLRM(TINY, SIZES, integers=5).double()
    with torch.no_grad():
        for table in model.tables:
            nn.init.normal_(table.get_parameter("weight"))  # as drawn they would hardly count
    dense = torch.rand(batch, 5, dtype=torch.float64)
    ids = torch.stack([torch.randint(rows, (batch,)) for rows in SIZES], 1)
    torch.testing.assert_close(model(dense, ids), by_rows(model, dense, ids), rtol=1e-12, atol=1e-12)
    assert model(dense, ids).shape == (batch,)


def test_the_full_model_has_the_published_shapes() -> None:
    with torch.device("meta"):
        model = DLRM(DLRMConfig(), KAGGLE_TABLES)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.ndim == 2}
    widths = {"bottom": (13, 512, 256, 64, 16), "top": (16 + 27 * 26 // 2, 512, 256, 1)}
    for name, sizes in widths.items():
        for k, (inputs, outputs) in enumerate(pairwise(sizes)):
            assert shapes[f"{name}.{2 * k}.weight"] == (outputs, inputs)
    assert [shapes[f"tables.{k}.weight"] for k in range(26)] == [(rows, 16) for rows in KAGGLE_TABLES]
    assert sum(p.numel() for p in model.tables.parameters()) == 33_762_577 * 16
    assert all(p.is_meta for p in model.parameters())


def test_the_initialization_is_the_published_one_also_of_compressed_layers() -> None:
    torch.manual_seed(0)
    config = DLRMConfig(dim=16, bottom=(256,), top=(256, 128))
    sizes = (300, 40, 20_000)
    with torch.device("meta"):
        model = DLRM(config, sizes)
        formats: dict[str, TT | TTM | None] = {
            "top.2": TT(order=4, rank=20),
            "tables.0": TTM(order=2, rank=8),
            "tables.2": TTM(order=3, rank=8),
        }
        tensorize_(model, TensorizeConfig(linear=None, embedding=None, overrides=formats))
    model.to_empty(device="cpu").reset_parameters()
    assert [type(table) for table in model.tables] == [TTMEmbeddingBag, nn.EmbeddingBag, TTMEmbeddingBag]
    assert isinstance(model.top[2], TTLinear)
    for layer in [*model.bottom, *model.top]:
        if isinstance(layer, nn.Linear | TTLinear):
            inputs, outputs = layer.in_features, layer.out_features
            assert float(layer.weight.detach().std()) == pytest.approx(sqrt(2 / (inputs + outputs)), rel=0.1)
            if outputs > 1:
                assert layer.bias is not None
                assert float(layer.bias.detach().std()) == pytest.approx(sqrt(1 / outputs), rel=0.25)
    for table, rows in zip(model.tables, sizes, strict=True):
        weight = table.weight
        assert isinstance(weight, Tensor)
        dense = isinstance(table, nn.EmbeddingBag)
        std = sqrt(1 / rows / 3)
        assert float(weight.detach().std()) == pytest.approx(std if dense else max(std, 0.03), rel=0.1)
        if dense:
            assert float(weight.detach().abs().max()) <= sqrt(1 / rows)


def test_two_models_of_one_seed_are_equal() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(4)
        models.append(DLRM(TINY, SIZES))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"dim": 0}, "model.dim must be at least 1, got 0"), ({"top": (0,)}, "model.top must be widths of at least 1")],
)
def test_sizes_that_no_model_has_are_errors(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DLRMConfig(**fields)  # type: ignore[arg-type]
    assert DLRMConfig(bottom=[8, 4]).bottom == (8, 4)  # type: ignore[arg-type]


# --- which TT-matrix each table gets from a budget --------------------------------------------------------------------


def stored(specs: list[TTMSpec | None], sizes: tuple[int, ...], dim: int) -> int:
    return sum(spec_size(spec) if spec else rows * dim for spec, rows in zip(specs, sizes, strict=True))


@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("ratio", [2.0, 20.0, 200.0, 1000.0])
@pytest.mark.parametrize("order", [None, 2, 3])
def test_the_budget_holds_and_is_used(dim: int, ratio: float, order: int | None) -> None:
    specs = fit_tables(KAGGLE_TABLES, dim, ratio=ratio, min_rows=10_000, order=order)
    budget = dim * sum(KAGGLE_TABLES) / ratio
    least = 0.9 if ratio <= 200 else 0.8  # steps of a rank are large where ranks are small
    assert least * budget < stored(specs, KAGGLE_TABLES, dim) <= budget
    for spec, rows in zip(specs, KAGGLE_TABLES, strict=True):
        assert spec is None or (spec.shape == (rows, dim) and spec_size(spec) < rows * dim)
        assert spec is None or order is None or spec.order == order
        assert (spec is None) >= (rows < 10_000)


def test_two_cores_at_a_common_rank_where_the_budget_allows_them() -> None:
    specs = [spec for spec in fit_tables(KAGGLE_TABLES, 128, ratio=200, min_rows=10_000) if spec]
    assert len(specs) == 10
    assert {spec.order for spec in specs} == {2}
    ranks = [spec.inner_ranks[0] for spec in specs]
    assert max(ranks) - min(ranks) <= 2


def test_a_tight_budget_takes_more_cores_before_it_takes_ranks_below_the_least() -> None:
    specs = [spec for spec in fit_tables(KAGGLE_TABLES, 16, ratio=1000, min_rows=10_000) if spec]
    assert all(spec.order > 2 for spec in specs)
    assert all(min(spec.inner_ranks) >= LEAST_RANK for spec in specs if spec.order == 3)


def test_a_table_that_its_share_covers_stays_dense_and_leaves_the_rest_to_others() -> None:
    sizes = (100, 90_000)
    small, large = fit_tables(sizes, 8, ratio=2, min_rows=10)
    assert small is None
    assert large is not None
    assert stored([small, large], sizes, 8) == pytest.approx(8 * sum(sizes) / 2, rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "ratio", "said"),
    [
        ((900, 5000), 10.0, r"compress.ratio 10 leaves 0 parameters for the table of 5,000 rows"),
        ((100, 5000), 50.0, r"or lower compress.min_rows \(1,000\), below which tables stay dense"),
        ((*(999,) * 1000, 1000), 2.0, r"no compress.ratio leaves enough; or lower compress.min_rows"),
        ((100, 900), 2.0, r"compress.min_rows: no table has 1,000 rows or more, the largest has 900"),
    ],
)
def test_a_budget_that_cannot_hold_is_an_error(sizes: tuple[int, ...], ratio: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fit_tables(sizes, 16, ratio=ratio, min_rows=1000)


@pytest.mark.parametrize(("sizes", "ratio"), [((900, 5000), 10.0), ((100, 5000), 50.0), (KAGGLE_TABLES, 1e6)])
def test_a_budget_that_is_too_small_names_the_largest_ratio(sizes: tuple[int, ...], ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"compress\.ratio can be [\d.]+ at most") as refused:
        fit_tables(sizes, 16, ratio=ratio, min_rows=1000)
    largest = float(str(refused.value).split("can be ")[1].split()[0])
    assert 1 < largest < ratio
    assert any(fit_tables(sizes, 16, ratio=largest, min_rows=1000))
    with pytest.raises(ConfigError, match="can be"):
        fit_tables(sizes, 16, ratio=1.05 * largest, min_rows=1000)
