"""Gradients from forward passes alone: what a device without back-propagation can measure.

Along a random direction z of signs ±1, a two-point difference of the loss L gives the slope, and from Q of them::

    g = (1/Q) Σ_q [L(w + ε z_q) − L(w − ε z_q)] / 2ε · z_q          E[g] = ∇L + O(ε²)
    E‖g − ∇L‖² = (d − 1) ‖∇L‖² / Q                                  d: elements of w

The variance grows with d, which is why compressed layers suit it: their cores have few elements. No direction is kept.
Each is drawn again from its seed wherever it is needed (arXiv:2305.17333).

One tensor at a time, it is Σ_t (d_t − 1) ‖∇_t L‖² / Q over the tensors t, for 2Q passes a tensor. At equal passes that
is less than above where small tensors have large gradients, and about the same where gradients are spread evenly.

Source: Spall 1992 (SPSA); Zhao et al. 2025 (arXiv:2502.12384), one core at a time; Yang et al. 2024 (arXiv:2406.18060),
the number of queries. docs/method.md §11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from random import Random
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from comera.errors import ConfigError, check_fields

Layout = Literal["whole", "tensors"]
LAYOUTS: tuple[Layout, ...] = ("whole", "tensors")


def adaptive_queries(epoch: int, *, alpha: float, beta: float, maximum: int) -> int:
    """AdaZeta's number of queries in an epoch: more and more, for late epochs need the better estimates.

    Args:
        epoch: e, from 0.
        alpha, beta: scale and power of min(⌊α · e^β⌋, maximum), at least 1; β in (0, 1) grows ever more slowly.
        maximum: the most queries of a step.

    Raises:
        ConfigError: a value out of range.

    Example:
        >>> from comera.optim import adaptive_queries
        >>> [adaptive_queries(epoch, alpha=2, beta=0.5, maximum=5) for epoch in range(9)]
        [1, 2, 2, 3, 4, 4, 4, 5, 5]
    """
    values = SimpleNamespace(epoch=epoch, alpha=alpha, beta=beta, maximum=maximum)
    checks = {
        "epoch": (epoch >= 0, "a number >= 0"),
        "alpha": (0 < alpha < float("inf"), "a number > 0"),
        "beta": (0 <= beta < float("inf"), "a number >= 0"),
        "maximum": (maximum >= 1, "at least 1"),
    }
    check_fields(values, "", checks)
    return min(max(int(alpha * epoch**beta), 1), maximum)


class ZerothOrder:
    """Estimates gradients from values of the loss, for any model and any optimizer.

    It is for hardware, layers or losses without a backward, and for the memory of inference: nothing is kept of a
    forward pass, no direction is kept, and what holds the parameters while they are moved becomes their gradient. It is
    not for models that can be back-propagated in memory: an estimate for d parameters from Q queries costs 2Q forward
    passes and is off by √((d − 1)/Q) times the length of the gradient.

    Estimates depend on `seed` and `step` alone, which `state_dict` has. All evaluations of one estimate draw the same
    random numbers of torch (dropout), so that only the parameters differ. Afterwards the parameters are what they were,
    to the bit.

    Args:
        parameters: those to estimate gradients for; what needs no gradient is skipped.
        eps: how far each element is moved, in both directions. Too large, and the curvature enters; too small, and the
            rounding of the loss does. float32 suits 1e-3, float64 1e-5; do not use it with a loss in bfloat16.
        queries: random directions of an estimate, each with two values of the loss. May be set between steps, as to
            `adaptive_queries`.
        layout: "whole" moves all parameters together; "tensors" one at a time, such as one core of a tensor train, for
            as many queries each.
        seed: of the directions.

    Raises:
        ConfigError: a value out of range, or no floating-point parameter.

    Example:
        >>> import torch, comera
        >>> from comera.optim import ZerothOrder
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(64, 16)
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=2)))
        >>> loss = lambda: (model(x)[:, 0] - x[:, 0]).square().mean()
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        >>> estimator = ZerothOrder(model.parameters(), queries=8)
        >>> losses = []
        >>> for step in range(100):
        ...     losses.append(estimator.estimate(loss))  # in place of zero_grad, the loss and backward
        ...     optimizer.step()
        >>> bool(losses[-1] < losses[0] / 2), estimator.state_dict()
        (True, {'seed': 0, 'step': 100})
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        eps: float = 1e-3,
        queries: int = 1,
        layout: Layout = "whole",
        seed: int = 0,
    ) -> None:
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        self.eps, self.queries, self.layout, self.seed, self.step = eps, queries, layout, seed, 0
        self._check()
        if not self.parameters:
            raise ConfigError("ZerothOrder: expected parameters that require gradients, got none")

    def _check(self) -> None:
        checks = {
            "eps": (0 < self.eps < float("inf"), "a number > 0"),
            "queries": (isinstance(self.queries, int) and self.queries >= 1, "an integer >= 1"),
            "layout": (self.layout in LAYOUTS, f"one of {', '.join(LAYOUTS)}"),
            "step": (self.step >= 0, "a number >= 0"),
        }
        check_fields(self, "", checks)

    @property
    def evaluations(self) -> int:
        """Values of the loss that the next estimate takes."""
        return 2 * self.queries * (1 if self.layout == "whole" else len(self.parameters))

    def state_dict(self) -> dict[str, int]:
        """What the next estimates depend on."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the estimator of `state` stood."""
        self.seed, self.step = int(state["seed"]), int(state["step"])

    def estimate(self, closure: Callable[[], Tensor]) -> Tensor:
        """Set the gradient of every parameter to an estimate, in place of `zero_grad` and `backward`.

        Args:
            closure: computes the loss of the parameters as they are, a scalar; it runs without gradients. For several
                micro-batches, let it return their mean.

        Returns:
            The loss, the mean of all values: that at the parameters but for O(ε²).
        """
        loss, gradients = self._estimated(closure)
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        return loss

    def surrogate(self, closure: Callable[[], Tensor]) -> Tensor:
        """The loss, with the estimate as its gradient: for trainers that call `backward` themselves.

        Its graph holds the estimates and nothing of the model.

        Args:
            closure: as for `estimate`.

        Example:
            >>> import torch
            >>> from comera.optim import ZerothOrder
            >>> w = torch.ones(1, requires_grad=True)
            >>> loss = ZerothOrder([w], eps=0.5).surrogate(lambda: (w**2).sum())  # of one element: no variance
            >>> loss.backward()
            >>> loss.item(), w.grad.item()  # 1 + ε²; a difference of two points is exact for squares
            (1.25, 2.0)
        """
        loss, gradients = self._estimated(closure)
        products = [(p * gradient).sum() for p, gradient in zip(self.parameters, gradients, strict=True)]
        linear = torch.stack([product.to(loss) for product in products]).sum()
        return loss + (linear - linear.detach())

    @torch.no_grad()
    def _estimated(self, closure: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The mean loss and the estimated gradients."""
        self._check()
        draws = _Draws({p.device for p in self.parameters})
        blocks = [self.parameters] if self.layout == "whole" else [[p] for p in self.parameters]
        losses: list[Tensor] = []
        gradients: list[Tensor] = []
        for k, block in enumerate(blocks):
            buffers = [p.clone() for p in block]  # the parameters first, their gradients afterwards
            slopes = []
            try:
                for query in range(self.queries):
                    plus, minus = (self._value(closure, block, buffers, k, query, sign, draws) for sign in (1, -1))
                    slopes.append((plus - minus) / (2 * self.eps * self.queries))
                    losses += [plus, minus]
            finally:
                for p, buffer in zip(block, buffers, strict=True):
                    p.copy_(buffer)
            for buffer in buffers:
                buffer.zero_()
            for query, slope in enumerate(slopes):
                for buffer, z in zip(buffers, self._directions(block, k, query), strict=True):
                    buffer.addcmul_(z, slope.to(buffer))
            gradients += buffers
        self.step += 1
        return torch.stack(losses).mean(), gradients

    def _value(
        self,
        closure: Callable[[], Tensor],
        block: list[Tensor],
        origin: list[Tensor],
        k: int,
        query: int,
        sign: int,
        draws: _Draws,
    ) -> Tensor:
        """The loss with block `k` moved from `origin` by ±ε along the query's direction."""
        for p, start, z in zip(block, origin, self._directions(block, k, query), strict=True):
            p.copy_(start).add_(z, alpha=sign * self.eps)
        draws.repeat()
        value = closure()
        if value.numel() != 1:
            raise ConfigError(f"ZerothOrder: expected a closure that returns a scalar, got shape {tuple(value.shape)}")
        return value.reshape(()).to(torch.promote_types(value.dtype, torch.float32))

    def _directions(self, block: list[Tensor], k: int, query: int) -> Iterator[Tensor]:
        """The signs z of a query for each tensor of block `k`, the same ones at each call."""
        seed = Random(f"{self.seed} {self.step} {k} {query}").getrandbits(63)
        generators: dict[torch.device, torch.Generator | None] = {}
        for p in block:
            if p.is_meta:  # for estimates of memory; it has no generators
                generators[p.device] = None
            elif p.device not in generators:
                generators[p.device] = torch.Generator(p.device).manual_seed(seed)
            z = torch.randint(0, 2, p.shape, generator=generators[p.device], dtype=p.dtype, device=p.device)
            yield z.mul_(2).sub_(1)


class _Draws:
    """Lets torch draw the same random numbers again, on the CPU and on `devices`."""

    def __init__(self, devices: set[torch.device]) -> None:
        self.cpu = torch.get_rng_state()
        self.gpus = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}

    def repeat(self) -> None:
        """Go back to where the random numbers stood at first."""
        torch.set_rng_state(self.cpu)
        for gpu, state in self.gpus.items():
            torch.cuda.set_rng_state(state, gpu)
