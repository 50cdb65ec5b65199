"""The chain of cores as a module: cores, rank parameters on the bonds, and their pure masking.

Every compressed layer owns one `TensorTrain` (tied layers share one), so sizes, rank adaptation, pruning and
checkpoints walk over `TensorTrain`s by type and never over names of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from comera.errors import SpecError
from comera.tt.dense import absorb, materialize
from comera.tt.init import init_cores
from comera.tt.spec import Spec


class TensorTrain(nn.Module):
    """Cores and rank parameters of one compressed weight.

    spec: modes and ranks (TT or TTM).
    init_std: standard deviation of the materialised weight that `reset_parameters` draws.
    threshold: a rank parameter at or below it is inactive: it multiplies by exactly 0 and counts 0 (τ, METHOD §2).
    Parameters: `cores`, `order` tensors of `spec.core_shapes`; `rank_params`, `order - 1` vectors of `spec.bonds`.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        init_std: float,
        threshold: float = 1e-2,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.init_std = init_std
        self.threshold = threshold
        factory = {"dtype": dtype or torch.get_default_dtype(), "device": device}
        self.cores = nn.ParameterList([nn.Parameter(torch.empty(s, **factory)) for s in spec.core_shapes])
        self.rank_params = nn.ParameterList([nn.Parameter(torch.empty(r, **factory)) for r in spec.bonds])
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the cores anew for `init_std` and set the rank parameters to ones (meta tensors stay meta)."""
        device = self.cores[0].device
        if device.type != "meta":
            fresh = init_cores(
                self.spec, self.init_std, generator=generator, dtype=self.cores[0].dtype, device=device
            )
            for core, value in zip(self.cores, fresh, strict=True):
                core.copy_(value)
        for d in self.rank_params:
            d.fill_(1.0)

    @torch.no_grad()
    def set_(self, spec: Spec, cores: Sequence[Tensor], rank_params: Sequence[Tensor] | None = None) -> None:
        """Replace the numbers in place, shapes included; the Parameter objects stay, so optimizers keep theirs.

        cores: `order` tensors of `spec.core_shapes`; rank_params: vectors of `spec.bonds`, ones if left out.
        Raises SpecError when shapes do not fit `spec` or the order changes.
        """
        if rank_params is None:
            rank_params = [cores[0].new_ones(r) for r in spec.bonds]
        came = tuple(tuple(c.shape) for c in cores), tuple(tuple(d.shape) for d in rank_params)
        want = spec.core_shapes, tuple((r,) for r in spec.bonds)
        if came != want or len(cores) != len(self.cores):
            raise SpecError(f"expected cores and rank parameters of shapes {want} for {spec}, got {came}")
        self.spec = spec
        for parameter, value in zip([*self.cores, *self.rank_params], [*cores, *rank_params], strict=True):
            parameter.data = value.detach().to(parameter.dtype).contiguous().clone()
            parameter.grad = None

    def active(self) -> list[Tensor]:
        """Per bond, a boolean vector: which rank parameters are above the threshold."""
        return [d.detach() > self.threshold for d in self.rank_params]

    def effective_cores(self) -> list[Tensor]:
        """Cores with the rank parameters absorbed and inactive slices exactly zero; writes nothing."""
        masked = [torch.where(d > self.threshold, d, torch.zeros_like(d)) for d in self.rank_params]
        return absorb(list(self.cores), masked)

    def dense(self) -> Tensor:
        """The materialised weight, of `spec.shape`."""
        return materialize(self.spec, self.effective_cores())

    def extra_repr(self) -> str:
        return f"{self.spec}, {self.spec.numel + self.spec.rank_numel:,} of {self.spec.dense_numel:,} numbers"


def named_trains(model: nn.Module) -> Iterator[tuple[str, TensorTrain]]:
    """Every TensorTrain of a model once (tied ones under their first name), with its qualified name."""
    for name, module in model.named_modules():
        if isinstance(module, TensorTrain):
            yield name, module
