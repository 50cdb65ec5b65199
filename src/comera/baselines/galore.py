"""GaLore: dense weights whose gradients are projected to low rank for the optimizer (arXiv:2403.03507).

The model stays dense; the optimizer is that of the package galore-torch, with its published settings::

    G (m, n), m >= n:  P = right singular vectors (r, n) of G every `update_proj_gap` steps
                       W ← W - lr · scale · Adam(G Pᵀ) P            (from the other side if m < n)

Its moments have shape (m, r) instead of (m, n); it also stores P. Gradients and weights keep their full size."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from comera.baselines import common
from comera.errors import check_fields, is_integer
from comera.trainer.config import TrainConfig

_ALIAS = "_comera_galore_torch"
_PACKAGE = common.Package("galore", "galore_torch", "galore-torch", "pip install 'comera[baselines]'")


@dataclass(frozen=True)
class GaLore(common.Baseline):
    """GaLore: the dense model, gradients projected to low rank; core_lr is the learning rate of projected weights.

    Example:
        >>> import torch
        >>> from comera.baselines import GaLore
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        >>> applied = GaLore().apply_(model, skip=["1"])
        >>> [(row.name, row.note) for row in applied.rows]
        [('0', 'gradient projected to rank 16')]
        >>> moments = sum(2 * p.numel() * p.element_size() for p in model.parameters())  # those of AdamW
        >>> round(applied.state_bytes / moments, 2)
        0.45
    """

    package = _PACKAGE
    dense_layers = True
    rate = 10.0

    rank: int | None = None
    """Rank of the projections; default: 128, or a quarter of a layer's smaller dimension if that is less."""
    update_proj_gap: int = 200
    """Steps between new projections; each needs a singular value decomposition of every gradient."""
    scale: float = 0.25
    """Factor on the projected updates."""

    def __post_init__(self) -> None:
        checks = {
            "rank": (self.rank is None or is_integer(self.rank), "an integer >= 1 or nothing"),
            "update_proj_gap": (is_integer(self.update_proj_gap), "an integer >= 1"),
            "scale": (0 < self.scale < float("inf"), "a number > 0"),
        }
        check_fields(self, "galore.", checks)

    def apply_(self, model: nn.Module, skip: Sequence[str] = ()) -> common.Applied:
        """Select the weights to project, except those that match `skip`. Errors: see `linear_layers`."""
        layers = common.linear_layers(model, skip)
        smaller = {name: min(layer.weight.shape) for name, layer in layers.items()}
        ranks = {name: min(self.rank, n) if self.rank else max(1, min(128, n // 4)) for name, n in smaller.items()}
        projected = {layer.get_parameter("weight"): ranks[name] for name, layer in layers.items()}

        def optimizer(config: TrainConfig) -> Optimizer:
            made: list[dict[str, Any]] = []
            for group in common.split_groups(model, projected, "projected", config):
                if group["name"] != "projected":
                    made.append(group)
                    continue
                for rank in sorted({projected[p] for p in group["params"]}):
                    chosen = [p for p in group["params"] if projected[p] == rank]
                    own = {"rank": rank, "update_proj_gap": self.update_proj_gap, "scale": self.scale}
                    name = f"projected_{rank}"
                    made.append({**group, **own, "name": name, "params": chosen, "proj_type": "std"})
            return galore_adamw()(made, betas=config.betas, no_deprecation_warning=True)

        sizes = {name: layer.weight.numel() for name, layer in layers.items()}
        rows = tuple(
            common.layer_row(name, layer, sizes[name], sizes[name], f"gradient projected to rank {ranks[name]}")
            for name, layer in layers.items()
        )
        state = 0  # two moments, plus the basis of a projected weight
        for p in model.parameters():
            if p.requires_grad:
                rank = projected.get(p)
                stored = 2 * p.numel() if rank is None else (2 * max(p.shape) + min(p.shape)) * rank
                state += stored * p.element_size()
        return common.Applied(rows, common.elements(model.parameters()), optimizer, state_bytes=state)


@cache
def galore_adamw() -> Callable[..., Optimizer]:
    """GaLore's AdamW with a state of tensors and numbers alone, so a run can be saved and resumed. The package keeps an
    object in the state of each projected weight. Between steps, its only changing member, the basis, takes the object's
    place as a tensor. Raises ConfigError if the package cannot be used."""
    base, projector = library()

    class GaLoreAdamW(base):  # type: ignore[misc, valid-type]
        """galore-torch's AdamW; projects groups that have a "rank"."""

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> Any:
            projected = [(p, group) for group in self.param_groups if "rank" in group for p in group["params"]]
            for p, group in projected:
                state = self.state[p]
                if "basis" in state:
                    settings = {key: group[key] for key in ("rank", "update_proj_gap", "scale", "proj_type")}
                    state["projector"] = projector(**settings)
                    state["projector"].ortho_matrix = state.pop("basis")
            loss = super().step(closure)
            for p, _ in projected:
                if "projector" in self.state[p]:
                    # contiguous, as when loaded from a file: other layouts round differently in products
                    self.state[p]["basis"] = self.state[p].pop("projector").ortho_matrix.contiguous()
            return loss

    return GaLoreAdamW


def library() -> tuple[Any, Any]:
    """The package's plain AdamW and its projector. Raises ConfigError if they cannot be imported. The package imports
    bitsandbytes for an 8-bit variant, unused here, that many machines cannot run. So the modules are imported from its
    folder under an otherwise empty package of another name."""
    _PACKAGE.check()
    found = importlib.util.find_spec("galore_torch")
    alias = ModuleType(_ALIAS)
    alias.__path__ = list((found and found.submodule_search_locations) or ())
    sys.modules[_ALIAS] = alias
    try:
        adamw = importlib.import_module(f"{_ALIAS}.adamw").AdamW
        projector = importlib.import_module(f"{_ALIAS}.galore_projector").GaLoreProjector
    except ModuleNotFoundError as error:
        raise _PACKAGE.error(f"lacks {error.name}") from error
    except (ImportError, AttributeError) as error:
        raise _PACKAGE.error(f"is not the expected one ({error})") from error
    return adamw, projector
