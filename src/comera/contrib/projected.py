"""AdamW in subspaces of gradients: AdaRankGrad for matrices, Tensor-GaLore for tensors.

A gradient is projected onto bases U_k of some of its modes, and the moments are those of the small core::

    C = G ×_k U_kᵀ        M ← β₁ M + (1 − β₁) C        V ← β₂ V + (1 − β₂) C²
    W ← (1 − η ω) W − η α √(N / L) · (M̂ / (√V̂ + ε)) ×_k U_k        N, L elements of W and of the largest core

^ corrects the bias. With √(N / L) the update of the largest core has the root mean square of AdamW's, so AdamW's rates
hold; GaLore has a factor by hand instead. It stays when ranks fall: the directions that are left move as before. Which
modes are projected, how bases are found and how moments follow them: `comera.contrib.subspaces`.

AdaRankGrad takes the smallest rank that keeps a share of the gradient's squares, and a new basis when the gradient has
converged in the old one: when the share p = |C|² / |G|² that the subspace holds of later gradients has fallen, as a
moving average, below a part of the largest that it has had since. Tensor-GaLore has fixed ranks and a period.

No step waits for the bases of all parameters: each is looked at in its own phase of the period.

Source: AdaRankGrad, Refael et al. 2024 (arXiv:2410.17881); Tensor-GaLore, George et al. 2025 (arXiv:2501.02379). The
scale, the share in place of the projected gradient's norm, the phases, and what fills second moments are ours.
docs/method.md §9.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from math import sqrt
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from comera.contrib.subspaces import Bases, Projection, carried, plan, project, refined, restore, restore_squares
from comera.errors import ConfigError, check_fields, is_integer
from comera.optim.adamw import AdamW, check_dense

_WHOLE = ("cores", "tables", "ranks", "dense_no_decay")  # groups of `comera.param_groups` that are left to AdamW
_SMOOTHING = 0.1  # of the share that a subspace holds


class ProjectedAdamW(AdamW):
    """AdamW whose moments are those of projected gradients, and AdamW itself for what is not worth projecting.

    Use it by one of its names, which say how parameters are projected.
    """

    captured = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        settings: dict[str, Any],
    ) -> None:
        _check({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **settings})
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.defaults |= settings
        for group in self.param_groups:
            group |= {name: group.get(name, value) for name, value in settings.items()}
            _check(group)
            group["fused"] = not any(p.is_complex() for p in group["params"])
        # a GradScaler unscales before the step: only fused AdamW does it inside
        self._step_supports_amp_scaling = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer of torch; phases are distributed anew."""
        super().add_param_group(param_group)
        self.__dict__.pop("_places", None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimizer of torch, which would give the state the parameters' dtype."""
        super().load_state_dict(state_dict)
        saved, own = (
            [p for group in groups for p in group["params"]]
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        for key, p in zip(saved, own, strict=True):
            state = state_dict["state"].get(key, {})
            if "first" in state:
                for name, value in state.items():
                    if isinstance(value, Tensor):  # steps are counted on the host
                        self.state[p][name] = value.to("cpu" if name == "step" else p.device, copy=True)
        self.__dict__.pop("_places", None)

    def moment_bytes(self, parameter: Tensor) -> int:
        """Bytes of the moments of a parameter and of the bases, at the largest ranks; step counts are not in it."""
        group = self._group_of(parameter)
        if not self._is_projected(group, parameter):
            return 2 * parameter.nbytes
        shares = 0 if group["converged"] is None else 2
        return (_planned(group, parameter).elements + shares) * _dtype(parameter).itemsize

    def edited_state(self, parameter: Tensor, edit: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The state of a projected parameter after `edit`, which takes and returns whole moments; changes nothing.

        edit: takes a moment of the parameter's shape and may return one of another shape.
        """
        state = self.state.get(parameter, {})
        if "first" not in state:
            return {}
        bases, generator = _bases(state), torch.Generator().manual_seed(0)
        drawn = torch.randn(state["first"].shape, generator=generator, dtype=state["first"].dtype)
        wholes = (
            restore(state["first"], bases),
            restore_squares(state["second"], bases),
            restore(drawn.to(state["first"].device), bases),  # it spans the subspaces, whatever the moments are
        )
        first, second, spanning = (edit(whole.view_as(parameter)) for whole in wholes)
        shape = _planned(self._group_of(parameter), first).shape
        ranks = {k: min(basis.shape[1], shape[k]) for k, basis in bases.items()}
        if first.numel():
            new = refined(spanning.reshape(shape), {}, ranks, generator)
        else:
            new = {k: first.new_zeros(shape[k], rank) for k, rank in ranks.items()}
        squares = project(second.reshape(shape), {k: basis_NR.square() for k, basis_NR in new.items()})
        squares *= second.sum() / squares.sum().clamp_min(torch.finfo(squares.dtype).tiny)  # all of it is in there
        return {"first": project(first.reshape(shape), new), "second": squares} | {
            f"basis_{k}": basis for k, basis in new.items()
        }

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(p is parameter for p in group["params"]))

    @cached_property
    def _places(self) -> dict[Tensor, tuple[int, float]]:
        """Of each projected parameter, its number, and its phase: the part of a period after which it is looked at."""
        found = [p for group in self.param_groups for p in group["params"] if self._is_projected(group, p)]
        if sharded := [tuple(p.shape) for p in found if hasattr(p, "full_tensor")]:
            raise ConfigError(
                f"{type(self).__name__} projects whole gradients, but {len(sharded)} parameters are sharded, such as "
                f"one of shape {sharded[0]}: use AdamW with fully_shard, or DistributedDataParallel"
            )
        return {p: (number, number / len(found)) for number, p in enumerate(found)}

    def _is_projected(self, group: dict[str, Any], parameter: Tensor) -> bool:
        state = self.state.get(parameter, {})
        if "first" in state or "exp_avg" in state:  # shapes may have changed since
            return "first" in state
        return group.get("name") not in _WHOLE and not parameter.is_complex() and bool(_planned(group, parameter).ranks)

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Move the projected parameters of a group, and leave the others to AdamW."""
        if group is self.param_groups[0]:
            check_dense(self, self.param_groups)
        for p in group["params"]:
            if p in self._places and p.grad is not None and p.numel():
                self._move(group, p, p.grad)
        if group is self.param_groups[0]:
            self._others = [
                {**each, "params": [p for p in each["params"] if p not in self._places]} for each in self.param_groups
            ]
        number = next(k for k, each in enumerate(self.param_groups) if each is group)
        return super()._init_group(self._others[number], *lists)

    def _adam_groups(self) -> list[dict[str, Any]]:
        return self._others

    def _move(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        state, (beta1, beta2), planned = self.state[parameter], group["betas"], _planned(group, parameter)
        grad = grad.reshape(planned.shape).to(_dtype(parameter))
        decayed = 1 - float(group["lr"]) * group["weight_decay"]
        step = 1 + int(state.get("step", 0))
        if self._is_due(group, parameter, step) and grad.any():  # zeros have no subspace
            self._refresh(group, parameter, grad, planned)
        if "first" not in state:
            parameter.mul_(decayed)
            return
        bases = _bases(state)
        core = project(grad, bases)
        if "share" in state and state["refreshed"] != step:  # of the gradient that chose them the bases hold too much
            share = core.square().sum() / grad.square().sum().clamp_min(torch.finfo(core.dtype).tiny)
            state["share"] = torch.where(state["share"] > 0, torch.lerp(state["share"], share, _SMOOTHING), share)
            state["largest_share"] = torch.maximum(state["largest_share"], state["share"])
        first, second = state["first"].lerp_(core, 1 - beta1), state["second"]
        second.mul_(beta2).addcmul_(core, core, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        moved = restore((first / (1 - beta1**step)).div_(root), bases)
        largest = Projection(planned.shape, _ranks(planned, bases)).core
        rate = float(group["lr"]) * group["scale"] * sqrt(grad.numel() / largest)
        parameter.copy_(moved.view(parameter.shape).mul_(-rate).add_(parameter, alpha=decayed))
        state["step"] += 1

    def _is_due(self, group: dict[str, Any], parameter: Tensor, step: int) -> bool:
        """Whether a parameter gets new bases in this step."""
        state = self.state[parameter]
        if "first" not in state:
            return True
        period = group["check_every"] or group["refresh_every"]
        if (step + int(period * self._places[parameter][1])) % period:
            return False
        if step - state["refreshed"] >= group["refresh_every"] or "share" not in state:
            return True
        return bool(state["share"] < group["converged"] * state["largest_share"])

    def _refresh(self, group: dict[str, Any], parameter: Tensor, grad: Tensor, planned: Projection) -> None:
        state = self.state[parameter]
        steps, old = int(state.get("step", 0)), _bases(state)
        ranks = _ranks(planned, old) or planned.ranks
        # of its own, so that a resumed run draws the same and the user's draws stay as they are
        generator = torch.Generator().manual_seed(1_000_003 * self._places[parameter][0] + steps)
        new = refined(grad, old, ranks, generator, group["energy"])
        core = project(grad, new)
        if "first" in state:
            unknown = (1 - group["betas"][1] ** steps) * core.square()
            state["first"], state["second"] = carried(state["first"], state["second"], old, new, unknown)
        else:
            state["step"] = torch.zeros(())
            state["first"], state["second"] = torch.zeros_like(core), torch.zeros_like(core)
        state.update({f"basis_{k}": basis for k, basis in new.items()}, refreshed=steps + 1)
        if group["converged"] is not None:
            state["share"], state["largest_share"] = core.new_zeros(()), core.new_zeros(())


class AdaRankGrad(ProjectedAdamW):
    """Adam in a subspace of each matrix's gradient, of a rank that follows what the gradients hold.

    A matrix is projected in its shorter mode, a tensor of more dimensions as the matrix (first, rest). AdamW moves
    vectors, matrices with a side under 16, complex parameters, and the groups "cores", "tables" and "ranks" of
    `comera.param_groups`. The projected moments are in float32 (of float64 parameters in float64); they resume exactly
    and follow pruning.

    Args:
        params: parameters or groups, as `comera.param_groups` makes them; a group may have its own settings.
        lr: learning rate, AdamW's.
        rank: the largest rank, or the share of a matrix's shorter side (float).
        energy: share of a gradient's squares that the subspace holds when it is new; ranks are no larger than it takes.
        converged: a subspace is left when the share that it holds has fallen to this part of the largest that it has
            held since it was new.
        check_every: steps between such checks, each parameter in a step of its own.
        refresh_every: steps after which a subspace is left in any case.
        scale: factor α on the projected updates.
        betas, eps, weight_decay: as AdamW's.

    Raises:
        ConfigError: a value out of range, sparse gradients, or sharded parameters.

    Example:
        >>> import comera, torch
        >>> from comera.contrib import AdaRankGrad
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(256, 256)
        >>> optimizer = AdaRankGrad(comera.param_groups(model, lr=1e-3))
        >>> model(torch.randn(4, 256)).square().mean().backward()  # a gradient of rank 4
        >>> optimizer.step()
        >>> tuple(optimizer.state[model.weight]["basis_1"].shape), tuple(optimizer.state[model.weight]["first"].shape)
        ((256, 4), (256, 4))
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rank: float = 0.25,
        energy: float = 0.99,
        converged: float = 0.9,
        check_every: int = 10,
        refresh_every: int = 200,
        scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {
            **{"rank": rank, "energy": energy, "converged": converged, "check_every": check_every},
            **{"refresh_every": refresh_every, "scale": scale, "as_matrix": True, "two_sided": False},
        }
        super().__init__(params, lr, betas, eps, weight_decay, settings)


class TensorGaLore(ProjectedAdamW):
    """Adam on the Tucker cores of gradients: of convolutions, and of all parameters of three dimensions or more.

    Every mode of 16 or more indices is projected; shorter ones, such as a kernel's, stay whole. A matrix is projected
    in its shorter mode, as by GaLore, or in both. What is left to AdamW, and what is kept: as in `AdaRankGrad`.

    Args:
        params: parameters or groups, as `comera.param_groups` makes them; a group may have its own settings.
        lr: learning rate, AdamW's.
        rank: of each projected mode, or the share of it (float).
        refresh_every: steps between new bases, each parameter in a step of its own.
        two_sided: project both modes of matrices.
        scale: factor α on the projected updates.
        betas, eps, weight_decay: as AdamW's.

    Raises:
        ConfigError: a value out of range, sparse gradients, or sharded parameters.

    Example:
        >>> import comera, torch
        >>> from comera.contrib import TensorGaLore
        >>> model = torch.nn.Conv2d(64, 128, 3)
        >>> optimizer = TensorGaLore(comera.param_groups(model, lr=1e-3))
        >>> model(torch.randn(4, 64, 8, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> state = optimizer.state[model.weight]
        >>> [tuple(state[name].shape) for name in ("first", "basis_0", "basis_1")]
        [(32, 16, 3, 3), (128, 32), (64, 16)]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rank: float = 0.25,
        refresh_every: int = 200,
        two_sided: bool = False,
        scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {
            **{"rank": rank, "energy": None, "converged": None, "check_every": None},
            **{"refresh_every": refresh_every, "scale": scale, "as_matrix": False, "two_sided": two_sided},
        }
        super().__init__(params, lr, betas, eps, weight_decay, settings)


def _check(group: dict[str, Any]) -> None:
    """Raise ConfigError for settings of a group that are out of range."""
    rank, energy, converged = group["rank"], group["energy"], group["converged"]
    share = isinstance(rank, float) and 0 < rank <= 1
    check_fields(
        SimpleNamespace(**group),
        "",
        {
            "lr": (group["lr"] >= 0, "a number >= 0"),
            "rank": (share or is_integer(rank), "an integer >= 1, or a share in (0, 1] as a float"),
            "energy": (energy is None or 0 < energy <= 1, "in (0, 1]"),
            "converged": (converged is None or 0 < converged < 1, "in (0, 1)"),
            "check_every": (group["check_every"] is None or is_integer(group["check_every"]), "an integer >= 1"),
            "refresh_every": (is_integer(group["refresh_every"]), "an integer >= 1"),
            "scale": (0 < group["scale"] < float("inf"), "a number > 0"),
            "betas": (all(0 <= beta < 1 for beta in group["betas"]), "two numbers in [0, 1)"),
            "eps": (group["eps"] > 0, "a number > 0"),
            "weight_decay": (group["weight_decay"] >= 0, "a number >= 0"),
        },
    )


def _dtype(parameter: Tensor) -> torch.dtype:
    """Of the projected moments: float32, or float64 for such parameters."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _planned(group: dict[str, Any], parameter: Tensor) -> Projection:
    settings = {name: group[name] for name in ("rank", "as_matrix", "two_sided")}
    return plan(tuple(parameter.shape), **settings)


def _ranks(planned: Projection, bases: Bases) -> dict[int, int]:
    """The largest ranks of the projected modes; of one that was pruned until it was not worth projecting, its own."""
    return {k: planned.ranks.get(k, basis_NR.shape[1]) for k, basis_NR in bases.items()}


def _bases(state: dict[str, Any]) -> dict[int, Tensor]:
    """Of the projected modes, in their order."""
    names = sorted(name for name in state if name.startswith("basis_"))
    return {int(name.removeprefix("basis_")): state[name] for name in names}
