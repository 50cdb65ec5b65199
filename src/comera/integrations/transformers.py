"""transformers' Trainer: `RankCallback` adapts ranks while it trains, and resumes from its checkpoints.

Checkpoints need nothing else: ranks are part of a model's state, so that `resume_from_checkpoint` and
`load_best_model_at_end` load those that were cut, and the callback's entry in trainer_state.json holds the controller.
"""

from comera.extras import require

require("comera.integrations.transformers", "comera[train]", "transformers")

import logging
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers.trainer_callback import ExportableState, TrainerCallback

from comera.distributed import rewrap_
from comera.errors import ConfigError
from comera.integrations._rates import Rate, StepRates, measured_rates, warn_of_rates
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.rank.controller import RankController
from comera.rank.copies import Copies
from comera.rank.objective import EarlyStage, LateStage
from comera.rank.optimizer_state import reset_state_, unwrap
from comera.tt.spec import Spec

__all__ = ["RankCallback"]

_EARLY, _LATE = EarlyStage(), LateStage()
_WITHOUT_STATE_IN_GROUPS = ("torch.optim.", "transformers.optimization")  # those of others may count steps there
_LOG = logging.getLogger(__name__)


class RankCallback(TrainerCallback, ExportableState):
    """Adapts the ranks of a model's tensor trains while transformers' `Trainer` trains it.

    It attaches a `RankController` to the optimizer, gives it the loss of every step, the ends of epochs and the
    held-out losses, prunes at intervals, lets DistributedDataParallel follow, and meets the target at the last step,
    before the Trainer's last evaluation and checkpoint. Compress the model before the Trainer gets it.

    An optimizer that the Trainer makes itself, one of torch or Adafactor, has one rate for all parameters. Its steps
    then take those of `comera.param_groups(model, lr=args.learning_rate, weight_decay=args.weight_decay)` for cores and
    gates, scaled as its schedule says; `param_groups` of the Trainer's optimizer show the dense rate alone. There is a
    warning for other optimizers without such rates, among them those that you give the Trainer.

    Losses are those that the model returns. A Trainer that computes them itself (`compute_loss_func`,
    `label_smoothing_factor`) hands them on with `record`.

    Args:
        early, late, multiple, copies: as for `RankController`; the stages also as mappings of their fields. Averages
            that another callback makes as training begins are given by a function, `copies=lambda: [averaging.model]`.
        prune_every: optimizer steps between two cuts; 0 cuts at the end only.

    Attributes:
        controller: the `RankController`; None before the first training.

    Raises:
        ConfigError: `prune_every` below 0.

    Example:
        >>> import comera
        >>> from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
        >>> from comera.integrations.transformers import RankCallback
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=96, num_hidden_layers=1))
        >>> _ = comera.tensorize_(model, ratio=5)
        >>> ranks = RankCallback(late=comera.LateStage(target_size=0.5, start_step=1000), prune_every=100)
        >>> arguments = TrainingArguments("out", learning_rate=1e-3, report_to="none")
        >>> trainer = Trainer(model, arguments, callbacks=[ranks])
        >>> # trainer.train(), and after a kill trainer.train(resume_from_checkpoint=True)

    Source: docs/method.md §3.
    """

    def __init__(
        self,
        early: EarlyStage | Mapping[str, Any] = _EARLY,
        late: LateStage | Mapping[str, Any] = _LATE,
        *,
        multiple: int = 1,
        copies: Copies = (),
        prune_every: int = 0,
    ) -> None:
        if prune_every < 0:
            raise ConfigError(f"prune_every: expected a number of steps, or 0 for never, got {prune_every}")
        self.early = early if isinstance(early, EarlyStage) else EarlyStage(**early)
        self.late = late if isinstance(late, LateStage) else LateStage(**late)
        self.multiple, self.copies, self.prune_every = multiple, copies, prune_every
        self.averaged = copies != ()  # also of a callback that was made anew from a checkpoint, without its copies
        self.controller: RankController | None = None
        self.saved: dict[str, Any] | None = None  # state of a controller, for the next one
        self._forward: RemovableHandle | None = None
        self._losses: list[Tensor] = []  # of the micro-batches of this step
        self._of_all = False  # whether each is its share of the step's loss, or else a mean of its own
        self._specs: dict[TensorTrain, Spec] = {}  # as optimizer and DistributedDataParallel know them
        self._wrapper: DistributedDataParallel | None = None
        self.rates: dict[str, Rate] | None = None  # of cores and gates, in the steps of the Trainer's own optimizer
        self._given = False  # whether the Trainer was given an optimizer
        self._step_rates: StepRates | None = None
        self._done = False

    def state(self) -> dict[str, Any]:
        """What the Trainer keeps in trainer_state.json: settings, and the controller's state."""
        settings = {"early": asdict(self.early), "late": asdict(self.late)}
        saved = self.saved if self.controller is None else self.controller.state_dict()
        return {
            "args": {**settings, "multiple": self.multiple, "prune_every": self.prune_every},
            "attributes": {"saved": saved, "averaged": self.averaged, "rates": self.rates},
        }

    def record(self, loss: Tensor) -> None:
        """Observe the loss of a micro-batch, its mean over the batch, where the model does not return one."""
        self._losses.append(loss.detach())

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See whether the Trainer was given an optimizer."""
        self._given = kwargs.get("optimizer") is not None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the optimizer, with the state of the checkpoint that the run goes on from."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self._release()
        if self.averaged and self.copies == ():
            raise ConfigError(
                "expected the copies that this RankCallback had: restore_callback_states_from_checkpoint makes it anew "
                "without them. Leave that option off, as the callback finds its state in the checkpoint without it"
            )
        entry = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        attributes = (entry[0] if isinstance(entry, list) else entry)["attributes"]
        saved = attributes["saved"]
        if saved is None and state.global_step:
            warnings.warn(
                f"the checkpoint of step {state.global_step} holds no state of a RankCallback: its stages begin now",
                stacklevel=2,
            )
        options: dict[str, Any] = {"multiple": self.multiple, "copies": self.copies}
        self.controller = RankController(model, self.early, self.late, **options)
        if saved is not None:
            self.controller.load_state_dict(saved)
        self._set_rates(model, unwrap(optimizer), args, state, attributes.get("rates"))
        self.controller.attach(optimizer)
        self._forward = model.register_forward_hook(self._see, with_kwargs=True)
        self._specs, self._done = _specs(model), False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step without losses."""
        self._losses.clear()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Observe the loss of the step."""
        if self._losses:
            loss = torch.stack(self._losses).float()
            shared = args.world_size if args.average_tokens_across_devices else 1  # then tokens of all processes count
            self._running.observe(loss.sum() * shared if self._of_all else loss.mean())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prune if it is time to; at the last step, meet the target."""
        if state.global_step >= state.max_steps:
            self._finish()
        elif self.prune_every and state.global_step % self.prune_every == 0:
            _LOG.info("%s", self._running.prune_())
        self._follow(kwargs["model"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the epoch."""
        self._running.epoch_ended()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pass on the held-out loss."""
        loss = kwargs["metrics"].get("eval_loss")
        if loss is not None and self._forward is not None:
            self._running.evaluated(float(loss))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Release the optimizer; after a stop before the last step, meet the target in memory.

        The last checkpoint stays as it was, so that the run can go on from it. The Trainer may have loaded its best
        checkpoint just now, with other ranks.
        """
        model = kwargs["model"]
        controller, changed = self._running, [train for train, spec in self._specs.items() if train.spec != spec]
        if changed:
            reset_state_([p for train in changed for p in train.parameters()], [kwargs["optimizer"]])
            _LOG.warning(
                "the best model has other ranks than the last: the optimizer's state of %d tensor trains was reset",
                len(changed),
            )
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            size, target = controller.size(), controller.target_size
            if target is not None and size > target:
                warnings.warn(
                    f"the best model, {state.best_model_checkpoint}, has {size:,} parameters in its tensor trains, "
                    f"above the target of {target:,}: call meet_target_() of the callback's controller, or take the "
                    "last checkpoint",
                    stacklevel=2,
                )
        elif not self._done:
            self._finish()
        self._follow(model)
        self._release()

    def _set_rates(self, model: nn.Module, optimizer: Optimizer, args: Any, state: Any, saved: Any) -> None:
        """Give an optimizer that the Trainer made the rates of tensor trains, those `saved` where a run goes on; warn
        of another one without them. A run that began without them goes on so."""
        groups, self.rates = optimizer.param_groups, None
        made = not self._given and type(optimizer).__module__.startswith(_WITHOUT_STATE_IN_GROUPS)
        if made and not any("name" in group for group in groups):
            if saved is not None:
                self.rates = {name: (rate, decay) for name, (rate, decay) in saved.items()}
            elif not state.global_step and all(
                group.get("initial_lr", group["lr"]) == args.learning_rate
                and group.get("weight_decay") in (args.weight_decay, 0.0)
                for group in groups
            ):
                self.rates = measured_rates(model)
        if self.rates is None:
            warn_of_rates(model, [optimizer])
        else:
            parameters = dict(model.named_parameters())
            self._step_rates = StepRates(optimizer, {parameters[name]: each for name, each in self.rates.items()})

    @property
    def _running(self) -> RankController:
        assert self.controller is not None
        return self.controller

    def _finish(self) -> None:
        controller = self._running
        _LOG.info("%s", controller.prune_() if self.late.target_size is None else controller.meet_target_())
        self._done = True

    def _follow(self, model: nn.Module) -> None:
        """After ranks have changed: let the wrapper see the parameters anew."""
        specs = _specs(model)
        if self._wrapper is not None and specs != self._specs:
            rewrap_(self._wrapper)
        self._specs = specs

    def _release(self) -> None:
        if self.controller is not None:
            self.controller.detach()
        if self._forward is not None:
            self._forward.remove()
        if self._step_rates is not None:
            self._step_rates.remove()
        self._forward = self._wrapper = self._step_rates = None

    def _see(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After a forward of the model in training: keep its loss."""
        if not (model.training and torch.is_grad_enabled()):
            return
        self._wrapper = DistributedDataParallel._active_ddp_module  # the Trainer hands out only what it wraps
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if loss is None and kwargs.get("labels") is not None and isinstance(output, tuple):
            loss = output[0]
        if loss is not None and loss.numel() == 1:
            self._losses.append(loss.detach().reshape(()))
            self._of_all = kwargs.get("num_items_in_batch") is not None


def _specs(model: nn.Module) -> dict[TensorTrain, Spec]:
    return {train: train.spec for _, train in named_trains(model)}
