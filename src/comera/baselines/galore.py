"""GaLore: dense weights whose gradients are projected to low rank for the optimizer (arXiv:2403.03507).

The model stays dense; the optimizer is the one of the package galore-torch, with its published settings::

    G (m, n), m >= n:  P = right singular vectors (r, n) of G every `update_proj_gap` steps
                       W ← W - lr · scale · Adam(G Pᵀ) P            (from the other side where m < n)

so it keeps moments for (m, r) instead of (m, n) numbers, and P. Gradients and weights stay whole.
"""

from __future__ import annotations

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

from comera.baselines.common import Applied, check_installed, groups, linears, missing, numbers, require, row, whole
from comera.trainer.config import TrainConfig

_ALIAS = "_comera_galore_torch"


@dataclass(frozen=True)
class GaLore:
    """GaLore: the dense model with gradients projected to low rank; core_lr is the rate of the projected weights."""

    rank: int | None = None
    """Rank of the projections; left out: 128, or a quarter of a layer's narrower side where that is less."""
    update_proj_gap: int = 200
    """Steps between new projections, each of which takes a singular value decomposition of every gradient."""
    scale: float = 0.25
    """Factor on the projected updates."""

    def __post_init__(self) -> None:
        require(self.rank is None or whole(self.rank, 1), "galore.rank", "an integer >= 1 or nothing", self.rank)
        require(whole(self.update_proj_gap, 1), "galore.update_proj_gap", "an integer >= 1", self.update_proj_gap)
        require(0 < self.scale < float("inf"), "galore.scale", "a number > 0", self.scale)

    def apply_(self, model: nn.Module, skip: Sequence[str] = ()) -> Applied:
        """Choose the weights to project, those of linear layers that do not match `skip`. Errors: see `linears`."""
        layers = linears(model, skip)
        ranks = {name: self._rank(layer) for name, layer in layers.items()}
        projected = {layer.get_parameter("weight"): ranks[name] for name, layer in layers.items()}

        def optimizer(config: TrainConfig) -> Optimizer:
            made: list[dict[str, Any]] = []
            for group in groups(model, projected, "projected", config):
                if group["name"] != "projected":
                    made.append(group)
                    continue
                for rank in sorted({projected[p] for p in group["params"]}):
                    chosen = [p for p in group["params"] if projected[p] == rank]
                    own = {"rank": rank, "update_proj_gap": self.update_proj_gap, "scale": self.scale}
                    name = f"projected_{rank}"
                    made.append({**group, **own, "name": name, "params": chosen, "proj_type": "std"})
            return galore_adamw()(made, betas=config.betas, no_deprecation_warning=True)

        rows = tuple(
            row(name, layer, layer.weight.numel(), layer.weight.numel(), f"gradient projected to rank {ranks[name]}")
            for name, layer in layers.items()
        )
        state = sum(self._state_bytes(p, projected.get(p)) for p in model.parameters() if p.requires_grad)
        return Applied(rows, numbers(model.parameters()), optimizer, state_bytes=state)

    def _rank(self, layer: nn.Linear) -> int:
        narrow = min(layer.weight.shape)
        return min(self.rank, narrow) if self.rank else max(1, min(128, narrow // 4))

    def _state_bytes(self, parameter: nn.Parameter, rank: int | None) -> int:
        """Two moments, and for a projected weight the basis."""
        if rank is None:
            return 2 * parameter.numel() * parameter.element_size()
        narrow, wide = sorted(parameter.shape)
        return (2 * wide + narrow) * rank * parameter.element_size()


@cache
def galore_adamw() -> Callable[..., Optimizer]:
    """GaLore's AdamW, whose state is tensors and numbers alone, so that a run can be saved and resumed.

    The package keeps an object in the state of each projected weight. Between steps its only changing part, the basis,
    stands there as a tensor instead. Raises ConfigError where the package cannot be had.
    """
    base, projector = library()

    class GaLoreAdamW(base):  # type: ignore[misc, valid-type]
        """AdamW of galore-torch; groups with a "rank" are projected."""

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> Any:
            """Take a step."""
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
                    # contiguous, as it comes back from a file: products of another layout round otherwise
                    self.state[p]["basis"] = self.state[p].pop("projector").ortho_matrix.contiguous()
            return loss

    return GaLoreAdamW


def library() -> tuple[Any, Any]:
    """The package's plain AdamW and its projector. Raises ConfigError where it cannot be imported.

    The package itself imports bitsandbytes, for an 8-bit form that is not used here and that many machines cannot run.
    So its modules are imported from where it is installed, under a package of another name that is otherwise empty.
    """
    check_installed("galore")
    found = importlib.util.find_spec("galore_torch")
    alias = ModuleType(_ALIAS)
    alias.__path__ = list((found and found.submodule_search_locations) or ())
    sys.modules[_ALIAS] = alias
    try:
        adamw = importlib.import_module(f"{_ALIAS}.adamw").AdamW
        projector = importlib.import_module(f"{_ALIAS}.galore_projector").GaLoreProjector
    except ModuleNotFoundError as error:
        raise missing("galore", f"lacks {error.name}") from error
    except (ImportError, AttributeError) as error:
        raise missing("galore", f"is not the expected one ({error})") from error
    return adamw, projector
