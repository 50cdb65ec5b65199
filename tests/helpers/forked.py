"""Processes that are forked from one server: it has imported once what takes seconds, whoever asks first."""

import multiprocessing
from multiprocessing.context import ForkServerContext

LIBRARIES = [
    "torch._dynamo",
    "torch.distributed.launcher.api",
    "accelerate",
    "peft",
    "pytorch_lightning",
    "transformers.trainer",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "jsonargparse",
    "comera.recipes.code_lm.recipe",
    "comera.recipes.dlrm.recipe",
    "comera.recipes.lm.recipe",
    "comera.report.html",
]


def context() -> ForkServerContext:
    """For `Process`. The server goes on from one test to the next, so all ask for the same."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(LIBRARIES)
    return made
