"""SMMF: both moments of Adam, each as a matrix of rank one, in about 1/60 of AdamW's state.

A parameter of N elements is seen as a matrix (n, m), n · m = N, as near to a square as N allows, n ≤ m. Of a moment
X ≥ 0 its row sums r (n) and column sums c (m) are kept, and X is close to r cᵀ / Σ r. Signs are kept as bits::

    M̂ = sign ⊙ r_M c_Mᵀ / Σ r_M                  V̂ = r_V c_Vᵀ / Σ r_V            of the step before; zero at first
    M = β_t M̂ + (1 − β_t) G,  β_t = β λ^(t−1)     V = γ_t V̂ + (1 − γ_t) G²,  γ_t = 1 − t^γ
    W ← (1 − η ω) W − η M / (√V + ε)              then sign, r_M, c_M of M, and r_V, c_V of V

So a step sees the whole gradient, and only what goes on to the next step is approximate.

Source: Park and Lee 2024 (arXiv:2412.08894), algorithms 1 to 4; ω is AdamW's decoupled decay. docs/method.md §9.
K parameters of one size, N elements, n rows and m columns of a matrix.
"""

from collections.abc import Callable, Iterable
from math import isqrt
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.errors import check_fields
from comera.optim.adamw import check_dense

_FACTORS = ("rows", "columns", "square_rows", "square_columns")  # r_M, c_M, r_V, c_V
_STATE = ("signs", *_FACTORS)
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)  # of the bits in a byte


class SMMF(Optimizer):
    """Adam with factored moments: two vectors for each moment, and a bit an element for signs.

    State follows falling ranks (it is formed, cut and factored again) and resumes exactly. The state is in float32.

    Args:
        params: parameters or groups, as `comera.param_groups` makes them.
        lr: learning rate, about AdamW's.
        beta: decay rate of the first moment at the first step.
        growth: factor of `beta` at each step.
        decay: exponent γ of the second moment's decay rate, 1 − t^γ at step t.
        eps: added to the root of the second moment.
        weight_decay: decoupled, as AdamW's.

    Raises:
        ConfigError: a value out of range.

    Example:
        >>> import comera, torch
        >>> from comera.optim import SMMF
        >>> model = torch.nn.Linear(256, 256)
        >>> optimizer = SMMF(comera.param_groups(model, lr=1e-3))
        >>> model(torch.randn(4, 256)).square().mean().backward()
        >>> optimizer.step()
        >>> kept = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
        >>> f"{kept:,} bytes, AdamW {2 * 4 * 257 * 256:,}"
        '12,584 bytes, AdamW 526,336'
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        beta: float = 0.9,
        growth: float = 0.999,
        decay: float = -0.5,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "beta": beta, "growth": growth, "decay": decay, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        for group in self.param_groups:
            check_fields(
                SimpleNamespace(**group),
                "",
                {
                    "lr": (group["lr"] >= 0, "a number >= 0"),
                    "beta": (0 <= group["beta"] < 1, "in [0, 1)"),
                    "growth": (0 < group["growth"] <= 1, "in (0, 1]"),
                    "decay": (-1 <= group["decay"] < 0, "in [-1, 0)"),
                    "eps": (group["eps"] > 0, "a number > 0"),
                    "weight_decay": (group["weight_decay"] >= 0, "a number >= 0"),
                },
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every parameter that has a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_dense(self, self.param_groups)
        for group in self.param_groups:
            alike: dict[tuple[object, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    place = (p.numel(), p.dtype, p.device, self._step_of(p))
                    alike.setdefault(place, []).append(p)
            for params in alike.values():
                self._step_alike(group, params)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimizer of torch, which would give the state the parameters' dtype."""
        super().load_state_dict(state_dict)
        saved, own = (
            [p for group in groups for p in group["params"]]
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        for key, p in zip(saved, own, strict=True):
            state = state_dict["state"].get(key, {})
            self.state[p].update({name: state[name].to(p.device, copy=True) for name in _STATE if name in state})

    def _step_of(self, parameter: Tensor) -> float:
        """The number of steps that a parameter has taken; makes its state."""
        state = self.state[parameter]
        if "step" not in state:  # others may keep what they know of a parameter here
            n, m = matrix_shape(parameter.numel())
            state["step"] = torch.zeros(())
            state["signs"] = torch.zeros(-(-n * m // 8), dtype=torch.uint8, device=parameter.device)
            for name, size in zip(_FACTORS, (n, m, n, m), strict=True):
                state[name] = torch.zeros(size, device=parameter.device)
        return float(state["step"])

    def _step_alike(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Move parameters of one size that have taken as many steps."""
        states = [self.state[p] for p in params]
        step = float(states[0]["step"]) + 1
        beta, gamma = group["beta"] * group["growth"] ** (step - 1), 1 - step ** group["decay"]
        shape = (len(params), *matrix_shape(params[0].numel()))
        grads_KNM = torch.stack([p.grad.reshape(-1) for p in params if p.grad is not None]).float().view(shape)
        first_KNM, second_KNM = _whole(states)
        first_KNM.lerp_(grads_KNM, 1 - beta)
        second_KNM.lerp_(grads_KNM.square(), 1 - gamma)
        moved_KN = (first_KNM / second_KNM.sqrt().add_(group["eps"])).flatten(1)
        for p, moved_N, state, factors in zip(params, moved_KN, states, _factored(first_KNM, second_KNM), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(moved_N.view_as(p).to(p.dtype), alpha=group["lr"])
            state["step"] += 1
            state.update(factors)

    def edited_state(self, parameter: Tensor, edit: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The factored moments of a parameter after `edit`, which takes and returns whole ones; changes nothing.

        edit: takes a moment of the parameter's shape and may return one of another shape.
        """
        state = self.state.get(parameter, {})
        if "step" not in state:
            return {}
        edited = [edit(moment.view_as(parameter)) for moment in _whole([state])]
        shape = (1, *matrix_shape(edited[0].numel()))
        return _factored(*(moment.reshape(shape) for moment in edited))[0]


def matrix_shape(numel: int) -> tuple[int, int]:
    """(n, m) with n · m = numel, n ≤ m, and n as large as it can be; (0, 0) for nothing."""
    if numel == 0:
        return 0, 0
    n = next(n for n in range(isqrt(numel), 0, -1) if numel % n == 0)
    return n, numel // n


def state_bytes(numel: int) -> int:
    """Bytes of the factored moments of a parameter."""
    return 4 * 2 * sum(matrix_shape(numel)) + -(-numel // 8)


def _whole(states: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """M̂ and V̂ (K, n, m) of parameters of one size."""
    r, c, square_r, square_c = (torch.stack([state[name] for state in states]) for name in _FACTORS)
    bits = torch.stack([state["signs"] for state in states]).unsqueeze(2)
    powers = bits.new_tensor(_POWERS)
    negative_KN = bits.bitwise_and(powers).ne(0).flatten(1)[:, : r.shape[1] * c.shape[1]]
    first_KNM, second_KNM = _outer(r, c), _outer(square_r, square_c)
    return torch.where(negative_KN.view_as(first_KNM), -first_KNM, first_KNM), second_KNM


def _outer(r_KN: Tensor, c_KM: Tensor) -> Tensor:
    total_K1 = r_KN.sum(1, keepdim=True)
    share_KN = torch.where(total_K1 > 0, r_KN / total_K1, 0.0)  # before the first step, or where all is zero
    return share_KN.unsqueeze(2) * c_KM.unsqueeze(1)


def _factored(first_KNM: Tensor, second_KNM: Tensor) -> list[dict[str, Tensor]]:
    """The state of each of K parameters, of whole moments."""
    size_KNM = first_KNM.abs()
    sums = [size_KNM.sum(2), size_KNM.sum(1), second_KNM.sum(2), second_KNM.sum(1)]
    negative_KN = (first_KNM < 0).flatten(1)
    negative_KN = torch.nn.functional.pad(negative_KN, (0, -negative_KN.shape[1] % 8))
    bytes_KB8 = negative_KN.view(len(negative_KN), -1, 8).to(torch.uint8) * torch.tensor(
        _POWERS, dtype=torch.uint8, device=negative_KN.device
    )
    signs_KB = bytes_KB8.sum(2, dtype=torch.uint8)
    return [
        {name: part.clone() for name, part in zip(_STATE, parts, strict=True)}
        for parts in zip(signs_KB, *sums, strict=True)
    ]
