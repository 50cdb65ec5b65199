"""Processes that are forked from one server, which has imported once what takes seconds."""

import multiprocessing
from multiprocessing.context import ForkServerContext

LIBRARIES = ["torch._dynamo", "torch.distributed.launcher.api", "accelerate", "peft", "pytorch_lightning", "jsonargparse"]
LIBRARIES += [f"transformers.{name}" for name in ("trainer", "models.bert.modeling_bert", "models.llama.modeling_llama")]
LIBRARIES += [f"comera.{name}" for name in ("recipes.code_lm.recipe", "recipes.dlrm.recipe", "recipes.lm.recipe")]


def context() -> ForkServerContext:
    """For `Process`. The server goes on from one test to the next, so all ask for the same."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(LIBRARIES)
    return made
