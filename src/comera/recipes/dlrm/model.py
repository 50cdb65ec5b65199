"""DLRM (Naumov et al. 2019): a table for each categorical feature, an MLP for the integers, products of their vectors.

    x = bottom(integers),   e_f = table_f[id_f],   logit = top([x, ⟨v_i, v_j⟩ for i > j]),   v = (x, e_1, …, e_F)

B batch, I integers, F categorical features, V = 1 + F vectors, D their width, P products."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from comera.baselines.embedding_tables import SmallerTable
from comera.errors import ConfigError
from comera.nn.linear import CompressedLinear
from comera.nn.tables import lookup_tables
from comera.nn.tensor_train import CompressedLayer

# Of a compressed table: the gradient of a core is a product of the other cores, and for millions of rows the published
# initialization would make all of them tiny. Measured: docs/log.md.
_LEAST_STD = 0.03


@dataclass(frozen=True)
class DLRMConfig:
    """Sizes of the model; the defaults are published for the Kaggle data."""

    dim: int = 16
    """Width of an embedding and of the bottom MLP's output."""
    bottom: tuple[int, ...] = (512, 256, 64)
    """Hidden widths of the bottom MLP, from the integers to a vector as wide as an embedding."""
    top: tuple[int, ...] = (512, 256)
    """Hidden widths of the top MLP, from the products to the logit."""

    def __post_init__(self) -> None:
        for name in ("bottom", "top"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # YAML has lists only
            if any(width < 1 for width in getattr(self, name)):
                raise ConfigError(f"model.{name} must be widths of at least 1, got {getattr(self, name)!r}")
        if self.dim < 1:
            raise ConfigError(f"model.dim must be at least 1, got {self.dim!r}")


class DLRM(nn.Module):
    """Logits of clicks. table_sizes: rows of each categorical feature's table; integers: number of numerical features.
    dense (B, I) float32, ids (B, F) int64 -> logits (B,). On the meta device it allocates nothing and can be
    compressed; `to_empty` and `reset_parameters` then materialize it without ever allocating the dense tables."""

    def __init__(self, config: DLRMConfig, table_sizes: Sequence[int], integers: int = 13) -> None:
        super().__init__()
        vectors = 1 + len(table_sizes)
        self.table_sizes = tuple(table_sizes)
        self.bottom = _mlp((integers, *config.bottom, config.dim)).append(nn.ReLU())
        device = torch.get_default_device()
        tables = [skip_init(nn.EmbeddingBag, rows, config.dim, mode="sum", device=device) for rows in table_sizes]
        self.tables = nn.ModuleList(tables)
        self.top = _mlp((config.dim + vectors * (vectors - 1) // 2, *config.top, 1))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The published initialization, for compressed layers too: linear weights normal with std √(2/(in+out)), biases
        with √(1/out); tables uniform within ±√(1/rows), compressed ones with the same std or _LEAST_STD, those of other
        methods as they draw them."""
        for layer in [*self.bottom, *self.top]:
            if isinstance(layer, nn.Linear | CompressedLinear):
                std = sqrt(2 / (layer.in_features + layer.out_features))
                if isinstance(layer, CompressedLinear):
                    _draw(layer, std)
                else:
                    nn.init.normal_(layer.weight, std=std)
                assert layer.bias is not None
                nn.init.normal_(layer.bias, std=sqrt(1 / layer.out_features))
        for table, rows in zip(self.tables, self.table_sizes, strict=True):
            bound = sqrt(1 / rows)
            if isinstance(table, CompressedLayer):
                _draw(table, max(bound / sqrt(3), _LEAST_STD))
            elif isinstance(table, SmallerTable):
                table.reset_parameters()
            else:
                nn.init.uniform_(table.get_parameter("weight"), -bound, bound)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x_BD = self.bottom(dense)
        rows = lookup_tables(list(self.tables), ids.unsqueeze(2).unbind(1))  # bags of one id
        vectors_BVD = torch.stack([x_BD, *rows], 1)
        count = len(rows) + 1
        left, right = torch.tril_indices(count, count, offset=-1, device=ids.device)
        # flat indices: the gradient of indexing in two dimensions takes three times as long
        products_BP = (vectors_BVD @ vectors_BVD.mT).flatten(1).index_select(1, left * count + right)
        logits_B1: Tensor = self.top(torch.cat([x_BD, products_BP], 1))
        return logits_B1.squeeze(1)


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _draw(layer: CompressedLayer, std: float) -> None:
    layer.tt.init_std = std
    layer.tt.reset_parameters()
