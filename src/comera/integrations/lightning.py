"""Lightning: `RankCallback` adapts ranks while `Trainer.fit` trains, and resumes from its checkpoints.

Checkpoints need nothing else: ranks are part of a model's state, so `ckpt_path=` and `load_from_checkpoint` load those
that were cut, and the callback's own entry holds the controller. Compress the model in the module's `__init__` or
`configure_model`, before its optimizers exist.
"""

import sys
import warnings
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from comera.errors import ConfigError
from comera.extras import installed, require
from comera.integrations._rates import warn_of_rates
from comera.nn.tensor_train import named_trains
from comera.rank.controller import RankController
from comera.rank.copies import Copies
from comera.rank.objective import EarlyStage, LateStage
from comera.rank.optimizer_state import parameters_of

__all__ = ["RankCallback"]

_EARLY, _LATE = EarlyStage(), LateStage()
# One library under two names; a program that imports one of them means that one.
_NAMES = ("lightning.pytorch", "pytorch_lightning")
_NAME = next((name for name in _NAMES if name in sys.modules), None) or next(
    (name for name in _NAMES if installed(name.partition(".")[0])), _NAMES[0]
)
require("comera.integrations.lightning", "lightning", _NAME.partition(".")[0])
_Callback: Any = import_module(_NAME).Callback


class RankCallback(_Callback):
    """Adapts the ranks of a `LightningModule`'s tensor trains while a `Trainer` fits it.

    It attaches a `RankController` to the optimizers, gives it the loss of every backward, the ends of epochs and the
    held-out losses, prunes at intervals and meets the target at the end. Give the same instance, or one of the same
    settings, to the Trainer that resumes. The averages of Lightning's callbacks (`EMAWeightAveraging`,
    `StochasticWeightAveraging`) follow the ranks, wherever these callbacks stand in the Trainer's list.

    Args:
        early, late, multiple: as for `RankController`.
        copies: averages besides those that callbacks, or the module, hold as an `AveragedModel` or an `EMAModel`; as
            for `RankController`.
        prune_every: optimizer steps between two cuts; 0 cuts at the end only.
        monitor: name of a logged held-out loss, for `LateStage.plateau`.

    Attributes:
        controller: the `RankController`; None before the first fit.

    Raises:
        ConfigError: `prune_every` below 0.

    Example:
        >>> import torch, comera
        >>> import pytorch_lightning as pl
        >>> from comera.integrations.lightning import RankCallback
        >>> class Classifier(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 16))
        ...         comera.tensorize_(self.model, comera.TensorizeConfig(comera.TT(order=4, rank=8)))
        ...     def training_step(self, batch, index):
        ...         return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(comera.param_groups(self, lr=1e-3))
        >>> ranks = RankCallback(late=comera.LateStage(target_size=0.5, start_step=100), prune_every=50)
        >>> trainer = pl.Trainer(callbacks=[ranks])  # then trainer.fit(Classifier(), batches)

    Source: docs/method.md §3.
    """

    def __init__(
        self,
        early: EarlyStage = _EARLY,
        late: LateStage = _LATE,
        *,
        multiple: int = 1,
        copies: Copies = (),
        prune_every: int = 0,
        monitor: str = "val_loss",
    ) -> None:
        super().__init__()
        if prune_every < 0:
            raise ConfigError(f"prune_every: expected a number of steps, or 0 for never, got {prune_every}")
        self.early, self.late, self.multiple, self.copies = early, late, multiple, copies
        self.prune_every, self.monitor = prune_every, monitor
        self.controller: RankController | None = None
        self._state: dict[str, Any] | None = None  # of the checkpoint, until the controller exists
        self._step = 0  # the last one that was seen to end

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stand behind callbacks that write an average into the model at the end: the target is met after that."""
        others = [each for each in trainer.callbacks if each is not self]
        behind = max((k for k, each in enumerate(others, 1) if hasattr(each, "_average_model")), default=0)
        if behind > trainer.callbacks.index(self):
            trainer.callbacks = [*others[:behind], self, *others[behind:]]  # a new list: the old one is walked now

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Once the optimizers exist: attach to those that hold tensor trains."""
        # trainer.model may be wrapped (DDP), and the wrapper has to follow the ranks
        self.controller = RankController(
            trainer.model, self.early, self.late, multiple=self.multiple, copies=self._averages(trainer)
        )
        self.controller.copies = lambda: self._averages(trainer)  # some are made later
        if self._state is not None:
            self.controller.load_state_dict(self._state)
            self._state = None
        elif trainer.ckpt_path is not None:
            warnings.warn(
                f"the checkpoint {trainer.ckpt_path} holds no state of a RankCallback: its stages begin now",
                stacklevel=2,
            )
        held = {parameter for _, train in named_trains(pl_module) for parameter in train.parameters()}
        training = [optimizer for optimizer in trainer.optimizers if held & parameters_of(optimizer)]
        for optimizer in training or trainer.optimizers:  # if there is none, the controller says what is missing
            self.controller.attach(optimizer)
        self._step = trainer.global_step
        warn_of_rates(pl_module, training)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Observe the loss as `training_step` returned it, without the factors of accumulation and of a GradScaler."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        self._running.observe(loss.detach() * (trainer.accumulate_grad_batches / scale))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """After an optimizer's step: prune if it is time to."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            if self.prune_every and self._step % self.prune_every == 0:
                self._running.prune_()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Count the epoch."""
        self._running.epoch_ended()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Pass on the held-out loss, if the module logs it."""
        loss = trainer.callback_metrics.get(self.monitor)
        if loss is not None and not trainer.sanity_checking and trainer.state.fn == "fit":
            self._running.evaluated(float(loss))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Meet the target, for whatever is saved from now on; without one, cut what is pruned."""
        if self.late.target_size is None:
            self._running.prune_()
        else:
            self._running.meet_target_()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Release the optimizers."""
        if self.controller is not None:
            self.controller.detach()

    def state_dict(self) -> dict[str, Any]:
        """The controller's state, which Lightning puts into its checkpoints."""
        return {} if self.controller is None else self.controller.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint for the controller that `on_fit_start` makes."""
        self._state = dict(state_dict) or None

    def _averages(self, trainer: Any) -> list[object]:
        """What averages the model now: `copies`, and what callbacks and the module hold."""
        found = list(self.copies() if callable(self.copies) else self.copies)
        for holder in (*trainer.callbacks, trainer.lightning_module):
            for name, value in vars(holder).items():
                model = name == "_average_model" or isinstance(value, AveragedModel)
                if any(named_trains(value)) if model and value is not None else hasattr(value, "shadow_params"):
                    found.append(value)
        return list(dict.fromkeys(found))

    @property
    def _running(self) -> RankController:
        assert self.controller is not None
        return self.controller
