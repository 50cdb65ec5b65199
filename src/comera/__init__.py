"""CoMERA for PyTorch: rank-adaptive tensor-compressed training."""

__version__ = "0.1.0"

from comera.convert import TT, TTM, TensorizeConfig, materialize_, tensorize_
from comera.errors import ComeraError
from comera.optim.param_groups import param_groups
from comera.pretrained import load_pretrained, save_pretrained
from comera.rank.budget import round_
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.rank.size import model_size
from comera.recompute.blocks import recompute_

__all__ = [
    "TT",
    "TTM",
    "ComeraError",
    "EarlyStage",
    "LateStage",
    "RankController",
    "TensorizeConfig",
    "load_pretrained",
    "materialize_",
    "model_size",
    "param_groups",
    "recompute_",
    "round_",
    "save_pretrained",
    "tensorize_",
]
