"""`compress`: one call for the usual case, whose parts are those that programs wire by hand."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from comera.convert.config import TensorizeConfig
from comera.convert.report import TensorizeReport
from comera.convert.tensorize import Plan, tensorize_
from comera.errors import ConfigError
from comera.fusion.fuse import fuse_
from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups
from comera.rank.controller import RankController
from comera.rank.objective import LateStage
from comera.rank.optimizer_state import unwrap
from comera.rank.target import check_target
from comera.rank.trains import adaptable_trains


@dataclass
class Run:
    """A compressed model and what trains it; replace any part before the first step.

    Attributes:
        model: the model, compressed in place.
        report: what became of its layers.
        optimizer: AdamW, with rates that follow from the dense one.
        ranks: the attached `RankController`, with the stages of ranks.
        steps: optimizer steps of the whole training.

    See `compress`.
    """

    model: nn.Module
    report: TensorizeReport
    optimizer: Optimizer
    ranks: RankController
    steps: int
    taken: int = 0

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace a part: the ranks adapt at the steps of the optimizer that is there, and no others do."""
        before = vars(self).get(name)
        super().__setattr__(name, value)
        if before is None or before is value or name not in ("ranks", "optimizer"):
            return
        (before if name == "ranks" else self.ranks).detach()
        if unwrap(self.optimizer) not in self.ranks.attached:
            self.ranks.attach(self.optimizer)

    def step(self, loss: Tensor) -> None:
        """Backward, the optimizer's step with the ranks', and zero gradients; the last step meets the target.

        Raises ConfigError after the last step.
        """
        if self.taken >= self.steps:
            raise ConfigError(f"expected {self.steps:,} steps, got one more: give compress() the steps of all training")
        loss.backward()
        self.ranks.observe(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1
        if self.taken == self.steps:
            self.ranks.prune_() if self.ranks.late.target_size is None else self.ranks.meet_target_()

    def callback(self, trainer: Literal["transformers", "lightning"] = "transformers") -> Any:
        """In place of `step`: the `RankCallback` of a trainer, which is given `optimizer` too."""
        if trainer == "lightning":
            from comera.integrations.lightning import RankCallback as Callback
        elif trainer == "transformers":
            from comera.integrations.transformers import RankCallback as Callback  # type: ignore[assignment]
        else:
            raise ConfigError(f"trainer: expected transformers or lightning, got {trainer!r}")
        ranks = self.ranks
        callback = Callback(ranks.early, ranks.late, multiple=ranks.multiple, copies=ranks.copies)
        ranks.detach()  # the callback has a controller of its own, in the trainer's checkpoints
        return callback


def compress(
    model: nn.Module,
    config: TensorizeConfig | None = None,
    *,
    ratio: float | None = None,
    target_size: float | int | str | None = None,
    steps: int,
    lr: float,
    weight_decay: float = 0.0,
    fuse: bool = True,
) -> Run:
    """Compress a model in place, fuse it, and make the optimizer and the rank adaptation that train it.

    The size falls to the target from a quarter of the steps to three quarters of them, so that the rest can recover.

    Args:
        model, config, ratio: as for `tensorize_`.
        target_size: as in `LateStage`; None: ranks fall as far as the loss lets them.
        steps: optimizer steps of the whole training, 4 or more.
        lr, weight_decay: those of the dense model, as for `param_groups`.
        fuse: whether to call `fuse_`.

    Returns:
        The parts, wired together.

    Raises:
        ConfigError: steps or a rate out of range, or nothing to train.
        RankError: a target out of reach of the compressed model, or for layers with an activation, whose ranks cannot
            be cut to one. The model is unchanged then, as after what `tensorize_` raises.

    Example:
        >>> import torch, comera
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 16))
        >>> run = comera.compress(model, ratio=4, target_size=0.5, steps=20, lr=1e-3)
        >>> for _ in range(run.steps):
        ...     run.step(model(torch.randn(8, 64)).square().mean())
        >>> comera.model_size(model).tensorized <= run.ranks.target_size
        True
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 4:
        raise ConfigError(f"steps: expected the optimizer steps of the whole training, 4 or more, got {steps!r}")
    param_groups(model, lr=lr, weight_decay=weight_decay)  # may raise, before anything has changed
    late = LateStage()
    if target_size is not None:
        late = LateStage(target_size=target_size, start_step=steps // 4, steps=steps // 2)
        plan = Plan.of(model, config, ratio, None)
        trains = [plan.draw(group, 1.0, "meta", None) for group in plan.groups]
        check_target([*trains, *adaptable_trains(model).values()], target_size)
    report = tensorize_(model, config, ratio=ratio)
    if fuse:
        fuse_(model)
    optimizer = AdamW(param_groups(model, lr=lr, weight_decay=weight_decay))
    return Run(model, report, optimizer, RankController(model, late=late).attach(optimizer), steps)
