"""Training: configuration, task, step, loop, checkpoints, logging, memory."""

from comera.extras import require

require("comera.trainer", "comera[train]", "accelerate", "filelock", "rich", "yaml")

from comera.trainer.config import TrainConfig
from comera.trainer.loop import fit
from comera.trainer.step import TrainStep
from comera.trainer.task import Task

__all__ = ["Task", "TrainConfig", "TrainStep", "fit"]
