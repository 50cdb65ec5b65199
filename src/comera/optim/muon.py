"""Muon for compressed models: the momentum of each matrix, orthogonalized, for dense weights and for cores alike.

The momentum M of a matrix is replaced by the orthogonal matrix nearest to it, msign(M) = U Vᵀ for M = U Σ Vᵀ, so that a
step moves all directions alike instead of the few that gradients favour. A Newton-Schulz iteration computes it from
products alone::

    X ← M / ‖M‖_F;  five times  X ← a X + (b XXᵀ + c (XXᵀ)²) X,  a, b, c = 3.4445, −4.7750, 2.0315

W ← W − 0.2 η √max(in, out) · msign(M) moves the entries by 0.2 η as a root mean square, as AdamW does about, so its
rates can be used. A core is seen as the matrices that the product applies (`as_matrices`), and its rate is such that
it moves the weight by 1/√K of what η allows a dense one, in spectral norm (`core_rates`). The smaller side of a core is
made of ranks, so orthogonalizing cores costs less than orthogonalizing dense weights.

Source: Jordan et al. 2024 (Muon), Liu et al. 2025 (arXiv:2502.16982) for the scale; for low-rank factors Spectron
(arXiv:2602.12429); for tensor trains of any order and block tensor trains beyond. docs/method.md §9.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from comera.errors import ConfigError
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.optim.adamw import AdamW, check_dense
from comera.optim.core_matrices import as_matrices, from_matrices
from comera.optim.core_rates import ADAM, MUON, Reach
from comera.optim.param_groups import groups_for, linear_cores
from comera.tt.spec import Spec

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315


class _Kind(NamedTuple):
    """What weights have in common whose steps are taken together. spec, k: of cores; None, 0 of dense weights."""

    spec: Spec | None
    k: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    lr: float

    def as_matrices(self, values: Tensor) -> Tensor:
        """Values (weights, ...) as matrices (X, D, E)."""
        return values if self.spec is None else as_matrices(self.spec, self.k, values).flatten(0, 1)

    def from_matrices(self, matrices_XDE: Tensor, weights: int) -> Tensor:
        """Undoes `as_matrices`."""
        if self.spec is None:
            return matrices_XDE
        return from_matrices(self.spec, self.k, matrices_XDE.unflatten(0, (weights, -1)))


class Muon(AdamW):
    """Orthogonalized momentum for the weights of linear layers, dense or compressed, and AdamW for everything else.

    AdamW takes tables, the output head, gates, biases and norms. The state follows falling ranks and resumes exactly,
    as AdamW's does; each weight has one moment instead of two.

    Args:
        model: the model to train, compressed or not; fully sharded weights (FSDP2) are refused.
        lr: learning rate of dense weights, about AdamW's or up to four times it; those of cores follow.
        rates, core_lr, table_lr, rank_lr, weight_decay: as for `comera.param_groups`.
        momentum: decay rate of the momentum, which is Nesterov's.
        betas, eps: of AdamW.
        exclude: names of layers, as patterns ("*.classifier"), that AdamW takes, besides the output embedding that the
            model names itself (`get_output_embeddings`) and weights tied to a table.

    Raises:
        ConfigError: a value out of range, a pattern without a layer, or sharded weights.

    Example:
        >>> import comera, torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> model = Sequential(Linear(256, 256), ReLU(), Linear(256, 10))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.BTT(rank=2), overrides={"2": None}))
        >>> optimizer = comera.optim.Muon(model, lr=2e-3, exclude=["2"])
        >>> [(group["name"], group["orthogonal"]) for group in optimizer.param_groups]
        [('cores', True), ('cores', True), ('ranks', False), ('dense', False), ('dense_no_decay', False)]
        >>> model(torch.randn(4, 256)).square().mean().backward()
        >>> optimizer.step()
    """

    captured = False

    def __init__(
        self,
        model: nn.Module,
        lr: float = 2e-3,
        *,
        rates: Literal["flat", "spectral"] = "spectral",
        core_lr: float | None = None,
        table_lr: float | None = None,
        rank_lr: float | None = None,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        exclude: Sequence[str] = (),
    ) -> None:
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum must be in [0, 1), got {momentum}")
        self._cores = {core: (train, k) for _, train in named_trains(model) for k, core in enumerate(train.cores)}
        matrices = orthogonal_parameters(model, exclude)

        def reach_of(train: TensorTrain) -> Reach:
            return MUON if matrices.issuperset(train.cores) else ADAM

        groups = groups_for(model, reach_of, lr, rates, core_lr, table_lr, rank_lr, weight_decay)
        split = [
            {**group, "params": params, "orthogonal": orthogonal, "momentum": momentum}
            for group in groups
            for orthogonal in (True, False)
            if (params := [p for p in group["params"] if (p in matrices) == orthogonal])
        ]
        super().__init__(split, lr=lr, betas=betas, eps=eps, fused=True)
        self.defaults |= {"orthogonal": False, "momentum": momentum}  # of groups added later, which are AdamW's
        # a GradScaler unscales before the step: only fused AdamW does it inside
        self._step_supports_amp_scaling = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cores": self._cores}  # copies and pickles of torch's own have three parts

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """The first orthogonal group updates all of them, since matrices of one shape are orthogonalized together."""
        if group is self.param_groups[0]:
            check_dense(self, self.param_groups)
        if not group["orthogonal"]:
            return super()._init_group(group, *lists)
        groups = [each for each in self.param_groups if each["orthogonal"]]
        if group is groups[0]:
            self._step_matrices(groups)
        return False

    def _adam_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["orthogonal"]]

    def _step_matrices(self, groups: Sequence[dict[str, Any]]) -> None:
        """W ← (1 − η λ) W − 0.2 η √max(in, out) · msign(M), M the momentum after the gradient.

        Weights of one kind and rate are stacked: a compressed model has dozens of small cores, each of which would take
        a dozen small operations.
        """
        alike: dict[_Kind, list[tuple[Tensor, Tensor]]] = {}  # weights of one kind and the directions of their momenta
        for group in groups:
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if not params:
                continue
            grads = [p.grad for p in params]
            moments = [self._moment(p) for p in params]
            torch._foreach_add_([self.state[p]["step"] for p in params], 1)  # as all states of AdamW count their steps
            torch._foreach_lerp_(moments, grads, 1 - group["momentum"])
            directions = torch._foreach_lerp(grads, moments, group["momentum"])
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            for p, direction in zip(params, directions, strict=True):
                alike.setdefault(self._kind(p, group["lr"]), []).append((p, direction))
        stacked = [torch.stack([direction for _, direction in found]) for found in alike.values()]
        signs = orthogonalized([kind.as_matrices(each) for kind, each in zip(alike, stacked, strict=True)])
        for (kind, found), sign_XDE in zip(alike.items(), signs, strict=True):
            moves = kind.from_matrices(sign_XDE, len(found)) * (-kind.lr * MUON.step(*sign_XDE.shape[-2:]))
            torch._foreach_add_([p for p, _ in found], list(moves.unbind()))

    def _moment(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state.update(step=torch.zeros(()), momentum=torch.zeros_like(parameter))
        moment: Tensor = state["momentum"]
        return moment

    def _kind(self, parameter: Tensor, lr: float) -> _Kind:
        train, k = self._cores.get(parameter, (None, 0))
        spec = None if train is None else train.spec
        return _Kind(spec, k, parameter.shape, parameter.dtype, parameter.device, lr)


def orthogonalized(batches: Sequence[Tensor]) -> list[Tensor]:
    """msign of each matrix of batches (X, D, E), about: singular values of 0.7 to 1.2, and zero where they are zero.

    Batches of one shape, transposed or not, go through the iteration together.
    """
    flat = [batch if batch.shape[1] <= batch.shape[2] else batch.mT for batch in batches]
    places: dict[tuple[object, ...], list[int]] = {}
    for place, batch in enumerate(flat):
        places.setdefault((batch.shape[1:], batch.dtype, batch.device), []).append(place)
    signs: list[Tensor] = list(flat)
    for alike in places.values():
        x_XDE = torch.cat([flat[place] for place in alike]).float()
        x_XDE /= torch.linalg.vector_norm(x_XDE, dim=(1, 2), keepdim=True).clamp_min_(1e-7)
        parts = _newton_schulz(x_XDE).to(flat[alike[0]].dtype).split([len(flat[place]) for place in alike])
        for place, part in zip(alike, parts, strict=True):
            signs[place] = part if flat[place] is batches[place] else part.mT
    return signs


def _newton_schulz(x_XDE: Tensor) -> Tensor:
    """The iteration, for D ≤ E. Where E is much larger, on small matrices alone: with G = XXᵀ and P = aI + bG + cG² a
    step is X ← P X and G ← P G P, so the steps collect in Q ← P Q, and X is multiplied once."""
    d, e = x_XDE.shape[1:]
    if e < 2 * d:
        for _ in range(_STEPS):
            gram_XDD = x_XDE @ x_XDE.mT
            x_XDE = torch.baddbmm(x_XDE, torch.baddbmm(gram_XDD, gram_XDD, gram_XDD, beta=_B, alpha=_C), x_XDE, beta=_A)
        return x_XDE
    gram_XDD = x_XDE @ x_XDE.mT
    q_XDD = torch.eye(d, dtype=x_XDE.dtype, device=x_XDE.device).expand_as(gram_XDD)
    for _ in range(_STEPS):
        p_XDD = torch.baddbmm(gram_XDD, gram_XDD, gram_XDD, beta=_B, alpha=_C)
        p_XDD.diagonal(dim1=1, dim2=2).add_(_A)
        q_XDD, gram_XDD = p_XDD @ q_XDD, p_XDD @ gram_XDD @ p_XDD
    return q_XDD @ x_XDE


def orthogonal_parameters(model: nn.Module, exclude: Sequence[str] = ()) -> set[Tensor]:
    """Weights of linear layers that are not left to AdamW: dense ones, and cores."""
    if sharded := [name for name, p in model.named_parameters() if hasattr(p, "full_tensor")]:
        raise ConfigError(
            f"Muon orthogonalizes whole matrices, but {len(sharded)} parameters are sharded, such as {sharded[0]!r}: "
            "use AdamW with fully_shard, or DistributedDataParallel"
        )
    names = [name for name, _ in model.named_modules()]
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"exclude: no layer's name matches {pattern!r}; names are such as {names[-1]!r}")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    left: set[Tensor] = set()
    for name, module in model.named_modules():
        own = not isinstance(module, _TABLES)  # a table's n-grams are modules of their own
        if module is head or not own or any(fnmatchcase(name, pattern) for pattern in exclude):
            left |= set(module.parameters(recurse=own))
    weights = (module._parameters.get("weight") for module in model.modules())
    found: set[Tensor] = {weight for weight in weights if weight is not None and weight.ndim == 2}
    for _, train in named_trains(model):
        found |= set(linear_cores(train))
    return found - left
